"""Conversion: what is written, that it appears whole or not at all, and the content's digest."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open

from engine.checkpoints import open_checkpoint
from engine.convert import content_digest, convert
from engine.dims import BLOCK
from engine.errors import CheckpointInvalid, NotEnoughDisk, TargetNotAModel
from engine.quantization import Weight
from engine.shards.manifest import read_manifest, verify
from engine.tensor_file import read_header
from tests.random_checkpoint import Tensors, random_tensors, write_ctranslate2, write_huggingface


def stored(directory: Path) -> dict[str, np.ndarray]:
    """Everything in a model directory, as the safetensors library reads it."""
    tensors = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a dict
    return tensors


@pytest.mark.parametrize("weights", ["f32", "f16", "int8"])
def test_every_tensor_is_stored_once_as_asked(weights: str, random_checkpoint: Path, tmp_path: Path) -> None:
    convert(open_checkpoint(random_checkpoint), tmp_path / "model", weights)
    tensors = stored(tmp_path / "model")
    for name, original in random_tensors().items():
        tensor = tensors.pop(name)
        if original.ndim == 1:
            assert tensor.dtype == np.float32
        elif weights == "int8" and original.ndim == 2 and "positional" not in name:
            assert tensor.dtype == np.int8
            scale = tensors.pop(f"{name}.scale")
            assert scale.shape == (len(tensor), tensor.shape[1] // BLOCK)
            expanded = Weight(tensor, scale).expand(np.empty(tensor.size, np.float32))
            step = np.repeat(scale, BLOCK, axis=1)
            assert np.all(np.abs(expanded - original.astype(np.float32)) <= 0.501 * step)
            continue
        else:
            assert tensor.dtype == (np.float32 if weights == "f32" else np.float16)
        assert np.array_equal(tensor, original.astype(tensor.dtype)), name
    assert set(tensors) == {"token_bytes", "token_begins", "token_order"}


def test_the_manifest_tells_layers_as_half_open_intervals_and_verifies(random_checkpoint: Path, tmp_path: Path) -> None:
    written = convert(open_checkpoint(random_checkpoint), tmp_path / "model")
    manifest = read_manifest(tmp_path / "model")
    assert manifest == written
    verify(tmp_path / "model", manifest)
    assert [(f.stack, f.part, f.start, f.end) for f in manifest.files] == [
        ("encoder", "stem", 0, 0),
        ("encoder", "layers", 0, 2),
        ("encoder", "layers", 2, 3),
        ("decoder", "layers", 0, 2),
        ("decoder", "layers", 2, 3),
        ("decoder", "embedding", 0, 0),
        ("tokenizer", "vocabulary", 0, 0),
    ]
    assert manifest.source["format"] == "ctranslate2"
    assert set(manifest.source["sha256"]) == {"model.bin", "config.json", "tokenizer.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"model"}  # nothing half-written is left


def test_offsets_are_aligned_to_the_element(random_checkpoint: Path, tmp_path: Path) -> None:
    manifest = convert(open_checkpoint(random_checkpoint), tmp_path / "model")
    sizes = {"F32": 4, "U32": 4, "F16": 2, "I8": 1, "U8": 1}
    for file in manifest.files:
        header = read_header(tmp_path / "model" / file.file)
        assert all(entry.begin % sizes[entry.dtype] == 0 for entry in header.entries.values())


def test_content_digest_is_the_same_whatever_the_container(tmp_path: Path) -> None:
    tensors = random_tensors()
    digests = set()
    for name, write, values in (
        ("ct2", write_ctranslate2, tensors),
        ("hf", write_huggingface, tensors),
        ("hf32", write_huggingface, {n: t.astype(np.float32) for n, t in tensors.items()}),
    ):
        (tmp_path / name).mkdir()
        write(tmp_path / name, tensors=values)
        digests.add(content_digest(open_checkpoint(tmp_path / name)))
    assert len(digests) == 1
    changed = {n: t.copy() for n, t in tensors.items()}
    changed["decoder.ln.bias"][3] += np.float16(0.01)
    (tmp_path / "changed").mkdir()
    write_ctranslate2(tmp_path / "changed", tensors=changed)
    assert content_digest(open_checkpoint(tmp_path / "changed")) not in digests


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["decoder/layer_1/ffn/linear_0/weight"][5, 5] = np.nan

    write_ctranslate2(tmp_path, spoil)
    with pytest.raises(CheckpointInvalid, match="decoder.blocks.1.mlp.0.weight"):
        convert(open_checkpoint(tmp_path), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_float32_beyond_float16_is_refused_for_float16(tmp_path: Path) -> None:
    tensors = {n: t.astype(np.float32) for n, t in random_tensors().items()}
    tensors["encoder.conv2.weight"][0, 0, 0] = 1e6
    write_huggingface(tmp_path, tensors=tensors)
    with pytest.raises(CheckpointInvalid, match="encoder.conv2.weight has values beyond float16"), np.errstate(over="ignore"):
        convert(open_checkpoint(tmp_path), tmp_path / "model", "f16")


def test_a44_disk_too_small_leaves_the_old_model(
    random_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = convert(open_checkpoint(random_checkpoint), tmp_path / "model", "f16")
    monkeypatch.setattr("engine.shards.writer.shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(NotEnoughDisk, match="the disk has 1 MiB free"):
        convert(open_checkpoint(random_checkpoint), tmp_path / "model", "int8")
    verify(tmp_path / "model", read_manifest(tmp_path / "model"))
    assert read_manifest(tmp_path / "model") == old


def test_a44_disk_full_while_writing_leaves_nothing_and_a_rerun_succeeds(random_checkpoint: Path, tmp_path: Path) -> None:
    """A file-size limit stands in for a full disk: the same write fails, with EFBIG."""
    target = tmp_path / "model"
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from engine.checkpoints import open_checkpoint; from engine.convert import convert\n"
        "from engine.errors import EngineError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "checkpoint = open_checkpoint(Path(sys.argv[1]))\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, {resource.RLIM_INFINITY}))\n"
        "try: convert(checkpoint, Path(sys.argv[2]))\n"
        "except EngineError as error: sys.exit(error.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, random_checkpoint, target], capture_output=True, text=True)
    assert done.stderr.strip() == "not_enough_disk"
    assert not list(tmp_path.iterdir())
    convert(open_checkpoint(random_checkpoint), target)
    verify(target, read_manifest(target))


def test_a44_killed_halfway_leaves_no_model_and_a_rerun_succeeds(random_checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    script = (
        "import sys, time; from pathlib import Path\n"
        "from engine.checkpoints import open_checkpoint; from engine.convert import convert\n"
        "def report(line):\n    print(line, flush=True)\n    time.sleep(60)\n"
        "convert(open_checkpoint(Path(sys.argv[1])), Path(sys.argv[2]), report=report)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, random_checkpoint, target], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline()  # the first shard is written
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not target.exists()
    convert(open_checkpoint(random_checkpoint), target)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("held", ["thesis.txt", "model.bin", "x.safetensors"])
def test_nothing_but_a_model_is_ever_replaced(held: str, random_checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    convert(open_checkpoint(random_checkpoint), target)  # an empty directory is filled
    convert(open_checkpoint(random_checkpoint), target)  # a model is replaced
    for path in target.iterdir():
        path.unlink()
    (target / held).write_text("years of work")
    with pytest.raises(TargetNotAModel, match="target is there"):
        convert(open_checkpoint(random_checkpoint), target)
    assert (target / held).read_text() == "years of work"
    with pytest.raises(TargetNotAModel):
        convert(open_checkpoint(random_checkpoint), random_checkpoint)  # its own source
    assert (random_checkpoint / "model.bin").exists()


def test_a_running_process_keeps_the_model_it_has_mapped(random_checkpoint: Path, tmp_path: Path) -> None:
    """Shards are never written in place: the old inode lives as long as somebody maps it."""
    convert(open_checkpoint(random_checkpoint), tmp_path / "model", "f32")
    before = (tmp_path / "model" / "encoder-stem.safetensors").stat().st_ino
    with (tmp_path / "model" / "encoder-stem.safetensors").open("rb") as held:
        content = held.read()
        convert(open_checkpoint(random_checkpoint), tmp_path / "model", "int8")
        held.seek(0)
        assert held.read() == content
    assert (tmp_path / "model" / "encoder-stem.safetensors").stat().st_ino != before
