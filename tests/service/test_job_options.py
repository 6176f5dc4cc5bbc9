"""The form's fields: what each may be, and what the engine is asked for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from engine.decoding import DecodingOptions
from engine.decoding.options import TASKS
from engine.writers import WRITERS
from service import job_options
from service.errors import ServiceError
from service.job_options import JobOptions, read_options


def test_a_form_with_no_field_is_the_default() -> None:
    assert read_options({}) == JobOptions() == read_options(dict.fromkeys(job_options.FIELDS, ""))


@pytest.mark.parametrize(
    ("form", "decoding"),
    [
        ({"language": " pt-BR "}, {"language": "pt-BR"}),
        ({"language": "auto"}, {}),
        ({"task": "translate"}, {"task": "translate"}),
        ({"prompt": " Zanzibar, Quetzalcoatl "}, {"initial_prompt": " Zanzibar, Quetzalcoatl "}),
        ({"prompt": " \n"}, {}),
    ],
)
def test_fields_become_decoding_options(form: dict[str, str], decoding: dict[str, Any]) -> None:
    assert read_options(form).decoding == decoding


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("", None),
        ("0", None),
        ("0.0", None),
        (" 0 ", None),
        ("0.4", [0.4]),
        ("1", [1.0]),
        ("0,0.5", [0.0, 0.5]),
        ("0, 0.2 ,0.4,0.6,0.8,1.0", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_a16_absent_or_0_leaves_the_ladder_and_anything_else_is_taken_at_its_word(text: str, asked: list[float] | None) -> None:
    assert read_options({"temperature": text}).decoding.get("temperatures") == asked


@pytest.mark.parametrize("text", ["warm", "-0.1", "1.1", "nan", "inf", "0;0.5", "0,x", "0,0,0,0,0,0,0", "1e400"])
def test_a16_other_temperatures_are_refused(text: str) -> None:
    with pytest.raises(ServiceError, match="from 0 to 1") as caught:
        read_options({"temperature": text})
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_options", "temperature")


@pytest.mark.parametrize(
    ("form", "granularities"),
    [
        ({"response_format": "verbose_json"}, {"segment"}),
        ({"response_format": "verbose_json", "timestamp_granularities[]": "word"}, {"word"}),
        ({"response_format": "verbose_json", "timestamp_granularities": "word,segment"}, {"word", "segment"}),
        ({"response_format": "srt"}, {"segment"}),
    ],
)
def test_granularities(form: dict[str, str], granularities: set[str]) -> None:
    options = read_options(form)
    assert options.granularities == granularities
    assert options.decoding.get("word_timestamps", False) is ("word" in granularities)


@pytest.mark.parametrize(
    ("form", "code", "param"),
    [
        ({"response_format": "docx"}, "unsupported_response_format", "response_format"),
        ({"task": "summarise"}, "unsupported_task", "task"),
        ({"response_format": "verbose_json", "timestamp_granularities[]": "letter"}, "unsupported_granularity", None),
        ({"timestamp_granularities[]": "word"}, "unsupported_granularity", None),
    ],
)
def test_wrong_values_are_refused_by_name(form: dict[str, str], code: str, param: str | None) -> None:
    with pytest.raises(ServiceError) as caught:
        read_options(form)
    assert (caught.value.status, caught.value.code) == (400, code)
    assert caught.value.param == (param or "timestamp_granularities[]")


def test_what_the_front_end_knows_is_what_the_engine_has() -> None:
    """It names them without importing the engine."""
    assert job_options.TASKS == TASKS
    assert set(job_options.SUBTITLES) <= set(WRITERS)
    known = {field.name for field in fields(DecodingOptions)}
    everything = {"language": "en", "task": "translate", "prompt": "x", "temperature": "0.4"}
    everything |= {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    decoding = read_options(everything).decoding
    assert set(decoding) <= known
    assert len(decoding) == 5
