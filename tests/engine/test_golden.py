"""Against openai/whisper itself, rung by rung: mel, stem, a block, encoder, decoder steps, tokens, text.

The golden is openai/whisper's, on the project's own recording and OpenAI's weights; tests/golden/make_golden.py recorded it.
OpenAI published float16 weights, so float16 storage holds them exactly.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.audio import read_blocks
from engine.decoding import DecodingOptions, DecodingTask
from engine.mel import LogMel
from engine.model import Whisper
from engine.shards.store import ShardStore
from engine.tail import whole
from engine.timings import LayerTimings
from engine.tokenizer import Tokenizer
from engine.transcribe import Engine
from tests.conftest import Recording

POSITIONS = whole(0, 1500)
GOLDEN = Path(__file__).parent.parent / "golden" / "demo.tiny.en.npz"


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN))


@pytest.fixture(scope="module")
def model(tiny_en_f16: Path) -> Whisper:
    return Whisper(ShardStore(tiny_en_f16), "f32", "whole")


@pytest.fixture(scope="module")
def log_mel(model: Whisper, recordings: dict[str, Recording]) -> np.ndarray:
    return LogMel(lambda: read_blocks(recordings["demo"].path), model.log_mel).window(0).copy()


def test_mel(golden: dict[str, np.ndarray], log_mel: np.ndarray) -> None:
    rows = log_mel[:: golden["mel_stride"]]
    assert np.abs(rows - golden["mel"][: len(rows)]).max() < 2e-5
    assert not golden["mel"][len(rows) :].any()  # behind the recording: not stored here


def test_stem_and_first_block(golden: dict[str, np.ndarray], model: Whisper, log_mel: np.ndarray) -> None:
    encoder = model.encoder
    with encoder._store.layer("encoder", "stem", LayerTimings()) as weights:
        encoder._stem(log_mel, POSITIONS, weights)
    assert np.abs(encoder._x[:: golden["stem_stride"]] - golden["stem"]).max() < 1e-4
    with encoder._store.layer("encoder", "0", LayerTimings()) as weights:
        encoder._block(encoder._x, encoder._buffers, POSITIONS.log_counts, weights)
    assert np.abs(encoder._x[:: golden["block0_stride"]] - golden["block0"]).max() < 1e-4


def test_encoder_output_within_1e_3(golden: dict[str, np.ndarray], model: Whisper, log_mel: np.ndarray) -> None:
    features = model.encoder.encode(log_mel, POSITIONS, LayerTimings(), lambda: None)
    assert np.abs(features[:: golden["audio_features_stride"]] - golden["audio_features"]).max() < 1e-3


def test_logits_of_ten_steps_within_5e_3(golden: dict[str, np.ndarray], model: Whisper, log_mel: np.ndarray) -> None:
    model.begin_window(log_mel, LayerTimings(), lambda: None)
    fed = [50257, *golden["tokens"][:9]]
    logits = np.stack([model.decoder.step([int(token)], [0], LayerTimings())[0].copy() for token in fed])
    assert np.abs(logits[:, :: golden["logits_stride"]] - golden["logits"]).max() < 5e-3
    assert np.array_equal(logits.argmax(1), golden["logits_argmax"])


def test_greedy_tokens_and_confidence(golden: dict[str, np.ndarray], model: Whisper, log_mel: np.ndarray) -> None:
    model.begin_window(log_mel, LayerTimings(), lambda: None)
    store = model.encoder._store
    tokenizer = Tokenizer(store.vocabulary(), store.token_order)
    task = DecodingTask(model, tokenizer, DecodingOptions())
    result = task.run("en", (), 0.0, 0, LayerTimings(), lambda: None)
    assert result.tokens == golden["tokens"].tolist()
    assert result.avg_logprob == pytest.approx(float(golden["avg_logprob"]), abs=1e-4)
    assert result.no_speech_prob == pytest.approx(float(golden["no_speech_prob"]), rel=1e-2)


def test_text(golden: dict[str, np.ndarray], tiny_en_f16: Path, recordings: dict[str, Recording]) -> None:
    transcript = Engine(tiny_en_f16, "f32", tail="whole").transcribe(recordings["demo"].path, LayerTimings())
    assert transcript.text == str(golden["text"])
