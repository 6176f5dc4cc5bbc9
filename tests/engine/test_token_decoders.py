"""Greedy choice, draws, beam search and ranking, on scripted scores."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from engine.decoding import DecodingOptions, DecodingTask
from engine.decoding.token_decoders import BeamSearchDecoder, Hypothesis, SamplingDecoder, _highest, likeliest
from engine.timings import LayerTimings
from tests.engine.test_decoding import EOT, N_VOCAB, A, B, C, special, stamp, tokenizer
from tests.random_checkpoint import DIMS

LOGITS = np.log(np.array([[0.1, 0.6, 0.3]], np.float32))
END = 99
"""An end token that these three never are."""


def drawn(n: int, temperature: float, seed: int = 7, top_p: float = 1.0, logits: np.ndarray = LOGITS) -> list[int]:
    chooser = SamplingDecoder(END, temperature, seed, top_p=top_p)
    for _ in range(n):
        chooser.update(logits)
    return chooser.live[0]


@pytest.mark.parametrize("temperature", [0.2, 0.5, 1.0])
def test_draws_follow_the_probabilities_at_the_temperature(temperature: float) -> None:
    counts = Counter(drawn(1000, temperature))
    weights = np.array([0.1, 0.6, 0.3]) ** (1 / temperature)
    for token, expected in enumerate(weights / weights.sum()):
        assert counts[token] / 1000 == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize(("top_p", "left"), [(0.5, {1}), (0.61, {1, 2}), (0.89, {1, 2}), (0.95, {0, 1, 2}), (1e-9, {1})])
def test_top_p_leaves_the_likeliest_that_together_reach_it(top_p: float, left: set[int]) -> None:
    assert set(drawn(300, 1.0, top_p=top_p)) == left


def test_a_log_probability_is_that_at_temperature_1_of_what_was_drawn() -> None:
    chooser = SamplingDecoder(END, 0.7, seed=3)
    for _ in range(50):
        chooser.update(LOGITS)
    (hypothesis,) = chooser.hypotheses()
    assert hypothesis.sum_logprob == pytest.approx(float(sum(LOGITS[0, token] for token in hypothesis.tokens)), rel=1e-5)
    assert len(set(hypothesis.tokens)) > 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-39, 1e-300])
def test_a_tiny_temperature_is_the_likeliest_token_and_no_overflow(temperature: float) -> None:
    assert set(drawn(20, temperature)) == {1}
    assert set(drawn(20, temperature, logits=np.float32(1e4) * LOGITS)) == {1}


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_draw_from_tiles_is_the_draw_from_all_of_them(temperature: float, top_p: float) -> None:
    """The plain way: probabilities of the whole vocabulary, added up."""
    rng = np.random.default_rng(3)
    row = rng.standard_normal(20_000).astype(np.float32)
    row[rng.integers(0, len(row), 5000)] = -np.inf
    row[-3000:] = -np.inf
    chooser, dice = SamplingDecoder(EOT, temperature, seed=5, top_p=top_p), random.Random(5)  # noqa: S311
    probabilities = np.exp((row - row.max()) / np.float32(temperature)).astype(np.float64)
    probabilities /= probabilities.sum()
    order = np.argsort(probabilities)[::-1]
    kept = np.cumsum(probabilities[order]) - probabilities[order] < top_p
    probabilities[order[~kept]] = 0.0
    total = np.cumsum(probabilities)
    expected = [int(np.searchsorted(total, dice.random() * total[-1], side="right")) for _ in range(200)]
    assert [chooser._draw(row) for _ in range(200)] == expected
    assert len(set(expected)) > 20


def test_the_highest_of_tiles_are_the_highest() -> None:
    for size in (5, 8192, 20_000):
        row = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        row[: size // 2] = -np.inf
        n = min(size // 2, 9)
        assert sorted(_highest(row, n)) == sorted(np.argsort(row)[-n:].tolist())


def test_the_seed_alone_decides_the_draws() -> None:
    assert drawn(40, 1.0, seed=5) == drawn(40, 1.0, seed=5) == drawn(40, 1.0, seed=5) != drawn(40, 1.0, seed=6)


def test_a_banned_token_is_never_drawn() -> None:
    logits = np.zeros((1, 100), np.float32)
    logits[:, 50:] = -np.inf
    assert max(drawn(500, 1.0, logits=logits)) < 50


def test_draws_that_end_leave_the_others_going_on() -> None:
    """Ten sequences, each ended with probability a half at every step: sources say which of those before go on."""
    chooser = SamplingDecoder(0, 1.0, seed=1, n_draws=10)
    sources = chooser.update(np.zeros((1, 2), np.float32))
    assert set(sources) == {0}
    while sources:
        before = [list(tokens) for tokens in chooser.live]
        sources = chooser.update(np.zeros((len(before), 2), np.float32))
        assert [tokens[:-1] for tokens in chooser.live] == [before[source] for source in sources]
    made = chooser.hypotheses()
    assert len(made) == 10
    assert len({len(hypothesis.tokens) for hypothesis in made}) > 1
    for hypothesis in made:
        assert hypothesis.sum_logprob == pytest.approx((len(hypothesis.tokens) + 1) * np.log(0.5), rel=1e-5)


class Tree:
    """A decoder whose scores depend on what a sequence holds; it keeps its sequences by the sources it is given."""

    def __init__(self, scores: Callable[[tuple[int, ...]], dict[int, float]], n_start: int = 1) -> None:
        self._scores, self._n_start = scores, n_start
        self._held: list[list[int]] = [[]]
        self.widths: list[int] = []

    def restart(self) -> None:
        self._held = [[]]

    def reorder(self, sources: Sequence[int]) -> None:
        self._held = [list(self._held[source]) for source in sources]

    def step(self, tokens: Sequence[int], positions: Sequence[int], timings: LayerTimings) -> np.ndarray:
        if self._held == [[]] and not self.widths:
            self._held, positions = [list(tokens)], [0, 0]
        else:
            for held, token in zip(self._held, tokens, strict=True):
                held.append(token)
        self.widths.append(len(self._held))
        logits = np.full((len(positions), N_VOCAB), -30.0, np.float32)
        for row, held in zip(logits[-len(self._held) :], self._held, strict=True):
            for token, score in self._scores(tuple(held[self._n_start :])).items():
                row[token] = score
        return logits


def decode(tree: Tree, temperature: float = 0.0, **options: object) -> list[int]:
    task = DecodingTask(SimpleNamespace(decoder=tree, dims=DIMS), tokenizer(), DecodingOptions("en", **options))
    return task.run("en", (), temperature, 0, LayerTimings(), lambda: None).tokens


def garden_path(held: tuple[int, ...]) -> dict[int, float]:
    """A is likelier than B at first, but leads to a choice of many; B leads to one certain end."""
    text = [token for token in held if token < EOT]
    if not held:
        return {stamp(0): 0.0}
    if not text:
        return {A: np.log(0.6), B: np.log(0.4)}
    if text == [A]:
        return {C + i: np.log(0.1) for i in range(10)}
    return {stamp(9): 0.0} if held[-1] < stamp(0) else {EOT: 0.0}


def test_beams_see_what_greedy_choice_does_not() -> None:
    assert decode(Tree(garden_path))[1] == A
    assert decode(Tree(garden_path), beam_size=3) == [stamp(0), B, stamp(9)]


def test_beams_side_by_side_are_as_many_as_asked_for() -> None:
    tree = Tree(garden_path)
    decode(tree, beam_size=4)
    assert max(tree.widths) == 4


def beam_of(beam_size: int, patience: float, logits: np.ndarray) -> BeamSearchDecoder:
    beams = BeamSearchDecoder(EOT, beam_size, patience)
    while beams.update(np.repeat(logits, len(beams.live), axis=0)):
        pass
    return beams


@pytest.mark.parametrize(("patience", "n_ended"), [(0.5, 2), (1.0, 3), (2.0, 6)])
def test_patience_is_how_many_must_end(patience: float, n_ended: int) -> None:
    """round(3 * patience); openai/whisper rounds half to even too."""
    logits = np.full((1, N_VOCAB), -20.0, np.float32)
    logits[0, [A, B, EOT]] = 0.0
    beams = beam_of(3, patience, logits)
    ended = [hypothesis for hypothesis in beams.hypotheses() if hypothesis.tokens not in beams.live]
    assert len(ended) == n_ended


def test_beams_cut_off_fill_up_those_that_ended() -> None:
    beams = BeamSearchDecoder(EOT, 3)
    logits = np.full((1, N_VOCAB), -20.0, np.float32)
    logits[0, [A, B, EOT]] = 3.0, 2.0, 2.5
    beams.update(logits)
    assert sorted(beams.live)[:2] == [[A], [B]]
    made = beams.hypotheses()
    assert made[0].tokens == []
    assert [hypothesis.tokens for hypothesis in made[1:]] == [[A], [B]]  # the likeliest first


def test_one_beam_is_the_greedy_choice() -> None:
    rng = np.random.default_rng(5)
    beams, greedy = BeamSearchDecoder(EOT, 1), SamplingDecoder(EOT, 0.0)
    for _ in range(12):
        logits = rng.standard_normal((1, N_VOCAB)).astype(np.float32)
        logits[:, EOT] = -50
        beams.update(logits)
        greedy.update(logits)
    assert beams.live == greedy.live
    assert beams.hypotheses()[0].sum_logprob == pytest.approx(greedy.hypotheses()[0].sum_logprob, rel=1e-5)


def test_ranking_is_by_length_or_by_its_penalty() -> None:
    short, long = Hypothesis([A], -1.0), Hypothesis([A] * 10, -6.0)
    assert likeliest([short, long], None) is long  # -1 against -0.6 a token
    assert likeliest([short, long], 0.0) is short  # the sums themselves
    assert likeliest([short, long], 1.0) is short  # 6/6: -1 against 15/6: -2.4
    assert likeliest([Hypothesis([], -0.5), short], None).tokens == []


def test_best_of_keeps_the_likeliest_draw() -> None:
    def scores(held: tuple[int, ...]) -> dict[int, float]:
        text = [token for token in held if token < EOT]
        return {stamp(0): 0.0} if not held else {A: 0.0, B: -1.0} if not text else {EOT: 0.0}

    found = {tuple(decode(Tree(scores), 1.0, best_of=n)) for n in (16, 12)}
    assert found == {(stamp(0), A)}


def test_repetition_penalty_moves_text_alone() -> None:
    def scores(held: tuple[int, ...]) -> dict[int, float]:
        if not held:
            return {stamp(0): 5.0}
        return {A: 5.0, B: 4.0, C: 3.0, special().blank: -40.0, EOT: 2.0}

    assert decode(Tree(scores))[1:4] == [A, A, A]
    assert decode(Tree(scores), repetition_penalty=1.5)[1:4] == [A, B, A]  # 5 / 1.5 is below 4; 4 / 1.5 below that
