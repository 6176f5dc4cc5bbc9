"""What differs between processors: how wide an address is, what may be unaligned, what the hardware lacks.

The whole file runs on every processor; `make test-arm` runs it on emulated ones. The emulator shows neither alignment faults
nor timing, so alignment is tested by result, and by the files' own layout (test_convert.py).
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.checkpoints import open_checkpoint
from engine.convert import convert
from engine.dims import BLOCK
from engine.errors import ShardNotMapped
from engine.kernels import reference as kernels
from engine.quantization import Weight, quantize_blocks
from engine.shards.manifest import ShardFile
from engine.shards.mapping import Mapping
from engine.shards.pieces import Part, Piece
from engine.shards.store import ShardStore
from engine.tensor_file import TensorEntry, parse_header
from engine.timings import LayerTimings

EMULATED = os.environ.get("EMULATED_PROCESSOR")
RETURN = {"armv7l": b"\x1e\xff\x2f\xe1", "aarch64": b"\xc0\x03\x5f\xd6"}
LACKING = {
    "armv7l": {"VSDOT.S8 q0, q1, q2": b"\x44\x0d\x22\xfc", "VADD.F16 q0, q1, q2": b"\x44\x0d\x12\xf2"},
    "aarch64": {"SDOT v0.4s, v1.16b, v2.16b": b"\x20\x94\x82\x4e", "FADD v0.8h, v1.8h, v2.8h": b"\x20\x14\x42\x4e"},
}
"""Instructions of ARMv8.2 (Arm Architecture Reference Manual), little-endian: a Cortex-A7 or A53 has none of them."""


@pytest.fixture(scope="module")
def random_model(random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "random"
    convert(open_checkpoint(random_checkpoint), directory, "int8", report=lambda line: None)
    return directory


def ends_by(code: bytes) -> int:
    """Run machine code as a function in a child process; its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(not EMULATED, reason="a newer processor than the oldest board's may have these instructions")
@pytest.mark.parametrize("number", [0, 1])
def test_an_instruction_that_the_oldest_boards_lack_ends_the_process(number: int) -> None:
    """So that whatever of ours or of a library's used one would fail these tests."""
    machine = platform.machine()
    name, code = list(LACKING[machine].items())[number]
    assert ends_by(RETURN[machine]) == 0, "the way to run code here does not work"
    assert ends_by(code + RETURN[machine]) == -signal.SIGILL, name


@pytest.mark.skipif(not EMULATED, reason="only the emulator is told which processor to be")
def test_the_emulator_is_the_oldest_board() -> None:
    expected = {"cortex-a7": ("armv7l", 32), "cortex-a53": ("aarch64", 64)}
    assert (platform.machine(), 8 * struct.calcsize("P")) == expected[str(EMULATED)]


def test_a_shard_beyond_what_a_size_can_count_is_refused_or_mapped_but_never_misread(tmp_path: Path) -> None:
    """2 GiB and a page, sparse: more than a 32-bit `ssize_t` holds. The last tensor lies behind that border: by itself it is
    mapped everywhere, with the first one only where there is room between them."""
    size = (1 << 31) + 4096
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size - 8)
        file.write(struct.pack("<2f", 1.5, -2.5))
    shard_file = ShardFile(path.name, "decoder", "layers", 0, 1, size, "", {})
    last = TensorEntry("F32", (2,), size - 8, size)
    rest = TensorEntry("F32", (size // 4 - 1024 - 2,), 4096, size - 8)
    tail = Part(("decoder", "0"), {"mlp.0.bias": (last, None)})
    whole = Part(("decoder", "0"), {"mlp.0.weight": (rest, None), "mlp.0.bias": (last, None)})
    with path.open("rb") as opened:
        for part in (tail, whole):
            piece = Piece(shard_file, (part,), is_pinned=False)
            if part is whole and sys.maxsize < size:
                with pytest.raises(ShardNotMapped, match=str(size)):
                    Mapping(opened, piece)
                return
            mapping = Mapping(opened, piece)
            assert mapping.weights(part)["mlp.0.bias"].data.tolist() == [1.5, -2.5]
            mapping.unmap()


SCARCE = """
import resource, sys
from pathlib import Path
from engine.errors import ShardNotMapped
from engine.shards.store import ShardStore
from engine.timings import LayerTimings
store = ShardStore(Path(sys.argv[1]))
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 4096, resource.RLIM_INFINITY))
try:
    with store.layer("encoder", "0", LayerTimings()):
        print("mapped")
except ShardNotMapped as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with store.layer("encoder", "0", LayerTimings()):
    print("mapped later")
"""


@pytest.mark.skipif(bool(EMULATED), reason="the emulator's own address space would be limited")
def test_a43_no_room_to_map_a_shard_says_so_and_passes(random_model: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCARCE, random_model], capture_output=True, text=True)
    refused, later = done.stdout.splitlines()
    assert "finds no room to be mapped: use residency stream" in refused
    assert later == "mapped later"


def test_a_whole_model_maps_in_pieces_far_below_three_gibibytes(random_model: Path) -> None:
    """Streaming holds two shards, and what lies beside the embedding: mappings never add up."""
    store = ShardStore(random_model, "stream")
    timings = LayerTimings()
    for stack, layer in (("encoder", "stem"), ("encoder", "0"), ("decoder", "embedding"), ("decoder", "0")):
        with store.layer(stack, layer, timings):
            mapped = [
                line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(random_model) in line
            ]
            assert 1 <= len({name for name in mapped if "embedding" not in name}) <= 2
    store.close()


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5])
def test_unaligned_tensors_give_the_same_product(offset: int) -> None:
    """A file written by others may begin its data anywhere; ARMv7 faults on some unaligned loads."""
    rng = np.random.default_rng(offset)
    x = rng.standard_normal((3, BLOCK), dtype=np.float32)
    matrix = rng.standard_normal((7, BLOCK), dtype=np.float32)
    for stored in (Weight(matrix), Weight(matrix.astype(np.float16)), Weight(*quantize_blocks(matrix))):
        data = _shifted(stored.data, offset)
        scale = None if stored.scale is None else _shifted(stored.scale, offset)
        assert offset % data.dtype.alignment == 0 or not data.flags.aligned
        expected, found = np.empty((3, 7), np.float32), np.empty((3, 7), np.float32)
        scratch = np.empty(7 * BLOCK, np.float32)
        kernels.linear(x, stored, None, expected, scratch)
        kernels.linear(x, Weight(data, scale), None, found, scratch)
        assert np.allclose(found, expected, rtol=1e-6, atol=1e-6)


def _shifted(array: np.ndarray, offset: int) -> np.ndarray:
    """The same array at an address that is `offset` bytes past an aligned one."""
    buffer = bytearray(64 + array.nbytes)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % 16 + offset
    buffer[start : start + array.nbytes] = array.tobytes()
    return np.frombuffer(buffer, array.dtype, array.size, start).reshape(array.shape)


def test_every_float16_is_read_exactly() -> None:
    """All 65,536, against the definition (IEEE 754 binary16): without float16 hardware, NumPy converts in software."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    sign, exponent, fraction = bits >> 15, (bits >> 10) & 31, (bits & 1023).astype(np.float64)
    value = np.where(exponent == 0, fraction * 2.0**-24, (1 + fraction / 1024) * 2.0 ** (exponent.astype(np.float64) - 15))
    value = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), value) * np.where(sign, -1.0, 1.0)
    found = bits.astype(np.uint16).view(np.float16).astype(np.float32)
    assert np.array_equal(found, value.astype(np.float32), equal_nan=True)


def test_nothing_depends_on_denormals() -> None:
    """NumPy on ARMv7 computes with NEON, which flushes them to zero; elsewhere they stay. Both must do."""
    small = np.full((1, 2 * BLOCK), 1e-40, dtype=np.float32)
    codes, scale = quantize_blocks(small)
    assert not codes.any()
    assert scale.tolist() == [[1.0, 1.0]]  # a denormal scale would be a division by zero
    scores = np.array([[0.0, -95.0], [-3e38, -3e38], [1e-40, 0.0]], dtype=np.float32)
    kernels.softmax(scores)
    assert np.allclose(scores, [[1, 0], [0.5, 0.5], [0.5, 0.5]], atol=1e-30)
    out = np.empty_like(small)
    kernels.layer_norm(small, np.ones(2 * BLOCK, np.float32), np.zeros(2 * BLOCK, np.float32), out)
    assert np.allclose(out, 0, atol=1e-30)


def test_a_size_is_not_computed_in_32_bits(tmp_path: Path) -> None:
    """2^17 × 2^15 float32 are 2^34 bytes; in 32 bits that is 0, and an empty file would do."""
    header = b'{"w":{"dtype":"F32","shape":[131072,32768],"data_offsets":[0,0]}}'
    path = tmp_path / "overflow"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with path.open("rb") as file, pytest.raises(ValueError, match="do not fill"):
        parse_header(file)


def test_time_goes_on_after_2038(tmp_path: Path) -> None:
    """A board that runs for years, or whose clock is wrong: 2^31 seconds do not fit into 32 bits."""
    path = tmp_path / "file"
    path.touch()
    os.utime(path, (2**32 + 7, 2**32 + 7))
    assert path.stat().st_mtime == 2**32 + 7
