"""Bodies: what each format holds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from engine.segments import Segment, Word
from service.job_options import JobOptions
from service.protocol import Finished
from service.render import WARNING_HEADER, render

SEGMENT = Segment(
    seek=0,
    start=0.0,
    end=2.5,
    text=" Hello “there”.",
    tokens=(50363, 15496, 50488),
    avg_logprob=-0.25,
    no_speech_prob=0.01,
    temperature=0.0,
    compression_ratio=0.9,
    words=(Word(" Hello", 0.0, 1.0, 0.9), Word(" “there”.", 1.0, 2.5, 0.8)),
)


def finished(**changes: Any) -> Finished:
    segments = json.loads(json.dumps([asdict(SEGMENT)]))
    fields: dict[str, Any] = {"language_name": "english", "subtitles": "1\n", "segments": segments} | changes
    return Finished("a", " Hello “there”.", "en", 2.60004, 3, 0.1, **fields)


def body(options: JobOptions, **changes: Any) -> Any:
    return json.loads(bytes(render(finished(**changes), options).body))


def verbose(*granularities: str, **decoding: str) -> JobOptions:
    return JobOptions("verbose_json", frozenset(granularities or ["segment"]), decoding)


def test_json_is_the_text_without_its_leading_space() -> None:
    assert body(JobOptions()) == {"text": "Hello “there”."}


@pytest.mark.parametrize(
    ("form", "text", "media_type"),
    [
        ("text", "Hello “there”.\n", "text/plain"),
        ("srt", "1\n", "application/x-subrip"),
        ("vtt", "1\n", "text/vtt"),
    ],
)
def test_bare_bodies(form: str, text: str, media_type: str) -> None:
    response = render(finished(), JobOptions(form))
    assert bytes(response.body).decode() == text
    assert response.headers["content-type"] == f"{media_type}; charset=utf-8", form


def test_verbose_json_is_openais() -> None:
    made = body(verbose())
    assert list(made) == ["task", "language", "duration", "text", "segments"]
    assert (made["task"], made["language"], made["duration"], made["text"]) == (
        "transcribe",
        "english",
        2.60004,
        "Hello “there”.",
    )
    expected = asdict(SEGMENT) | {"id": 0, "tokens": [50363, 15496, 50488]}
    del expected["words"]
    assert made["segments"] == [expected]


def test_verbose_json_holds_the_granularities_asked_for() -> None:
    words = [{"word": "Hello", "start": 0.0, "end": 1.0}, {"word": "“there”.", "start": 1.0, "end": 2.5}]
    made = body(verbose("word"))
    assert made["words"] == words
    assert "segments" not in made
    both = body(verbose("word", "segment"))
    assert both["words"] == words
    assert len(both["segments"]) == 1


def test_a_translation_is_english_and_nothing_said_has_no_language() -> None:
    assert body(verbose(task="translate"), language_name="german")["language"] == "english"
    made = body(verbose("segment", "word"), language_name=None, segments=[])
    assert (made["language"], made["segments"], made["words"]) == (None, [], [])


def test_a_damaged_recording_is_marked_in_every_format() -> None:
    for options in (JobOptions(), JobOptions("srt"), verbose()):
        assert render(finished(is_partial=True), options).headers[WARNING_HEADER] == "partial_audio"
        assert WARNING_HEADER not in render(finished(), options).headers
