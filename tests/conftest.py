"""Fixtures: the project's own recordings, a seeded random checkpoint, and the real tiny.en weights."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

# As the worker runs; and two threads of BLAS that wait for each other on a busy machine are many times slower than one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from engine.cli import data_directory
from engine.fetch import fetch
from engine.published import model_directory
from tests.random_checkpoint import write_ctranslate2

RECORDINGS = Path(__file__).parent / "recordings"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what computes with the real weights: `make test-arm` leaves all but one of it out."""
    for item in items:
        if {"tiny_en", "tiny_en_f16"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("weights")


@dataclass(frozen=True)
class Recording:
    path: Path
    text: str
    seconds: float


@pytest.fixture(scope="session")
def recordings() -> dict[str, Recording]:
    """Synthesised speech by file name without its ending: demo (12 s), digits (5 s), long (66 s)."""
    table = json.loads((RECORDINGS / "recordings.json").read_text(encoding="utf-8"))
    return {Path(n).stem: Recording(RECORDINGS / n, row["text"], row["seconds"]) for n, row in table.items()}


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CTranslate2 directory of a small random Whisper with the real structure; never written to by a test."""
    directory = tmp_path_factory.mktemp("random")
    write_ctranslate2(directory)
    return directory


def _real_weights(weights: str) -> Path:
    directory = model_directory(data_directory() / "models", "tiny.en", weights)
    fetch("tiny.en", directory, weights)  # `make test` did so before; then this only verifies
    return directory


@pytest.fixture(scope="session")
def tiny_en() -> Path:
    """tiny.en as it is served: INT8."""
    return _real_weights("int8")


@pytest.fixture(scope="session")
def tiny_en_f16() -> Path:
    """tiny.en without loss: OpenAI published float16."""
    return _real_weights("f16")
