"""Seconds foreseen: the slower of arithmetic and storage where a piece is read ahead, both where none is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import InvalidOptions
from engine.forecast import Work, forecast, read_work
from engine.plan import Plan
from engine.shards.residency import Residency

PLAN = Plan("int8", Residency(frozenset(), 2, 4096), 1, 1, 1, window_read_bytes=100, token_read_bytes=30)
WORK = Work(n_windows=2, n_steps=10, window_seconds=3.0, step_seconds=0.5, other_seconds=0.25)


def one_slot(plan: Plan) -> Plan:
    return replace(plan, residency=replace(plan.residency, slots=1))


def test_the_slower_of_both_shows_where_a_piece_is_read_ahead() -> None:
    """50 bytes a second: a window waits for its arithmetic, a token for storage."""
    assert forecast(PLAN, 50, WORK) == {
        "window_read_seconds": 2.0,
        "token_read_seconds": 0.6,
        "window_seconds": 3.0,
        "token_seconds": 0.6,
        "recording_seconds": 2 * 3.0 + 10 * 0.6 + 0.25,
    }


def test_with_one_slot_they_take_turns() -> None:
    assert forecast(one_slot(PLAN), 50, WORK)["recording_seconds"] == 2 * 5.0 + 10 * 1.1 + 0.25


def test_what_is_not_known_is_not_told() -> None:
    assert forecast(PLAN, None, None) == {}
    assert forecast(PLAN, 50, None) == {"window_read_seconds": 2.0, "token_read_seconds": 0.6}
    assert forecast(one_slot(PLAN), None, WORK)["recording_seconds"] == 2 * 3.0 + 10 * 0.5 + 0.25


def printed() -> dict[str, object]:
    layers = [
        ["encoder", "0", "compute", 1.5, 2],
        ["encoder", "ln_post", "compute", 0.5, 2],
        ["encoder", "0", "wait", 4.0, 2],
        ["encoder", "0", "load", 9.0, 2],
        ["decoder", "0", "compute", 6.0, 12],  # ten passes, and twice the cross K/V
        ["decoder", "embedding", "compute", 3.0, 20],
        ["decoder", "ln", "compute", 1.0, 10],
        ["decoder", "0", "wait", 2.0, 12],
    ]
    return {"seconds": 20.0, "timings": {"layers": layers}}


def test_work_is_what_bench_printed_without_its_waits(tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    times.write_text(json.dumps(printed()))
    assert read_work(times) == Work(2, 10, 1.0, 1.0, 20.0 - (2.0 + 10.0 + 4.0 + 2.0))


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"timings": {"layers": [[1]]}}', '{"seconds": 1, "timings": {"layers": []}}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    """The last is a recording in which nothing was heard."""
    times = tmp_path / "times.json"
    times.write_text(text)
    with pytest.raises(InvalidOptions, match=r"times\.json"):
        read_work(times)
