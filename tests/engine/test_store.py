"""The shard store: damage is named, streaming gives what residence gives, and what is unmapped is gone."""

from __future__ import annotations

import gc
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.checkpoints import open_checkpoint
from engine.convert import convert
from engine.dims import TILE_ROWS
from engine.errors import EngineError, ManifestInvalid, ModelNotFound, ModelOutdated, ShardCorrupt, ShardMismatch, ShardMissing
from engine.shards.manifest import MANIFEST_FILE, file_sha256, read_manifest
from engine.shards.residency import Residency
from engine.shards.store import ShardStore
from engine.timings import LayerTimings
from tests.random_checkpoint import random_tensors, write_ctranslate2


@pytest.fixture(scope="module")
def whole(random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "model"
    convert(open_checkpoint(random_checkpoint), directory)
    return directory


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shapes, other weights."""
    directory = tmp_path_factory.mktemp("other")
    write_ctranslate2(directory, tensors=random_tensors(seed=1))
    return directory


@pytest.fixture(scope="module")
def other_model(other_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("other-model") / "model"
    convert(open_checkpoint(other_checkpoint), directory)
    return directory


def _flip(data: bytes) -> bytes:
    spoiled = bytearray(data)
    spoiled[len(data) * 2 // 3] ^= 1
    return bytes(spoiled)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "0_bytes": lambda data: b"",
    "7_bytes": lambda data: data[:7],
    "header_only": lambda data: data[: 8 + struct.unpack("<Q", data[:8])[0]],
    "half": lambda data: data[: len(data) // 2],
    "one_byte_short": lambda data: data[:-1],
    "16_extra_bytes": lambda data: data + b"\0" * 16,
    "one_flipped_bit": _flip,
    "header_of_2_62": lambda data: struct.pack("<Q", 1 << 62) + data[8:],
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["encoder-02-03.safetensors", "decoder-embedding.safetensors", "vocabulary.safetensors"])
def test_a38_damaged_shard_is_named(file: str, damage: str, model: Path) -> None:
    path = model / file
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(ShardCorrupt, match=file):
        ShardStore(model)


@pytest.mark.parametrize("index", [0, 3, 6])
def test_a39_missing_shard_is_named_whatever_else_lies_there(index: int, model: Path) -> None:
    file = read_manifest(model).files[index].file
    shutil.copy(model / file, model / "copy.safetensors")  # the number of files is right again
    (model / file).unlink()
    with pytest.raises(ShardMissing, match=file):
        ShardStore(model)


def test_a39_swapped_shards_are_refused(model: Path) -> None:
    a, b = model / "encoder-00-02.safetensors", model / "decoder-00-02.safetensors"
    a.rename(model / "x")
    b.rename(a)
    (model / "x").rename(b)
    with pytest.raises(ShardCorrupt, match=r"(en|de)coder-00-02"):
        ShardStore(model)


def test_a39_strangers_are_ignored(model: Path) -> None:
    for name in (".DS_Store", "._encoder-stem.safetensors", "x.part", "other.safetensors"):
        (model / name).write_bytes(b"junk")
    ShardStore(model).close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads any file")
def test_a39_unreadable_shard_is_named(model: Path) -> None:
    (model / "encoder-stem.safetensors").chmod(0)
    with pytest.raises(ShardMissing, match="encoder-stem"):
        ShardStore(model)


def test_a_shard_of_another_checkpoint_is_a_mismatch(model: Path, other_model: Path) -> None:
    shutil.copy(other_model / "decoder-00-02.safetensors", model)
    with pytest.raises(ShardMismatch, match="decoder-00-02"):
        ShardStore(model)


def test_the_manifest_of_another_model_is_refused(model: Path, other_model: Path) -> None:
    shutil.copy(other_model / MANIFEST_FILE, model)
    with pytest.raises(ShardMismatch):
        ShardStore(model)


def _edit(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return apply


def test_a_model_of_an_earlier_version_is_told_from_a_damaged_one(model: Path) -> None:
    _edit(lambda m: m.update(version=1))(model / "manifest.json")
    with pytest.raises(ModelOutdated, match="fetch or convert the model again"):
        ShardStore(model)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_bytes(b"\xff\xfe"),
        _edit(lambda m: m.update(version=3)),
        _edit(lambda m: m.pop("dims")),
        _edit(lambda m: m.pop("alignment_heads")),
        _edit(lambda m: m.update(alignment_heads=None)),
        _edit(lambda m: m.update(alignment_heads=[])),
        _edit(lambda m: m.update(alignment_heads=[[0, 2]])),
        _edit(lambda m: m.update(alignment_heads=[[3, 0]])),
        _edit(lambda m: m.update(alignment_heads=[[True, 0]])),
        _edit(lambda m: m["files"][-1]["tensors"].pop("token_order")),
        _edit(lambda m: m["dims"].update(n_audio_state=65)),
        _edit(lambda m: m["dims"].update(n_vocab=10**12)),
        _edit(lambda m: m["dims"].update(n_text_layer=True)),
        _edit(lambda m: m["dims"].update(n_text_layer=4)),
        _edit(lambda m: m["files"].pop(1)),
        _edit(lambda m: m["files"][1].update(layers=[0, 3])),
        _edit(lambda m: m["files"][0].update(file="../encoder-stem.safetensors")),
        _edit(lambda m: m["files"][0].update(file="/etc/passwd")),
        _edit(lambda m: m["files"][0].update(tensors={})),
        _edit(lambda m: m["files"][1].update(layers=[None, 2])),
        _edit(lambda m: m["files"][1].update(layers=[0, {"a": 1}])),
        _edit(lambda m: m["files"][1].update(tensors=[])),
        _edit(lambda m: m["files"][1]["tensors"].pop("encoder.blocks.0.mlp.0.bias")),
        _edit(lambda m: m["files"][1]["tensors"]["encoder.blocks.0.mlp.0.bias"].update(dtype="F16")),
        _edit(lambda m: m["dims"].update(n_text_ctx=64)),
        _edit(lambda m: m["files"].append(m["files"][0])),
        _edit(lambda m: m["special_tokens"].update(eot=10**6)),
        _edit(lambda m: m["special_tokens"].pop("languages")),
    ],
)
def test_a_damaged_manifest_is_refused(damage: Callable[[Path], None], model: Path) -> None:
    damage(model / MANIFEST_FILE)
    with pytest.raises(ManifestInvalid):
        ShardStore(model)


def test_a_layer_in_two_files_is_refused(model: Path) -> None:
    """Files and manifest agree, so that nothing else is wrong with them."""
    _move(model, "decoder.blocks.0.mlp.0.bias", "decoder-00-02.safetensors", "decoder-02-03.safetensors")
    with pytest.raises(ManifestInvalid, match=r"holds a part of decoder\.0"):
        ShardStore(model)


def test_the_last_norm_beside_another_layer_is_refused(model: Path) -> None:
    for name in ("decoder.ln.weight", "decoder.ln.bias"):
        _move(model, name, "decoder-embedding.safetensors", "decoder-02-03.safetensors")
    with pytest.raises(ManifestInvalid, match=r"decoder-02-03\.safetensors holds decoder\.ln"):
        ShardStore(model)


def _move(model: Path, tensor: str, source: str, target: str) -> None:
    """Put a tensor into another shard, and let the manifest say so."""
    moved = load_file(model / source)[tensor]
    manifest = json.loads((model / MANIFEST_FILE).read_text())
    for entry in manifest["files"]:
        path = model / entry["file"]
        tensors = load_file(path)
        if entry["file"] == source:
            del tensors[tensor]
            entry["tensors"].pop(tensor)
        elif entry["file"] == target:
            tensors[tensor] = moved
            entry["tensors"][tensor] = {"dtype": "F32", "shape": list(moved.shape)}
        else:
            continue
        save_file(tensors, path, {"checkpoint": manifest["checkpoint"]})
        entry |= {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    (model / MANIFEST_FILE).write_text(json.dumps(manifest))


def test_no_manifest_says_how_to_get_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="thimble fetch"):
        ShardStore(tmp_path)


def _mappings(directory: Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.rsplit("/", 1)[1] for line in lines if str(directory) in line]


LAYERS = [("encoder", "stem"), *(("encoder", str(i)) for i in range(3)), ("encoder", "ln_post")]
LAYERS += [("decoder", str(i)) for i in range(3)]
TOKEN = [("decoder", "embedding"), *(("decoder", str(i)) for i in range(3)), ("decoder", "ln")]


def use(store: ShardStore, timings: LayerTimings, n_tokens: int = 1) -> None:
    """Ask for everything in the order of a window with so many tokens."""
    for stack, layer in LAYERS:
        with store.layer(stack, layer, timings) as weights:
            assert weights
    for _ in range(n_tokens):
        for stack, layer in TOKEN:
            with store.layer(stack, layer, timings) as weights:
                assert weights
        for _rows, weights in store.embedding_blocks(timings):
            assert weights["token_embedding.weight"].data.any()


def test_streaming_unmaps_what_residence_keeps(model: Path) -> None:
    stream, resident = ShardStore(model, "stream"), ShardStore(model, "resident")
    assert not _mappings(model)
    timings = LayerTimings()
    use(stream, timings)
    assert timings.shard_loads == 3 + 2 + 2 + 1 + 1  # the embedding, and what lies beside it
    stream.evict()
    assert set(_mappings(model)) == {"decoder-embedding.safetensors"}  # beside it: two runs, one of the norm's page
    stream.close()
    assert not _mappings(model)
    for _ in range(2):
        use(resident, timings)
    assert len(_mappings(model)) == 6
    assert timings.shard_loads == 9 + 6
    resident.close()
    assert not _mappings(model)


@pytest.mark.parametrize("slots", [1, 2])
def test_every_layer_has_its_own_load_and_compute(slots: int, model: Path) -> None:
    """A token is one pass over the embedding, and one over what lies beside it."""
    store, timings = ShardStore(model, Residency(frozenset(), slots, TILE_ROWS)), LayerTimings()
    use(store, timings, n_tokens=4)
    store.close()
    assert set(timings.load) == set(timings.wait) == set(timings.compute) == {*LAYERS, *TOKEN}
    counts = {layer: tally.count for layer, tally in timings.compute.items()}
    assert counts == dict.fromkeys(LAYERS[:5], 1) | dict.fromkeys(LAYERS[5:], 5) | {TOKEN[0]: 8, TOKEN[-1]: 4}
    loads = {layer: tally.count for layer, tally in timings.load.items()}
    assert loads == dict.fromkeys(LAYERS[:5], 1) | dict.fromkeys(LAYERS[5:], 5) | {TOKEN[0]: 1 + 4, TOKEN[-1]: 1}
    if slots == 1:  # nothing is read ahead: all of it stands in the way
        assert all(timings.wait[layer].seconds >= load.seconds for layer, load in timings.load.items())
        assert timings.prefetch_hits == timings.prefetch_waits == 0
    else:
        assert timings.prefetch_hits + timings.prefetch_waits == 5 + 5 * 3 + 4


def test_weights_are_views_of_the_mapping_and_read_only(model: Path) -> None:
    store = ShardStore(model)
    with store.layer("decoder", "0", LayerTimings()) as weights:
        weight = weights["attn.query.weight"]
        assert weight.data.base is not None
        assert not weight.data.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            weight.data[0, 0] = 1
    del weight
    store.close()


def test_a_view_that_outlives_its_layer_is_found_out(model: Path) -> None:
    """The mapping cannot go away under a live view: the fault shows at once, not as a crash later."""
    store = ShardStore(model, "stream")
    with store.layer("decoder", "0", LayerTimings()) as weights:
        kept = weights["attn.query.weight"].data
    with pytest.raises(BufferError):
        store.close()
    del kept


def test_a_shard_that_shrinks_after_the_start_is_refused(model: Path) -> None:
    store = ShardStore(model)
    path = model / "decoder-00-02.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(EngineError, match="decoder-00-02"), store.layer("decoder", "0", LayerTimings()):
        pass


def test_a_model_that_takes_the_name_of_a_verified_one_is_not_mixed_with_it(model: Path, other_checkpoint: Path) -> None:
    """The store keeps what it verified: a model converted to the same place is another inode."""
    store = ShardStore(model, "stream")
    with store.layer("decoder", "0", LayerTimings()) as weights:
        before = weights["attn.query.weight"].data.copy()
    convert(open_checkpoint(other_checkpoint), model)
    with store.layer("encoder", "0", LayerTimings()), store.layer("decoder", "0", LayerTimings()) as weights:
        assert np.array_equal(weights["attn.query.weight"].data, before)
    store.close()


def test_no_descriptor_stays_open(model: Path) -> None:
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(20):
        store = ShardStore(model, "stream")
        use(store, LayerTimings())
        store.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_vocabulary_is_a_copy_that_outlives_the_store(model: Path) -> None:
    store = ShardStore(model)
    vocabulary = store.vocabulary()
    store.close()
    assert vocabulary.token_bytes.tobytes()[:256] == bytes(range(256))
    assert vocabulary.token_begins.dtype == np.uint32
