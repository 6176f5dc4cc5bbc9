"""Mixed precision: a kept layer is stored, and computes, as a model of that dtype would; the others as without it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from engine.checkpoints import open_checkpoint
from engine.convert import convert
from engine.errors import InvalidOptions
from engine.model import Whisper
from engine.shards.manifest import read_manifest
from engine.shards.precision import kept_layers, layer_name, parse_keep
from engine.shards.store import ShardStore
from engine.tail import whole
from engine.timings import LayerTimings
from tests.engine.test_convert import stored
from tests.random_checkpoint import DIMS

ENCODER = ["encoder.stem", *(f"encoder.{layer}" for layer in range(DIMS.n_audio_layer))]
DECODER = ["decoder.embedding", *(f"decoder.{layer}" for layer in range(DIMS.n_text_layer))]
TOKENS = [265, 3, 77, 200]

Convert = Callable[..., Path]


@pytest.fixture(scope="module")
def converted(random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """Model directories of the random checkpoint by weights and what is kept."""
    made: dict[tuple[object, ...], Path] = {}

    def make(weights: str, dtype: str = "", layers: list[str] = []) -> Path:  # noqa: B006 - not changed
        key = (weights, dtype, *layers)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("mixed") / "model"
            convert(open_checkpoint(random_checkpoint), made[key], weights, dict.fromkeys(layers, dtype))
        return made[key]

    return make


WHOLE = whole(0, DIMS.n_audio_ctx)


def encode(directory: Path) -> np.ndarray:
    model = Whisper(ShardStore(directory), "f32")
    log_mel = np.random.default_rng(2).uniform(-1.5, 1.5, (DIMS.n_frames, DIMS.n_mels)).astype(np.float32)
    return model.encoder.encode(log_mel, WHOLE, LayerTimings(), lambda: None).copy()


def decode(directory: Path, audio_features: np.ndarray, residency: str = "resident") -> np.ndarray:
    model = Whisper(ShardStore(directory, residency), "f32")
    spare = np.empty((2, *audio_features.shape), np.float32)
    model.decoder.begin_window(audio_features, WHOLE.log_counts, spare, LayerTimings(), lambda: None)
    return np.stack([model.decoder.step([token], [0], LayerTimings())[0].copy() for token in TOKENS])


@pytest.mark.parametrize("weights", ["f16", "int8"])
def test_everything_kept_in_float32_is_the_float32_model_to_the_bit(weights: str, converted: Convert) -> None:
    mixed, single = converted(weights, "f32", ENCODER + DECODER), converted("f32")
    for path in single.glob("*.safetensors"):
        assert (mixed / path.name).read_bytes() == path.read_bytes()
    features = encode(single)
    assert np.array_equal(encode(mixed), features)
    assert np.array_equal(decode(mixed, features), decode(single, features))


@pytest.mark.parametrize(
    ("weights", "dtype", "residency"), [("int8", "f16", "resident"), ("int8", "f32", "stream"), ("f16", "f32", "resident")]
)
def test_a_stack_that_is_kept_computes_as_its_dtypes_model_and_the_other_as_before(
    weights: str, dtype: str, residency: str, converted: Convert
) -> None:
    coarse, fine = converted(weights), converted(dtype)
    fine_encoder = converted(weights, dtype, ENCODER if dtype == "f32" else ENCODER[1:])  # float16 is the stem's anyway
    features = encode(fine_encoder)
    assert np.array_equal(features, encode(fine))
    assert np.array_equal(decode(fine_encoder, features, residency), decode(coarse, features))
    fine_decoder = converted(weights, dtype, DECODER)
    features = encode(fine_decoder)
    assert np.array_equal(features, encode(coarse))
    assert np.array_equal(decode(fine_decoder, features, residency), decode(fine, features))


@pytest.mark.parametrize("layer", [*ENCODER, *DECODER])
def test_one_layer_that_is_kept_is_stored_as_its_dtypes_model_has_it_and_all_others_as_before(
    layer: str, converted: Convert
) -> None:
    mixed, coarse, fine = (stored(path) for path in (converted("int8", "f32", [layer]), converted("int8"), converted("f32")))
    vectors = {name for name, tensor in fine.items() if tensor.ndim == 1}
    for name, tensor in mixed.items():
        is_kept = name in fine and name not in vectors and layer_name(name) == layer
        expected = fine[name] if is_kept else coarse[name]
        assert tensor.dtype == expected.dtype, name
        assert np.array_equal(tensor, expected), name
    manifest = read_manifest(converted("int8", "f32", [layer]))
    assert kept_layers(manifest) == {layer: {"f32"}}
    assert manifest.weights == "int8"


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_each_layer_kept_brings_the_logits_nearer_to_float32(dtype: str, converted: Convert) -> None:
    """Along the decoder, one layer more at a time; the source is float16, so both dtypes end at no difference."""
    features = encode(converted("f32"))
    exact = decode(converted("f32"), features)
    off = []
    for n_kept in range(len(DECODER) + 1):
        off.append(np.abs(decode(converted("int8", dtype, DECODER[:n_kept]), features) - exact).mean())
    assert off[-1] < 1e-5 * np.abs(exact).max()
    assert off[0] > 3 * off[-2] > 0
    assert all(later < 1.5 * earlier for earlier, later in pairwise(off))


def test_what_is_written_on_the_command_line_is_read_in_any_number() -> None:
    assert parse_keep([]) == {}
    keep = parse_keep(["f16:decoder.0,encoder.3", "f32:encoder.stem"])
    assert keep == {"decoder.0": "f16", "encoder.3": "f16", "encoder.stem": "f32"}


@pytest.mark.parametrize(
    "text", ["f16", "f16:", ":decoder.0", "decoder.0", "f16:decoder.0,", "f16:decoder.0,decoder.0", "f16;decoder.0"]
)
def test_what_is_no_such_list_is_refused(text: str, random_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptions):
        convert(open_checkpoint(random_checkpoint), tmp_path / "model", keep=parse_keep([text]))


@pytest.mark.parametrize(
    ("weights", "keep", "said"),
    [
        ("int8", {"decoder.3": "f16"}, r"this model has encoder.stem, encoder.0 to 2, decoder.0 to 2, decoder.embedding"),
        ("int8", {"decoder.00": "f16"}, "this model has"),
        ("int8", {"encoder.ln_post": "f32"}, "this model has"),  # vectors alone, which are float32
        ("int8", {"decoder.blocks.0": "f16"}, "this model has"),
        ("int8", {"decoder.0": "bf16"}, "a dtype is one of f32, f16, int8"),
        ("int8", {"decoder.0": "int8"}, "with weights int8 it is int8 already"),
        ("f16", {"decoder.0": "int8"}, "with weights f16 it is f16 already"),
        ("f32", {"decoder.0": "f16"}, "with weights f32 it is f32 already"),
        ("int8", {"encoder.stem": "f16"}, "with weights int8 it is f16 already"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_written(
    weights: str, keep: dict[str, str], said: str, random_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidOptions, match=said):
        convert(open_checkpoint(random_checkpoint), tmp_path / "model", weights, keep)
    assert not list(tmp_path.iterdir())
