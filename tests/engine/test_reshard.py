"""`reshard` writes what `convert` would have, byte for byte, without the checkpoint and in a block's memory."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.checkpoints import open_checkpoint
from engine.convert import convert
from engine.errors import NameTaken, NotEnoughDisk, ShardCorrupt, ShardMissing, TargetNotAModel
from engine.reshard import COPY_BYTES, reshard
from engine.shards.manifest import read_manifest, verify
from engine.shards.writer import ModelWriter
from engine.timings import LayerTimings
from engine.transcribe import Engine
from tests.conftest import Recording

ALL = sys.maxsize


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def model(random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all dtypes, two layers a shard."""
    directory = tmp_path_factory.mktemp("model") / "model"
    convert(open_checkpoint(random_checkpoint), directory, keep={"decoder.1": "f16", "encoder.2": "f32"})
    return directory


@pytest.mark.parametrize("layers_per_shard", [1, 2, 3, ALL])
def test_there_and_back_is_what_conversion_writes(
    layers_per_shard: int, model: Path, random_checkpoint: Path, tmp_path: Path
) -> None:
    keep = {"decoder.1": "f16", "encoder.2": "f32"}
    expected = convert(open_checkpoint(random_checkpoint), tmp_path / "c", keep=keep, layers_per_shard=layers_per_shard)
    written = reshard(model, tmp_path / "there", layers_per_shard)
    assert written == expected == read_manifest(tmp_path / "there")
    verify(tmp_path / "there", written)
    assert contents(tmp_path / "there") == contents(tmp_path / "c")
    layers = [(file.start, file.end) for file in written.files if (file.stack, file.part) == ("decoder", "layers")]
    assert layers == {1: [(0, 1), (1, 2), (2, 3)], 2: [(0, 2), (2, 3)], 3: [(0, 3)], ALL: [(0, 3)]}[layers_per_shard]
    reshard(tmp_path / "there", tmp_path / "back", 2)
    assert contents(tmp_path / "back") == contents(model)
    assert {path.name for path in tmp_path.iterdir()} == {"c", "there", "back"}  # nothing half-written is left


def test_the_text_is_the_same_tokens(tiny_en: Path, recordings: dict[str, Recording], tmp_path: Path) -> None:
    transcripts = []
    for layers_per_shard in (None, 1, ALL):
        directory = tiny_en
        if layers_per_shard is not None:
            directory = tmp_path / str(layers_per_shard)
            reshard(tiny_en, directory, layers_per_shard)
        engine = Engine(directory)
        transcripts.append(engine.transcribe(recordings["digits"].path, LayerTimings()))
        engine.close()
    assert transcripts[0].segments[0].tokens
    assert transcripts[0] == transcripts[1] == transcripts[2]


def test_memory_is_a_blocks(tiny_en: Path, tmp_path: Path) -> None:
    """42 MB, the largest shard 21: two blocks are held, of the source and on its way out."""
    tracemalloc.start()
    try:
        reshard(tiny_en, tmp_path / "model", ALL)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * COPY_BYTES


@pytest.mark.parametrize("name", ["model", "link", "../here/model"])
def test_the_source_is_not_written_over(name: str, model: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    reshard(model, here / "model", 3)
    (here / "link").symlink_to("model")
    before = contents(here / "model")
    with pytest.raises(NameTaken, match="name another directory"):
        reshard(here / "model", here / name, 1)
    assert contents(here / "model") == before


def test_a_model_is_replaced_and_nothing_else(model: Path, tmp_path: Path) -> None:
    reshard(model, tmp_path / "out", 1)
    reshard(model, tmp_path / "out", 3)
    verify(tmp_path / "out", read_manifest(tmp_path / "out"))
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    before = contents(tmp_path / "out")
    with pytest.raises(TargetNotAModel, match="out is there"):
        reshard(model, tmp_path / "out", 1)
    assert contents(tmp_path / "out") == before


def test_a_disk_too_small_is_found_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.shards.writer.shutil.disk_usage", lambda path: SimpleNamespace(free=16 << 20))
    with pytest.raises(NotEnoughDisk, match="the model needs 16 MiB, the disk has 16 MiB free"):
        reshard(model, tmp_path / "out", 1)
    monkeypatch.setattr("engine.shards.writer.shutil.disk_usage", lambda path: SimpleNamespace(free=17 << 20))
    reshard(model, tmp_path / "out", 1)


def test_a_damaged_source_is_named_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    reshard(model, tmp_path / "damaged", 2)
    (tmp_path / "damaged" / "decoder-02-03.safetensors").unlink()
    with pytest.raises(ShardMissing, match="decoder-02-03"):
        reshard(tmp_path / "damaged", tmp_path / "out", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"damaged"}


def test_a_source_cut_short_while_it_is_read_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reshard(model, tmp_path / "source", 2)
    write = ModelWriter.write

    def cut_and_write(*arguments: object) -> object:
        shard = tmp_path / "source" / "decoder-00-02.safetensors"
        with shard.open("r+b") as file:
            file.truncate(shard.stat().st_size // 2)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelWriter, "write", cut_and_write)
    with pytest.raises(ShardCorrupt, match="decoder-00-02.safetensors was cut short"):
        reshard(tmp_path / "source", tmp_path / "out", 1)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}
