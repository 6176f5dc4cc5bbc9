"""Error rates: what is counted, in which units, and what is left out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from engine.errors import MeasuringUnavailable
from engine.wer import Row, Score, Scorer, read_rows


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    pytest.importorskip("jiwer", reason="the measure extra is not installed")
    pytest.importorskip("whisper_normalizer", reason="the measure extra is not installed")
    return Scorer()


def test_substitutions_deletions_and_insertions_are_summed(scorer: Scorer) -> None:
    score = Score("words")
    scorer.add(score, Row("a", "s", "en", "Mr. Brown can't see the colour"), "Mister Brown can not see a color, yes")
    scorer.add(score, Row("b", "s", "en", "red green blue"), "")
    assert (score.n_files, score.n_units) == (2, 7 + 3)  # the normaliser makes two words of can't, and color of colour
    assert (score.substitutions, score.deletions, score.insertions) == (1, 3, 1)
    assert score.percent == pytest.approx(100 * 5 / 10)


def test_text_where_nothing_is_said_is_inserted(scorer: Scorer) -> None:
    score = Score("words")
    scorer.add(score, Row("a", "s", "en", ""), "thank you")
    scorer.add(score, Row("a", "s", "en", ""), "")
    assert (score.n_files, score.insertions, score.percent) == (2, 2, 0.0)


def test_chinese_japanese_and_korean_count_characters(scorer: Scorer) -> None:
    score = Score("characters")
    scorer.add(score, Row("a", "s", "zh", "甚至出现交易，几乎停滞。"), "甚至 出现 交易 几乎停制")
    assert (score.n_units, score.substitutions, score.deletions, score.insertions) == (10, 1, 0, 0)
    assert scorer.units("안녕 하세요!", "ko") == list("안녕하세요")
    assert scorer.units("¡Buenos días!", "es") == ["buenos", "días"]


def test_sets_units_and_totals(scorer: Scorer) -> None:
    rows = [
        Row("a", "x", "en", "red green"),
        Row("b", "y", "de", "eins zwei"),
        Row("c", "y", "zh", "一二"),
        Row("d", "joined-derived", "en", "red green"),
    ]
    scores = scorer.scores(rows, ["red", "eins zwei drei", "一", ""])
    assert list(scores) == ["x", "y", "y (characters)", "joined-derived", "total", "total (characters)"]
    assert scores["total"].to_json() == {
        "unit": "words",
        "n_files": 2,
        "n_units": 4,
        "substitutions": 0,
        "deletions": 1,
        "insertions": 1,
        "percent": 50.0,
    }
    assert scores["joined-derived"].percent == 100.0
    assert scores["total (characters)"].percent == 50.0


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_without_a_transcript_or_with_a_guessed_one_are_left_out(tmp_path: Path) -> None:
    manifest = write(
        tmp_path / "m.jsonl",
        {"path": "a.wav", "set": "x", "language": "de", "text": "eins"},
        {"path": "b.wav", "set": "x", "text": None},
        {"path": "c.wav", "set": "y", "text": ""},
        {"path": "d.wav", "set": "y", "text": "guess", "transcript_quality": "C"},
    )
    assert read_rows(manifest) == [Row("a.wav", "x", "de", "eins"), Row("c.wav", "y", "en", "")]
    assert [row.path for row in read_rows(manifest, ["y"])] == ["c.wav"]
    with pytest.raises(MeasuringUnavailable, match="no transcripts of z"):
        read_rows(manifest, ["x", "z"])


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]\n",
        '{"text": "x"}\n',
        "\x00",
        '{"path": null, "text": "x"}',
        '{"path": "a", "text": 5}',
        '{"path": "a", "text": "x", "set": 1}',
    ],
)
def test_what_is_no_manifest_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(text)
    with pytest.raises(MeasuringUnavailable, match=r"m.jsonl is no manifest"):
        read_rows(tmp_path / "m.jsonl")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(MeasuringUnavailable, match="jiwer is not installed: pip install"):
        Scorer()
