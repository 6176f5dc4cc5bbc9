"""Loops: noticed while decoding, cut where nothing helps, and no harm to what repeats for a reason."""

from __future__ import annotations

import pytest

from engine.decoding import DecodingOptions, Fallback
from engine.decoding.loops import CHECK_EVERY, STUCK_TOKENS, is_stuck, without_repeats
from tests.engine.test_decoding import EOT, A, B, C, ScriptedDecoder, run, stamp
from tests.engine.test_token_decoders import Tree, decode

PHRASE = [A, B, C, A, C, B]


@pytest.mark.parametrize(
    ("tokens", "left"),
    [
        ([A] * 9, [A] * 3),
        (PHRASE * 8, PHRASE * 3),
        (PHRASE * 8 + [A, B], PHRASE * 3),  # its beginning once more is the loop too
        (PHRASE * 8 + [A, B, A], PHRASE * 3 + [A, B, A]),  # but not where the text goes on with it
        ([A, B] * 5 + [A, C], [A, B] * 3 + [A, C]),
        ([B] + [A, C] * 7 + [B], [B] + [A, C] * 3 + [B]),
        (PHRASE * 3, PHRASE * 3),
        ([A, A, A, B, A, A, A, B, C], [A, A, A, B, A, A, A, B, C]),
        ([A, B] * 4 + [C] * 5 + [A], [A, B] * 3 + [C] * 3 + [A]),
        ([], []),
    ],
)
def test_every_phrase_stands_three_times_in_a_row_at_most(tokens: list[int], left: list[int]) -> None:
    assert without_repeats(tokens, EOT) == left


def test_timestamps_stay_and_do_not_hide_a_loop() -> None:
    tokens = [token for i in range(6) for token in (stamp(5 * i), A, B, stamp(5 * i + 5))]
    cut = without_repeats(tokens, EOT)
    assert [token for token in cut if token >= EOT] == [token for token in tokens if token >= EOT]
    assert [token for token in cut if token < EOT] == [A, B] * 3


def test_a_loop_that_the_window_before_began_is_the_same_loop() -> None:
    assert without_repeats([*PHRASE * 5, A], EOT, before=[B, B, *PHRASE * 3]) == []
    assert without_repeats([*PHRASE * 5, stamp(3)], EOT, before=PHRASE) == [*PHRASE * 2, stamp(3)]
    assert without_repeats([C, C], EOT, before=PHRASE * 9) == [C, C]


@pytest.mark.parametrize("period", [1, 2, 6, 16])
def test_decoding_is_stuck_where_a_phrase_fills_the_newest_tokens(period: int) -> None:
    tokens = list(range(100, 120)) + list(range(period)) * 200
    seen = [n for n in range(1, 250) if is_stuck(tokens[:n], EOT)]
    first = 20 + STUCK_TOKENS + period  # all of the newest are repeats
    assert seen
    assert first - period <= seen[0] < first + CHECK_EVERY


def test_text_that_goes_on_is_not_stuck() -> None:
    assert not any(is_stuck([token % 97 for token in range(n)], EOT) for n in range(300))
    assert not is_stuck([A] * (STUCK_TOKENS - 16) + [stamp(1)] * 16, EOT)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model's windows hold 16 tokens."""
    monkeypatch.setattr("engine.decoding.loops.STUCK_TOKENS", 8)
    monkeypatch.setattr("engine.decoding.loops.STUCK_PERIOD", 2)
    monkeypatch.setattr("engine.decoding.loops.CHECK_EVERY", 4)


@pytest.mark.usefixtures("short")
def test_a_window_that_is_stuck_is_given_up_and_is_a_loop_whatever_its_ratio() -> None:
    """Text before the loop compresses badly: the ratio alone would let it pass."""
    result = run(ScriptedDecoder([stamp(0), *[A, B] * 50]))
    assert len(result.tokens) == 12
    assert result.is_stuck
    assert Fallback(DecodingOptions(compression_ratio_threshold=50.0)).loops(result)
    assert not Fallback(DecodingOptions(compression_ratio_threshold=None)).loops(result)
    assert not run(ScriptedDecoder([stamp(0), A, B])).is_stuck


@pytest.mark.usefixtures("short")
def test_one_draw_that_is_stuck_ends_no_other() -> None:
    """Of eight draws some say A again and again, the others count up: none is cut where a look would find the first stuck."""

    def scores(held: tuple[int, ...]) -> dict[int, float]:
        if not held:
            return {stamp(0): 20.0}
        if len(held) == 1:
            return {A: 10.0, 100: 10.0}
        return {A: 20.0} if held[1] == A else {held[-1] + 1: 20.0}

    assert len(decode(Tree(scores), 1.0, best_of=8)) == 16  # all the room there is
