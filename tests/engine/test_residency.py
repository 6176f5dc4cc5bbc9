"""Plans: what they pin and stream, in which order, in how many bytes; and that no plan changes a bit of any result."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.checkpoints import open_checkpoint
from engine.convert import convert
from engine.decoding import DecodingOptions
from engine.dims import TILE_ROWS
from engine.kv_cache import KV_POLICIES
from engine.model import Whisper
from engine.quantization import Weight
from engine.shards.manifest import Manifest, read_manifest
from engine.shards.pieces import Place
from engine.shards.residency import RESIDENCIES, Residency, block_bytes, named
from engine.shards.store import ShardStore
from engine.tail import whole
from engine.timings import LayerTimings
from engine.transcribe import Engine
from tests.conftest import Recording
from tests.random_checkpoint import DIMS, random_tensors, write_ctranslate2

WIDE = replace(DIMS, n_vocab=3 * TILE_ROWS + 100)
"""A vocabulary of several blocks."""
TOKENS = [265, 3, 77, 200, 256, 31]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("wide")
    write_ctranslate2(directory, tensors=random_tensors(WIDE))
    for weights in ("f32", "f16", "int8"):
        convert(open_checkpoint(directory), directory / weights, weights)
    return {weights: directory / weights for weights in ("f32", "f16", "int8")}


@pytest.fixture(scope="module")
def log_mel() -> np.ndarray:
    return np.random.default_rng(2).uniform(-1.5, 1.5, (DIMS.n_frames, DIMS.n_mels)).astype(np.float32)


def plans(manifest: Manifest) -> Iterator[Residency]:
    """Nothing pinned with one to three slots; of INT8 weights also each file alone, all but one, and all."""
    for slots in (1, 2, 3):
        yield Residency(frozenset(), slots, TILE_ROWS * slots)
    if manifest.weights == "int8":
        files = frozenset(file.file for file in manifest.files if file.stack != "tokenizer")
        for number, name in enumerate(sorted(files)):
            yield Residency(frozenset({name}), 2 + number % 2, TILE_ROWS)
            yield Residency(files - {name}, 1 + number % 2, 2 * TILE_ROWS)
        yield Residency(files, 2, TILE_ROWS)


def results(store: ShardStore, log_mel: np.ndarray, kv: str) -> list[np.ndarray]:
    """Of two windows: audio features, logits of every token, probabilities of a text."""
    model, timings, out = Whisper(store, kv), LayerTimings(), []
    for window in (log_mel, -log_mel):
        out.append(model.encoder.encode(window, whole(0, model.dims.n_audio_ctx), timings, lambda: None).copy())
        model.begin_window(window, timings, lambda: None)
        out.append(model.decoder.step(TOKENS[:3], [0, 2], timings).copy())
        out += [model.decoder.step([token], [0], timings).copy() for token in TOKENS[3:]]
        model.decoder.restart()
        likely = model.decoder.token_probabilities(TOKENS, slice(1, 6), 2 * TILE_ROWS + 7, timings, lambda *score: None)
        assert 0 < likely.min() < likely.max() < 1
        out.append(likely)
    return out


def mapped_bytes(directory: Path) -> int:
    """Of the directory's files in this process's address space."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split(maxsplit=1)[0].split("-") for line in lines if str(directory) in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ends)


@pytest.mark.parametrize(("weights", "kv"), [("f32", "f32"), ("f16", "int8"), *(("int8", kv) for kv in KV_POLICIES)])
def test_every_plan_gives_the_same_bits(weights: str, kv: str, models: dict[str, Path], log_mel: np.ndarray) -> None:
    resident = ShardStore(models[weights])
    expected = results(resident, log_mel, kv)
    resident.close()
    for plan in plans(resident.manifest):
        store = ShardStore(models[weights], plan)
        for found, wanted in zip(results(store, log_mel, kv), expected, strict=True):
            assert np.array_equal(found, wanted), plan
        store.close()


@pytest.mark.parametrize("word_timestamps", [False, True])
def test_tiny_en_says_the_same_however_it_is_streamed(
    word_timestamps: bool, tiny_en: Path, recordings: dict[str, Recording]
) -> None:
    """Real weights, with the passes that only real decoding makes: prefill, many tokens, word times."""
    manifest = read_manifest(tiny_en)
    options = DecodingOptions(word_timestamps=word_timestamps)
    (embedding,) = (file.file for file in manifest.files if file.part == "embedding")
    texts = []
    for plan in (
        named("resident", manifest),
        named("stream", manifest),
        replace(named("stream", manifest), slots=1),
        Residency(frozenset({embedding}), 3, TILE_ROWS),
    ):
        engine = Engine(tiny_en, "int8", plan)
        texts.append(engine.transcribe(recordings["digits"].path, LayerTimings(), options).segments)
        engine.close()
    assert texts[0]
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("weights", ["f32", "int8"])
def test_no_plan_maps_more_than_it_promises(weights: str, models: dict[str, Path], log_mel: np.ndarray) -> None:
    """Looked at whenever a layer is in use, with a thread that maps ahead as fast as it can."""
    manifest = read_manifest(models[weights])
    for plan in plans(manifest):
        store = ShardStore(models[weights], plan)
        peaks = watch(store, models[weights])
        model, timings = Whisper(store, "int8"), LayerTimings()
        for _ in range(2):  # what is pinned is all mapped in the second window
            model.begin_window(log_mel, timings, lambda: None)
            for token in TOKENS[:2]:
                model.decoder.step([token], [0], timings)
        promised = plan.weight_bytes(manifest)
        assert max(peaks) <= promised, plan
        if plan.slots == 1:  # with more, the largest piece rarely stands beside one as large
            assert max(peaks) > promised - 16 * mmap.PAGESIZE, plan
        store.close()
        assert mapped_bytes(models[weights]) == 0


def watch(store: ShardStore, directory: Path) -> list[int]:
    """Mapped bytes at every use of a layer from now on."""
    use, sizes = store._use, []

    @contextmanager
    def watched(place: Place, timings: LayerTimings) -> Iterator[dict[str, Weight]]:
        with use(place, timings) as weights:
            sizes.append(mapped_bytes(directory))
            yield weights

    store._use = watched
    return sizes


def test_tiny_en_streams_in_a_quarter_of_its_bytes(tiny_en: Path) -> None:
    manifest = read_manifest(tiny_en)
    resident, stream = (named(name, manifest).weight_bytes(manifest) for name in RESIDENCIES)
    assert resident == pytest.approx(manifest.n_bytes, rel=0.02)
    assert stream < resident / 3.5
    (embedding,) = (file for file in manifest.files if file.part == "embedding")
    shards = [file.n_bytes for file in manifest.files if file.part in ("stem", "layers")]
    assert block_bytes(embedding, named("stream", manifest).embedding_rows) <= max(shards)


def test_layers_and_blocks_come_in_the_order_of_their_use(models: dict[str, Path]) -> None:
    store = ShardStore(models["int8"], Residency(frozenset(), 2, 2 * TILE_ROWS))
    order = [[part.key[1] for part in piece.parts] for piece in store._cut.order]
    decoder = [["0", "1"], ["2"]]
    assert order == [["stem"], ["0", "1"], ["2", "ln_post"], *decoder, *decoder, ["embedding"], ["embedding"]]
    assert store._cut.token_begin == 5
    assert [(start, stop) for start, stop, _ in store._cut.blocks] == [(0, 2048), (2048, WIDE.n_vocab)]
    store.close()


@pytest.mark.parametrize("weights", ["f32", "f16", "int8"])
def test_rows_of_the_embedding_are_those_of_its_blocks(weights: str, models: dict[str, Path]) -> None:
    store, timings = ShardStore(models[weights], "stream"), LayerTimings()
    tokens = [0, 77, 77, 2047, 2048, WIDE.n_vocab - 1]
    found, blocks = store.token_rows(tokens, timings), []
    for _, block in store.embedding_blocks(timings):
        weight = block["token_embedding.weight"]
        blocks.append((weight.data.copy(), None if weight.scale is None else weight.scale.copy()))
        del weight
    codes, scales = zip(*blocks, strict=True)
    assert np.array_equal(found.data, np.concatenate(codes)[tokens])
    assert (found.scale is None) == (weights != "int8")
    assert found.scale is None or np.array_equal(found.scale, np.concatenate(scales)[tokens])
    store.close()


def test_a_plan_that_cannot_be_is_refused(models: dict[str, Path]) -> None:
    manifest = read_manifest(models["int8"])
    for slots, rows in ((0, TILE_ROWS), (2, 0), (2, TILE_ROWS + 1)):
        with pytest.raises(ValueError, match="slots are|embedding_rows are"):
            Residency(frozenset(), slots, rows)
    with pytest.raises(ValueError, match="pinned, but not in the manifest: x"):
        Residency(frozenset({"x"}), 2, TILE_ROWS).weight_bytes(manifest)
    with pytest.raises(ValueError, match="one of resident, stream"):
        named("some", manifest)
