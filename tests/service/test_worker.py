"""How a worker loads its model: as the operator says, or as the memory allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import transcribe
from engine.transcribe import Engine
from service import worker
from service.protocol import Load


def loaded(model: Path, monkeypatch: pytest.MonkeyPatch, left: int | None, **asked: object) -> Engine:
    monkeypatch.setattr(transcribe, "available_budget", lambda others_bytes: {worker.OTHERS_BYTES: left}[others_bytes])
    request = {"kv": None, "residency": None, "tail": "merged", "budget_bytes": None} | asked
    return worker._load(Load(str(model), "", "int8", **request))  # type: ignore[arg-type]


def test_a_worker_runs_as_the_memory_allows(tiny_en: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rich, poor = (loaded(tiny_en, monkeypatch, left) for left in (1 << 40, 1))
    assert rich.plan is not None
    assert rich.plan.token_read_bytes == 0
    assert poor.plan is not None  # nobody asked for so little: the least, not a refusal
    assert poor.plan.residency.pinned == frozenset()
    assert poor.plan.peak_bytes < rich.plan.peak_bytes


def test_what_the_operator_says_counts(tiny_en: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(tiny_en, monkeypatch, 1, residency="resident").plan is None
    asked = loaded(tiny_en, monkeypatch, 1, budget_bytes=1 << 40).plan
    assert asked is not None
    assert asked.token_read_bytes == 0
    assert loaded(tiny_en, monkeypatch, None).plan is None
