"""Options: ranges and contradictions are refused, each with its rule."""

from __future__ import annotations

import math

import pytest

from engine.decoding import DecodingOptions
from engine.decoding.filters import make_filters
from engine.errors import InvalidOptions
from tests.engine.test_decoding import EOT, special


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"task": "summarise"}, "transcribe, translate"),
        ({"temperatures": ()}, "from 0 to 1"),
        ({"temperatures": (-0.1,)}, "from 0 to 1"),
        ({"temperatures": (0.0, 1.1)}, "from 0 to 1"),
        ({"temperatures": (math.nan,)}, "from 0 to 1"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"beam_size": 0}, "beam_size"),
        ({"beam_size": 17}, "beam_size"),
        ({"beam_size": 2, "patience": 0.0}, "patience"),
        ({"beam_size": 2, "patience": math.inf}, "patience"),
        ({"beam_size": 2, "length_penalty": 1.1}, "length_penalty"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"repetition_penalty": 0.9}, "repetition_penalty"),
        ({"sample_len": 0}, "sample_len"),
        ({"compression_ratio_threshold": math.nan}, "thresholds"),
        ({"word_timestamps": True, "hallucination_silence_threshold": -1.0}, "above 0"),
        ({"word_timestamps": True, "hallucination_silence_threshold": 0.0}, "above 0"),
        ({"word_timestamps": True, "hallucination_silence_threshold": math.nan}, "above 0"),
        # Contradictions: each option alone is fine.
        ({"beam_size": 5, "temperatures": (0.4,)}, "not among the temperatures"),
        ({"patience": 2.0}, "beam_size too"),
        ({"length_penalty": 0.6}, "beam_size or best_of"),
        ({"best_of": 5, "temperatures": (0.0,)}, "no temperature is"),
        ({"top_p": 0.9, "temperatures": (0.0,)}, "no temperature is"),
        ({"carry_initial_prompt": True}, "initial_prompt too"),
        ({"carry_initial_prompt": True, "initial_prompt": "  "}, "initial_prompt too"),
        ({"hallucination_silence_threshold": 2.0}, "word_timestamps"),
    ],
)
def test_refused(options: dict[str, object], rule: str) -> None:
    with pytest.raises(InvalidOptions, match=rule):
        DecodingOptions(**options)


def test_what_belongs_together_is_taken() -> None:
    DecodingOptions(beam_size=5, patience=2.0, length_penalty=1.0, best_of=5, top_p=0.9)
    DecodingOptions(word_timestamps=True, hallucination_silence_threshold=2.0)
    assert DecodingOptions(beam_size=3, best_of=7).n_sequences == 7


@pytest.mark.parametrize("token", [-1, EOT, 10**6])
def test_suppressed_tokens_are_text(token: int) -> None:
    with pytest.raises(InvalidOptions, match="text tokens"):
        make_filters(special(), DecodingOptions(suppress_tokens=(5, token)))
