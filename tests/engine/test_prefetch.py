"""Reading ahead: what comes next is there, what does not come is given up, errors surface at use, nothing is left behind."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from engine.checkpoints import open_checkpoint
from engine.convert import convert
from engine.dims import TILE_ROWS
from engine.errors import Cancelled, ShardCorrupt
from engine.shards import mapping
from engine.shards.mapping import Mapping
from engine.shards.residency import Residency
from engine.shards.store import ShardStore
from engine.timings import LayerTimings
from engine.transcribe import Engine
from tests.conftest import Recording

HANG_SECONDS = 60.0
EMULATED = bool(os.environ.get("EMULATED_PROCESSOR"))
ENCODER = [("encoder", name) for name in ("stem", "0", "1", "2", "ln_post")]
DECODER = [("decoder", name) for name in "012"]


@pytest.fixture(scope="module")
def whole(random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "model"
    convert(open_checkpoint(random_checkpoint), directory)
    return directory


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> object:
    yield
    gc.collect()
    for thread in prefetch_threads():  # of a store that was never closed: it has been told
        thread.join(HANG_SECONDS)
    assert not prefetch_threads()


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def held(store: ShardStore) -> list[str]:
    """Layers mapped or on their way, the first part of each piece; once the thread has done what it can."""
    readings = [reading for _, reading in store._stream._held]
    assert all(reading._is_over.wait(HANG_SECONDS) for reading in readings)
    return [".".join(reading.piece.parts[0].key) for reading in readings]


def window(store: ShardStore, timings: LayerTimings) -> None:
    for stack, layer in ENCODER + DECODER:
        with store.layer(stack, layer, timings):
            pass


def token(store: ShardStore, timings: LayerTimings) -> None:
    for stack, layer in DECODER:
        with store.layer(stack, layer, timings):
            pass
    for _ in store.embedding_blocks(timings):
        pass


def test_what_comes_next_is_read_while_one_is_in_use_and_round_again(model: Path) -> None:
    store, timings, seen = ShardStore(model, "stream"), LayerTimings(), []
    for stack, layer in (*ENCODER, *DECODER, *DECODER):
        with store.layer(stack, layer, timings):
            seen.append(held(store))
    for _ in store.embedding_blocks(timings):
        seen.append(held(store))
    pairs = [["encoder.stem", "encoder.0"], ["encoder.0", "encoder.2"], ["encoder.2", "decoder.0"]]
    pairs += [["decoder.0", "decoder.2"], ["decoder.2", "decoder.0"]]  # cross K/V, then the first token
    pairs += [["decoder.0", "decoder.2"], ["decoder.2", "decoder.embedding"], ["decoder.embedding", "decoder.0"]]
    parts = [1, 2, 2, 2, 1, 2, 1, 1]
    assert seen == [pair for pair, n in zip(pairs, parts, strict=True) for _ in range(n)]
    # Nothing could be ahead of the very first; whatever the thread had time for was there when it was asked for.
    assert (timings.prefetch_waits, timings.prefetch_hits) == (1, len(seen) - 1)
    store.close()


def test_where_only_the_encoder_is_streamed_the_next_window_is_read_ahead(model: Path) -> None:
    pinned = frozenset(path.name for path in model.glob("decoder-*"))
    store, timings = ShardStore(model, Residency(pinned, 2, TILE_ROWS)), LayerTimings()
    window(store, timings)
    token(store, timings)
    assert held(store) == ["encoder.stem", "encoder.0"]
    store.close()


def test_one_slot_reads_nothing_ahead_and_needs_no_thread(model: Path) -> None:
    store, timings = ShardStore(model, Residency(frozenset(), 1, TILE_ROWS)), LayerTimings()
    with store.layer("encoder", "stem", timings):
        assert len(store._stream._held) == 1
    assert not store._stream._held
    token(store, timings)
    assert not prefetch_threads()
    assert timings.prefetch_hits == timings.prefetch_waits == 0
    store.close()


@pytest.mark.parametrize("slots", [2, 3])
def test_any_order_gives_the_right_weights_and_fills_no_more_slots(slots: int, model: Path) -> None:
    """What was predicted wrongly is given up while the thread is at it: 400 jumps, most of them unforeseen."""
    resident, stream = ShardStore(model), ShardStore(model, Residency(frozenset(), slots, TILE_ROWS))
    timings, jumps = LayerTimings(), random.Random(slots)  # noqa: S311
    keys = [*ENCODER, *DECODER, ("decoder", "embedding"), ("decoder", "ln")]
    expected = {}
    for key in keys:
        with resident.layer(*key, timings) as weights:
            expected[key] = {name: weight.data.copy() for name, weight in weights.items()}
    for _ in range(400):
        key = jumps.choice(keys)
        with stream.layer(*key, timings) as weights:
            assert set(weights) == set(expected[key])
            assert all(np.array_equal(weights[name].data, data) for name, data in expected[key].items())
            assert len(stream._stream._held) <= slots
        if jumps.random() < 0.1:
            stream.evict()
    resident.close()
    stream.close()


def test_evicting_ends_the_thread_and_unmaps_what_is_streamed_but_not_for_good(model: Path) -> None:
    store, timings = ShardStore(model, "stream"), LayerTimings()
    for _ in range(20):
        window(store, timings)
        token(store, timings)
        assert len(prefetch_threads()) == 1
        store.evict()
        assert not prefetch_threads()
        assert {path for path in resident_bytes(model) if "embedding" not in path} == set()
    store.close()


def test_a_store_that_nobody_closes_takes_its_thread_along(model: Path) -> None:
    store = ShardStore(model, "stream")
    window(store, LayerTimings())
    (thread,) = prefetch_threads()
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    del store
    assert len(list(Path("/proc/self/fd").iterdir())) <= n_open - 7  # its files, at once: no collector comes
    thread.join(HANG_SECONDS)
    assert not thread.is_alive()


def test_the_thread_ends_with_the_job_however_that_ends(tiny_en: Path, recordings: dict[str, Recording]) -> None:
    engine = Engine(tiny_en, residency="stream")
    alive = []

    def should_stop() -> bool:
        alive.append(len(prefetch_threads()))
        return len(alive) > 20

    with pytest.raises(Cancelled):
        engine.transcribe(recordings["digits"].path, LayerTimings(), should_stop=should_stop)
    assert max(alive) == 1
    assert not prefetch_threads()
    engine.transcribe(recordings["digits"].path, LayerTimings())
    assert not prefetch_threads()
    engine.close()


def test_what_an_error_left_in_use_goes_with_the_next_layer(model: Path) -> None:
    """The traceback holds views: the job's end must not hide its error behind another one."""
    store, timings = ShardStore(model, "stream"), LayerTimings()

    def compute() -> None:
        with store.layer("decoder", "0", timings) as weights:
            matrix = weights["attn.query.weight"].data
            raise ZeroDivisionError(matrix.size)

    with pytest.raises(ZeroDivisionError) as caught:
        compute()
    store.evict()
    assert "decoder-00-02.safetensors" in resident_bytes(model)
    del caught
    with store.layer("encoder", "stem", timings):
        assert held(store) == ["encoder.stem", "encoder.0"]
    window(store, timings)  # through the same shard
    store.close()


def test_a_shard_cut_short_is_named_where_it_is_used_and_not_before(model: Path) -> None:
    store, timings = ShardStore(model, "stream"), LayerTimings()
    path = model / "encoder-02-03.safetensors"
    whole = path.read_bytes()
    with store.layer("encoder", "stem", timings):
        os.truncate(path, 4096)
    for layer in ("0", "1"):  # while the thread meets the damage
        with store.layer("encoder", layer, timings):
            held(store)
    for _ in range(2):  # again and again, as long as it lasts
        with pytest.raises(ShardCorrupt, match="encoder-02-03"), store.layer("encoder", "2", timings):
            pass
    path.write_bytes(whole)
    with store.layer("encoder", "2", timings):
        pass
    store.close()


@pytest.mark.parametrize("has_populate", [True, False])
def test_a_file_that_ends_under_its_mapping_is_an_error_and_no_signal(
    has_populate: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_populate and (EMULATED or not mapping._has_populate()):
        pytest.skip("Linux before 5.14; the emulator says yes and does nothing")
    monkeypatch.setattr(mapping, "_has_populate", lambda: has_populate)
    store = ShardStore(model)
    piece, number = store._cut.layers["decoder", "0"]
    with (model / piece.file.file).open("rb") as opened:
        cut_short = Mapping(opened, piece)
        os.truncate(model / piece.file.file, 4096)
        with pytest.raises(ShardCorrupt, match=r"has 4096 bytes"):
            cut_short.read(piece.parts[number], lambda: True)
        cut_short.unmap()
    store.close()


@pytest.mark.parametrize("has_populate", [True, False])
def test_reading_brings_in_every_page_and_unmapping_gives_them_back(
    has_populate: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any kernel: with what Linux 5.14 has, and without."""
    if has_populate and (EMULATED or not mapping._has_populate()):
        pytest.skip("Linux before 5.14; the emulator says yes and does nothing")
    monkeypatch.setattr(mapping, "_has_populate", lambda: has_populate)
    monkeypatch.setattr(mapping, "READ_BYTES", 4 * mmap.PAGESIZE)
    store, timings = ShardStore(model, Residency(frozenset(), 1, TILE_ROWS)), LayerTimings()
    name = "decoder-00-02.safetensors"
    for layer in ("0", "1"):
        with store.layer("decoder", layer, timings):
            found = resident_bytes(model)[name]
    assert found >= store._cut.layers["decoder", "0"][0].n_bytes
    assert name not in resident_bytes(model)
    store.close()


def resident_bytes(directory: Path) -> dict[str, int]:
    """Of the directory's files in this process's memory, by name (smaps, proc(5))."""
    found: dict[str, int] = {}
    name = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split(maxsplit=1)[0].endswith(":"):
            name = line.rsplit("/", 1)[1] if str(directory) in line else None
        elif name and line.startswith("Rss:"):
            found[name] = found.get(name, 0) + int(line.split()[1]) * 1024
    return found


NO_ROOM = """
import resource, sys
from pathlib import Path
from engine.errors import ShardNotMapped
from engine.shards.store import ShardStore
from engine.timings import LayerTimings
store, timings = ShardStore(Path(sys.argv[1]), "stream"), LayerTimings()
for layer in ("stem", "0"):
    with store.layer("encoder", layer, timings):
        pass
with store.layer("encoder", "1", timings):
    [reading._is_over.wait() for _, reading in store._stream._held]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used // 2, resource.RLIM_INFINITY))
# From here on the thread can map nothing; what it had mapped is there.
for layer in ("2", "ln_post"):
    with store.layer("encoder", layer, timings):
        print(layer)
try:
    with store.layer("decoder", "0", timings):
        print("mapped")
except ShardNotMapped as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with store.layer("decoder", "0", timings):
    print("mapped later")
"""


@pytest.mark.skipif(EMULATED, reason="the emulator's own address space would be limited")
def test_a43_the_threads_lack_of_room_is_told_where_the_shard_is_used(model: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NO_ROOM, model], capture_output=True, text=True, timeout=HANG_SECONDS)
    *before, refused, later = done.stdout.splitlines()
    assert before == ["2", "ln_post"]
    assert "decoder-00-02.safetensors" in refused
    assert "finds no room to be mapped" in refused
    assert later == "mapped later"


ENDING = """
import sys
from pathlib import Path
from engine.shards.store import ShardStore
from engine.timings import LayerTimings
kept = ShardStore(Path(sys.argv[1]), "stream")
with kept.layer("encoder", "stem", LayerTimings()):
    exec(sys.argv[2])
"""


@pytest.mark.parametrize(("ending", "status"), [("pass", 0), ("sys.exit(3)", 3), ("1 / 0", 1)])
def test_an_open_store_keeps_no_process_from_ending(ending: str, status: int, model: Path) -> None:
    command = [sys.executable, "-c", ENDING, model, ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == status
    assert "Fatal" not in done.stderr


def cached_pages(path: Path) -> list[bool]:
    """Whether each page of a file is in the page cache (mincore(2), which tells a file's owner)."""
    n_bytes = path.stat().st_size
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), n_bytes, prot=mmap.PROT_READ) as mapped:
        found = (ctypes.c_ubyte * -(-n_bytes // mmap.PAGESIZE))()
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), found) == 0
    return [bool(page & 1) for page in found]


def drop_from_page_cache(path: Path) -> None:
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_what_the_page_cache_loses_is_dropped_at_once_and_the_rest_left_there(model: Path) -> None:
    """The test plays the kernel that makes room: it drops one shard's pages between two tokens."""
    store, timings = ShardStore(model, Residency(frozenset(), 1, TILE_ROWS)), LayerTimings()
    lost, kept = (model / f"decoder-{part}.safetensors" for part in ("02-03", "00-02"))
    drop_from_page_cache(lost)
    if any(cached_pages(lost)):
        pytest.skip("this file system keeps its pages in memory")
    token(store, timings)
    if not timings.shard_read_bytes:
        pytest.skip("this kernel does not count a thread's reads")
    for _ in range(2):
        token(store, timings)
        assert all(cached_pages(lost) + cached_pages(kept))
    drop_from_page_cache(lost)
    for _ in range(2):
        before = timings.shard_read_bytes
        token(store, timings)
        assert lost.stat().st_size <= timings.shard_read_bytes - before < lost.stat().st_size + kept.stat().st_size // 2
        assert not any(cached_pages(lost))
        assert all(cached_pages(kept))
    store.evict()  # the next job tries again
    token(store, timings)
    assert all(cached_pages(lost))
    store.close()


def test_a_page_that_goes_before_its_use_is_counted(model: Path) -> None:
    store, timings = ShardStore(model, Residency(frozenset(), 1, TILE_ROWS)), LayerTimings()
    with store.layer("decoder", "0", timings) as weights:
        assert weights["mlp.0.weight"].data.any()
    assert timings.compute_major_faults == 0
    with store.layer("decoder", "2", timings) as weights:
        for run in store._stream._held[0][1]._mapping._maps:
            run.madvise(mmap.MADV_DONTNEED)  # or the page cache could not drop it
        drop_from_page_cache(model / "decoder-02-03.safetensors")
        if any(cached_pages(model / "decoder-02-03.safetensors")):
            pytest.skip("this file system keeps its pages in memory")
        assert weights["mlp.0.weight"].data.any()
    assert timings.compute_major_faults > 0
    store.close()
