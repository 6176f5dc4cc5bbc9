"""Word error rates over recordings with transcripts: Whisper's own normaliser on both sides, errors summed.

Chinese, Japanese and Korean are scored by character. Needs the packages of the `measure` extra (jiwer, whisper-normalizer).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import MeasuringUnavailable

BY_CHARACTER = frozenset({"zh", "ja", "ko"})
"""Languages whose errors are counted in characters: where words begin is a matter of taste there."""
GUESSED = "C"
"""`transcript_quality` of a transcript that a recogniser wrote; no error rate can be told by it."""
DERIVED = "-derived"
"""How the name of a set ends whose recordings are in other sets too: it is not part of a total."""


@dataclass(frozen=True, slots=True)
class Row:
    """One recording of a manifest; `text` is empty where nothing is said in it."""

    path: str
    set: str
    language: str
    text: str


@dataclass(slots=True)
class Score:
    """Errors over some recordings.

    Attributes
    ----------
    unit : str
        `words`, or `characters`.
    n_units : int
        In the transcripts; 0 where none of the recordings holds speech.
    """

    unit: str
    n_files: int = 0
    n_units: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    @property
    def percent(self) -> float:
        """Errors in a hundred units; above 100 where more is made up than is said. Without a unit, 0."""
        errors = self.substitutions + self.deletions + self.insertions
        return 100.0 * errors / self.n_units if self.n_units else 0.0

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"percent": self.percent}


def read_rows(manifest: Path, sets: Iterable[str] = ()) -> list[Row]:
    """Recordings of a manifest that have a transcript, in its order; those of `sets` alone where any are named.

    A manifest holds a JSON object a line: path (from the manifest's own directory), text; set, language (en) and
    transcript_quality where they are there.

    Raises
    ------
    MeasuringUnavailable
        It is no manifest, or lacks a set that was asked for.
    """
    try:
        values = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines() if line.strip()]
        known = [value for value in values if value["text"] is not None and value.get("transcript_quality") != GUESSED]
        rows = [Row(value["path"], value.get("set") or "", value.get("language") or "en", value["text"]) for value in known]
        if not all(isinstance(field, str) for row in rows for field in (row.path, row.set, row.language, row.text)):
            raise TypeError("a field is no text")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MeasuringUnavailable(f"{manifest.name} is no manifest of a JSON object a line with path and text") from error
    wanted = set(sets)
    missing = wanted - {row.set for row in rows}
    if missing:
        raise MeasuringUnavailable(f"{manifest.name} has no transcripts of {', '.join(sorted(missing))}")
    return [row for row in rows if not wanted or row.set in wanted]


class Scorer:
    """Compares what was heard with transcripts.

    Raises
    ------
    MeasuringUnavailable
        A package of the `measure` extra is not installed.
    """

    def __init__(self) -> None:
        try:
            import jiwer
            from whisper_normalizer.basic import BasicTextNormalizer
            from whisper_normalizer.english import EnglishTextNormalizer
        except ImportError as error:
            raise MeasuringUnavailable(f"{error.name} is not installed: pip install 'thimble-stt[measure]'") from error
        self._align = jiwer.process_words
        self._english: Any = EnglishTextNormalizer()
        self._other: Any = BasicTextNormalizer()

    def units(self, text: str, language: str) -> list[str]:
        """What is compared: normalised words, or characters."""
        words = str(self._english(text) if language == "en" else self._other(text)).split()
        return [character for word in words for character in word] if language in BY_CHARACTER else words

    def add(self, score: Score, row: Row, heard: str) -> None:
        """Add one recording's errors to `score`."""
        reference, hypothesis = self.units(row.text, row.language), self.units(heard, row.language)
        score.n_files += 1
        score.n_units += len(reference)
        if not reference:  # jiwer takes no empty reference
            score.insertions += len(hypothesis)
            return
        # Units joined by spaces are words to jiwer, whatever they are to us.
        out = self._align(" ".join(reference), " ".join(hypothesis))
        score.substitutions += out.substitutions
        score.deletions += out.deletions
        score.insertions += out.insertions

    def scores(self, rows: Sequence[Row], heard: Sequence[str]) -> dict[str, Score]:
        """By set and unit, then `total` by unit; named `set`, or `set (characters)`."""
        table: dict[str, Score] = {}
        for row, text in zip(rows, heard, strict=True):
            unit = "characters" if row.language in BY_CHARACTER else "words"
            names = [row.set] if row.set.endswith(DERIVED) else [row.set, "total"]
            for name in names:
                key = name if unit == "words" else f"{name} ({unit})"
                self.add(table.setdefault(key, Score(unit)), row, text)
        totals = {name: score for name, score in table.items() if name.startswith("total")}
        return {name: score for name, score in table.items() if name not in totals} | totals
