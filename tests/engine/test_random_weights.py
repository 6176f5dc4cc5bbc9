"""Random weights of a published shape: OpenAI's shapes, always the same bytes, and a model that works like a real one."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest

from engine.byte_pairs import byte_order
from engine.checkpoints.layout import expected_shapes
from engine.checkpoints.random_weights import SIZES, RandomCheckpoint
from engine.convert import convert
from engine.decoding import DecodingOptions
from engine.errors import InvalidOptions
from engine.model import Whisper
from engine.shards.manifest import read_manifest
from engine.shards.store import ShardStore
from engine.tail import whole
from engine.timings import LayerTimings
from engine.tokenizer import Tokenizer
from engine.transcribe import Engine
from tests.conftest import Recording

TINY_EN = "9c9920e7a6f3a1b8dbe6eb0856a13e3051088c3f637a0ee9086725584a5b1c06"
"""Content of the random tiny.en, as x86-64 makes it."""


@pytest.fixture(scope="module")
def random_tiny_en(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random-tiny") / "model"
    convert(RandomCheckpoint("tiny.en"), directory)
    return directory


@pytest.mark.parametrize(
    ("size", "millions"),  # as openai/whisper's README rounds them
    [
        ("tiny", 39),
        ("base", 74),
        ("small", 244),
        ("medium", 769),
        ("large-v2", 1550),
        ("large-v3", 1550),
        ("large-v3-turbo", 809),
    ],
)
def test_sizes_have_the_parameters_that_openai_states(size: str, millions: int) -> None:
    n_parameters = sum(prod(shape) for shape in expected_shapes(SIZES[size]).values())
    assert n_parameters / 1e6 == pytest.approx(millions, rel=0.035)


def test_tiny_en_has_the_real_ones_dimensions_and_special_tokens(tiny_en: Path) -> None:
    real, drawn = read_manifest(tiny_en), RandomCheckpoint("tiny.en")
    assert drawn.dims == real.dims
    special = drawn.vocabulary.special
    assert real.special.languages.items() <= special.languages.items()  # the old file calls he by another code
    assert replace(special, languages=real.special.languages, non_speech=real.special.non_speech) == real.special


@pytest.mark.parametrize("size", SIZES)
def test_the_vocabulary_fills_the_ids_and_no_two_tokens_are_alike(size: str) -> None:
    drawn = RandomCheckpoint(size)
    table, special = drawn.vocabulary, drawn.vocabulary.special
    assert special.multilingual == (not size.endswith(".en"))
    assert len(special.languages) == (100 if "v3" in size else 99)
    assert special.timestamp_begin + 1501 == drawn.dims.n_vocab
    begins = table.token_begins.tolist()
    assert len(begins) == special.eot + 1
    data = table.token_bytes.tobytes()
    assert begins[-1] == len(data)
    assert len({data[begin:end] for begin, end in pairwise(begins)}) == special.eot
    tokenizer = Tokenizer(table, lambda: byte_order(data, table.token_begins))
    assert tokenizer.decode(tokenizer.encode("Ouagadougou, 3 o'clock: ça va?")) == "Ouagadougou, 3 o'clock: ça va?"
    assert tokenizer.decode([special.blank]) == " "


def test_an_unknown_size_is_told_the_known_ones() -> None:
    with pytest.raises(InvalidOptions, match=r"'huge'; known: tiny.en, tiny, .*, large-v3-turbo"):
        RandomCheckpoint("huge")


@pytest.mark.weights
def test_the_bytes_are_the_same_each_time_on_every_processor(random_tiny_en: Path, tmp_path: Path) -> None:
    manifest = read_manifest(random_tiny_en)
    assert manifest.checkpoint == TINY_EN
    assert convert(RandomCheckpoint("tiny.en"), tmp_path / "again") == manifest
    assert manifest.source == {"format": "random tiny.en", "sha256": {}}


def test_a_tensor_is_what_was_drawn_for_its_name_alone() -> None:
    """Whatever is read before; and no tensor begins as another."""
    first, second = RandomCheckpoint("tiny.en"), RandomCheckpoint("large-v3")
    name = "encoder.blocks.1.attn.query.weight"
    assert np.array_equal(first.read(name), first.read(name))
    assert not np.array_equal(first.read(name), first.read(name.replace("query", "value")))
    assert not np.array_equal(first.read(name), first.read(name.replace("encoder", "decoder")))
    assert second.read(name).shape == (1280, 1280)


@pytest.mark.weights
@pytest.mark.parametrize("layers_per_shard", [1, 99])
def test_conversion_holds_one_tensor_whatever_the_shards(layers_per_shard: int, tmp_path: Path) -> None:
    """The embedding is the largest, 40 MB as drawn; float32 shards of all layers would be 28 and 40 MB beside it."""
    checkpoint = RandomCheckpoint("tiny.en")
    tracemalloc.start()
    try:
        manifest = convert(checkpoint, tmp_path / "model", "f32", layers_per_shard=layers_per_shard)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert manifest.n_bytes > 150e6
    assert 40e6 < peak < 40e6 + 25e6


@pytest.mark.weights
def test_activations_are_of_order_one_and_logits_finite(random_tiny_en: Path) -> None:
    model, timings = Whisper(ShardStore(random_tiny_en), "f32"), LayerTimings()
    log_mel = np.random.default_rng(2).uniform(-1.5, 1.5, (3000, 80)).astype(np.float32)
    model.begin_window(log_mel, timings, lambda: None)
    assert 0.5 < np.std(model.encoder.encode(log_mel, whole(0, model.dims.n_audio_ctx), timings, lambda: None)) < 2
    logits = model.decoder.step([50257], [0], timings)  # not finite: an error
    assert 4 < np.std(logits) < 16


@pytest.mark.weights
def test_it_transcribes_a_window_to_its_end(random_tiny_en: Path, recordings: dict[str, Recording]) -> None:
    """As the default options decode: no temperature is tried in vain, no loop ends it early."""
    engine, timings = Engine(random_tiny_en), LayerTimings()
    transcript = engine.transcribe(recordings["digits"].path, timings, DecodingOptions(language="en"))
    engine.close()
    assert transcript.n_tokens > 50
    assert (timings.fallbacks, timings.loops) == (0, 0)
    assert transcript.text
