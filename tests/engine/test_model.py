"""The two stacks against a plain forward pass, and every way of storing and mapping against every other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.checkpoints import open_checkpoint
from engine.convert import convert
from engine.errors import NonFiniteLogits
from engine.kv_cache import KV_POLICIES
from engine.model import Whisper, decoder
from engine.shards.store import ShardStore
from engine.tail import Positions, merged, whole
from engine.timings import LayerTimings
from tests.random_checkpoint import DIMS, Tensors, random_tensors, write_ctranslate2

TOKENS = [265, 3, 77, 200, 256, 31]


WHOLE = whole(0, DIMS.n_audio_ctx)


class PlainWhisper:
    """openai/whisper model.py in float64, whole sequences at once, no cache, no tiles."""

    def __init__(self, tensors: Tensors) -> None:
        self.w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def attention(self, x: np.ndarray, xa: np.ndarray, name: str, mask: bool, log_counts: Any = 0.0) -> np.ndarray:
        q, k, v = self.linear(x, f"{name}.query"), self.linear(xa, f"{name}.key"), self.linear(xa, f"{name}.value")
        out = np.empty_like(q)
        width = q.shape[1] // DIMS.n_text_head
        for head in range(DIMS.n_text_head):
            c = slice(head * width, (head + 1) * width)
            scores = q[:, c] @ k[:, c].T / math.sqrt(width) + log_counts
            if mask:
                scores += np.triu(np.full(scores.shape, -np.inf), 1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, c] = weights / weights.sum(-1, keepdims=True) @ v[:, c]
        return self.linear(out, f"{name}.out")

    def mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.linear(gelu(self.linear(x, f"{name}.mlp.0")), f"{name}.mlp.2")

    def conv(self, x: np.ndarray, name: str, stride: int) -> np.ndarray:
        padded = np.pad(x, ((1, 1), (0, 0)))
        kernel = self.w[f"{name}.weight"]
        rows = range(0, len(x), stride)
        return gelu(np.stack([np.einsum("tc,oct->o", padded[i : i + 3], kernel) for i in rows]) + self.w[f"{name}.bias"])

    def encode(self, log_mel: np.ndarray, positions: Positions = WHOLE) -> np.ndarray:
        x = self.conv(self.conv(log_mel, "encoder.conv1", 1), "encoder.conv2", 2) + self.w["encoder.positional_embedding"]
        x = x[positions.index]
        for layer in range(DIMS.n_audio_layer):
            name = f"encoder.blocks.{layer}"
            y = self.norm(x, f"{name}.attn_ln")
            x = x + self.attention(y, y, f"{name}.attn", False, positions.log_counts)
            x = x + self.mlp(self.norm(x, f"{name}.mlp_ln"), name)
        return self.norm(x, "encoder.ln_post")

    def logits(self, tokens: list[int], audio_features: np.ndarray, positions: Positions = WHOLE) -> np.ndarray:
        x = self.w["decoder.token_embedding.weight"][tokens] + self.w["decoder.positional_embedding"][: len(tokens)]
        for layer in range(DIMS.n_text_layer):
            name = f"decoder.blocks.{layer}"
            y = self.norm(x, f"{name}.attn_ln")
            x = x + self.attention(y, y, f"{name}.attn", mask=True)
            y = self.norm(x, f"{name}.cross_attn_ln")
            x = x + self.attention(y, audio_features, f"{name}.cross_attn", False, positions.log_counts)
            x = x + self.mlp(self.norm(x, f"{name}.mlp_ln"), name)
        return self.norm(x, "decoder.ln") @ self.w["decoder.token_embedding.weight"].T


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


@pytest.fixture(scope="module")
def log_mel() -> np.ndarray:
    return np.random.default_rng(2).uniform(-1.5, 1.5, (DIMS.n_frames, DIMS.n_mels)).astype(np.float32)


@pytest.fixture(scope="module")
def plain(log_mel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    model = PlainWhisper(random_tensors())
    audio_features = model.encode(log_mel)
    return audio_features, model.logits(TOKENS, audio_features)


@pytest.fixture(scope="module")
def models(random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    for weights in ("f32", "f16", "int8"):
        convert(open_checkpoint(random_checkpoint), directory / weights, weights)
    return {weights: directory / weights for weights in ("f32", "f16", "int8")}


def run(model: Whisper, log_mel: np.ndarray, prefill: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Audio features, and the logits of every token: the first `prefill` at once, then one by one."""
    timings = LayerTimings()
    positions = merged(len(log_mel), DIMS.n_audio_ctx)
    features = model.encoder.encode(log_mel, positions, timings, lambda: None).copy()
    model.begin_window(log_mel, timings, lambda: None)
    logits = [*model.decoder.step(TOKENS[:prefill], range(prefill), timings).copy()]
    logits += [model.decoder.step([token], [0], timings)[0].copy() for token in TOKENS[prefill:]]
    return features, np.stack(logits)


@pytest.mark.parametrize("weights", ["f32", "f16"])  # the weights are float16, so both are exact
@pytest.mark.parametrize("residency", ["resident", "stream"])
def test_equals_the_plain_forward_pass(
    weights: str, residency: str, models: dict[str, Path], log_mel: np.ndarray, plain: tuple[np.ndarray, np.ndarray]
) -> None:
    features, logits = run(Whisper(ShardStore(models[weights], residency), "f32"), log_mel)
    assert np.abs(features - plain[0]).max() < 2e-5
    assert np.abs(logits - plain[1]).max() < 2e-4
    assert np.array_equal(logits.argmax(1), plain[1].argmax(1))


@pytest.mark.parametrize("n_frames", [1, 16, 17, 30])
def test_a_merged_tail_equals_the_plain_pass_over_the_kept_positions(
    n_frames: int, models: dict[str, Path], log_mel: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stem hears the padding as it is; of its positions, few are left, which count for the others as keys."""
    monkeypatch.setattr("engine.tail.EDGE_POSITIONS", 4)
    monkeypatch.setattr("engine.tail.SCHEDULE", ((8, 2), (DIMS.n_audio_ctx, 5)))
    positions = merged(n_frames, DIMS.n_audio_ctx)
    assert len(positions) < DIMS.n_audio_ctx
    padded = np.where(np.arange(DIMS.n_frames)[:, None] < n_frames, log_mel, 0.0)
    twin = PlainWhisper(random_tensors())
    audio_features = twin.encode(padded, positions)
    features, logits = run(Whisper(ShardStore(models["f32"]), "f32"), log_mel[:n_frames], prefill=3)
    assert np.abs(features - audio_features).max() < 2e-5
    assert np.abs(logits - twin.logits(TOKENS, audio_features, positions)).max() < 2e-4


def test_an_untouched_tail_equals_the_window_padded(models: dict[str, Path], log_mel: np.ndarray) -> None:
    model = Whisper(ShardStore(models["f32"]), "f32", "whole")
    padded = log_mel.copy()
    padded[30:] = 0.0
    expected = model.encoder.encode(padded, WHOLE, LayerTimings(), lambda: None).copy()
    assert np.array_equal(model.encoder.encode(log_mel[:30], WHOLE, LayerTimings(), lambda: None), expected)


@pytest.mark.parametrize("weights", ["f32", "int8"])
@pytest.mark.parametrize("kv", KV_POLICIES)
def test_streamed_equals_resident_to_the_bit(weights: str, kv: str, models: dict[str, Path], log_mel: np.ndarray) -> None:
    resident = run(Whisper(ShardStore(models[weights], "resident"), kv), log_mel)
    streamed = run(Whisper(ShardStore(models[weights], "stream"), kv), log_mel)
    assert np.array_equal(resident[0], streamed[0])
    assert np.array_equal(resident[1], streamed[1])


@pytest.mark.parametrize("prefill", [2, 4, 6])
def test_prefill_equals_single_steps(prefill: int, models: dict[str, Path], log_mel: np.ndarray) -> None:
    model = Whisper(ShardStore(models["f32"]), "f32")
    assert np.abs(run(model, log_mel, prefill)[1] - run(model, log_mel)[1]).max() < 1e-4


def test_int8_is_near_float32(models: dict[str, Path], log_mel: np.ndarray, plain: tuple[np.ndarray, np.ndarray]) -> None:
    features, logits = run(Whisper(ShardStore(models["int8"]), "int8"), log_mel)
    spread = plain[1].std()
    assert 0 < np.abs(features - plain[0]).max() < 0.1
    assert 0 < np.abs(logits - plain[1]).max() < 0.25 * spread


@pytest.mark.parametrize("weights", ["f32", "f16", "int8"])
@pytest.mark.parametrize("prefill", [1, 6])
def test_shared_f32_is_f32_but_for_rounding(weights: str, prefill: int, models: dict[str, Path], log_mel: np.ndarray) -> None:
    by_layer, shared = (run(Whisper(ShardStore(models[weights]), kv), log_mel, prefill)[1] for kv in ("f32", "shared-f32"))
    assert np.abs(shared - by_layer).max() < 1e-4
    assert np.array_equal(shared.argmax(1), by_layer.argmax(1))


@pytest.mark.parametrize("kv", KV_POLICIES)
def test_sequences_of_a_window_equal_each_alone(kv: str, models: dict[str, Path], log_mel: np.ndarray) -> None:
    """Beams: three that fork from one, go their own ways, and change places."""
    model, timings = Whisper(ShardStore(models["int8"]), kv), LayerTimings()
    decoder = model.decoder
    decoder.reserve(3)
    model.begin_window(log_mel, timings, lambda: None)
    decoder.step(TOKENS[:2], [1], timings)
    decoder.reorder([0, 0, 0])
    decoder.step([3, 4, 5], [], timings)
    decoder.reorder([2, 0, 1])
    found = decoder.step([30, 40, 50], range(3), timings).copy()
    for row, tokens in zip(found, ([5, 30], [3, 40], [4, 50]), strict=True):
        decoder.restart()
        decoder.step(TOKENS[:2], [1], timings)
        decoder.step(tokens[:1], [0], timings)
        alone = decoder.step(tokens[1:], [0], timings)[0]
        assert np.abs(row - alone).max() < 1e-3


@pytest.mark.parametrize("kv", KV_POLICIES)
def test_a_window_begins_without_the_decoder_where_its_features_are_shared(
    kv: str, models: dict[str, Path], log_mel: np.ndarray
) -> None:
    model, timings = Whisper(ShardStore(models["int8"]), kv), LayerTimings()
    model.begin_window(log_mel, timings, lambda: None)
    assert ("decoder", "0") not in timings.compute if kv.startswith("shared") else ("decoder", "2") in timings.compute


@pytest.mark.parametrize("kv", KV_POLICIES)
def test_a_prompt_longer_than_a_tile_is_the_same_prompt(
    kv: str, models: dict[str, Path], log_mel: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(Whisper(ShardStore(models["int8"]), kv), log_mel, prefill=len(TOKENS))
    monkeypatch.setattr(decoder, "HIDDEN_ROWS", 2)
    monkeypatch.setattr(decoder, "EMBEDDED_TOGETHER", 2)
    tiled = run(Whisper(ShardStore(models["int8"]), kv), log_mel, prefill=len(TOKENS))
    assert np.array_equal(whole[0], tiled[0])
    assert np.abs(whole[1] - tiled[1]).max() < 1e-3


def test_a14_a_window_leaves_nothing_behind(models: dict[str, Path], log_mel: np.ndarray) -> None:
    """The same window gives the same numbers whatever came before it."""
    model = Whisper(ShardStore(models["int8"]), "int8")
    first = run(model, log_mel)
    run(model, -log_mel, prefill=4)
    again = run(model, log_mel)
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[1], again[1])


def test_restart_keeps_the_window(models: dict[str, Path], log_mel: np.ndarray) -> None:
    model, timings = Whisper(ShardStore(models["f32"]), "f32"), LayerTimings()
    model.begin_window(log_mel, timings, lambda: None)
    first = model.decoder.step(TOKENS[:1], [0], timings).copy()
    model.decoder.restart()
    assert np.array_equal(model.decoder.step(TOKENS[:1], [0], timings), first)


def test_logits_that_are_no_number_end_the_work(tmp_path: Path, log_mel: np.ndarray) -> None:
    """Weights so large that float32 overflows: an error, never a token."""

    def inflate(tensors: Tensors) -> None:
        for name in tensors:
            if name.startswith("decoder/layer_0/ffn") and name.endswith("weight"):
                tensors[name] = 1e30 * np.sign(tensors[name]).astype(np.float32)

    write_ctranslate2(tmp_path, inflate)
    convert(open_checkpoint(tmp_path), tmp_path / "model", "f32")
    model = Whisper(ShardStore(tmp_path / "model"), "f32")
    with np.errstate(all="ignore"):
        model.begin_window(log_mel, LayerTimings(), lambda: None)
        with pytest.raises(NonFiniteLogits):
            model.decoder.step(TOKENS[:1], [0], LayerTimings())


def test_buffers_are_allocated_once(models: dict[str, Path], log_mel: np.ndarray) -> None:
    model = Whisper(ShardStore(models["int8"]), "int8")
    first = model.encoder.encode(log_mel, WHOLE, LayerTimings(), lambda: None)
    assert np.shares_memory(first, model.encoder.encode(log_mel, WHOLE, LayerTimings(), lambda: None))
