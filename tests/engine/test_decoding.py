"""Logit filters and the token loop, with scripted scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from engine.byte_pairs import byte_order
from engine.decoding import DecodingOptions, DecodingResult, DecodingTask, detect_language
from engine.decoding.filters import ApplyTimestampRules, SuppressBlank, SuppressTokens
from engine.errors import Cancelled, UnsupportedLanguage
from engine.timings import LayerTimings
from engine.tokenizer import SpecialTokens, Tokenizer, Vocabulary
from tests.random_checkpoint import DIMS, EOT, N_TEXT_TOKENS, SPECIAL_IDS, TIMESTAMP_BEGIN

N_VOCAB = DIMS.n_vocab
A, B, C = 65, 66, 67


def special(multilingual: bool = False) -> SpecialTokens:
    return SpecialTokens(
        eot=EOT,
        sot=SPECIAL_IDS["<|startoftranscript|>"],
        translate=SPECIAL_IDS["<|translate|>"],
        transcribe=SPECIAL_IDS["<|transcribe|>"],
        sot_lm=SPECIAL_IDS["<|startoflm|>"],
        sot_prev=SPECIAL_IDS["<|startofprev|>"],
        no_speech=SPECIAL_IDS["<|nospeech|>"],
        no_timestamps=SPECIAL_IDS["<|notimestamps|>"],
        timestamp_begin=TIMESTAMP_BEGIN,
        blank=32,
        multilingual=multilingual,
        languages={"en": SPECIAL_IDS["<|en|>"], "de": SPECIAL_IDS["<|de|>"]},
        non_speech=(1, 2, 7),
    )


def tokenizer(multilingual: bool = False) -> Tokenizer:
    words = [bytes([byte]) for byte in range(256)] + [b" one", b" two"]
    begins = np.cumsum([0] + [len(word) for word in words]).astype(np.uint32)
    table = np.frombuffer(b"".join(words), np.uint8)
    return Tokenizer(Vocabulary(table, begins, special(multilingual)), lambda: byte_order(table.tobytes(), begins))


def stamp(position: int) -> int:
    return TIMESTAMP_BEGIN + position


def allowed(sampled: Sequence[int], scores: dict[int, float] | None = None) -> set[int]:
    """Tokens that the timestamp rules leave, over flat scores but for `scores`."""
    logits = np.zeros(N_VOCAB, np.float32)
    logits[TIMESTAMP_BEGIN:] = -20.0  # timestamps together are unlikely unless a test says so
    for token, score in (scores or {}).items():
        logits[token] = score
    ApplyTimestampRules(special()).apply(logits, sampled)
    return {int(token) for token in np.flatnonzero(np.isfinite(logits))}


TIMESTAMPS = set(range(TIMESTAMP_BEGIN, N_VOCAB))
TEXT_AND_SPECIAL = set(range(TIMESTAMP_BEGIN)) - {SPECIAL_IDS["<|notimestamps|>"]}


def test_the_first_token_is_a_timestamp_up_to_one_second() -> None:
    assert allowed([]) == {stamp(i) for i in range(51)}


def test_after_the_first_timestamp_comes_text() -> None:
    assert allowed([stamp(0)]) == TEXT_AND_SPECIAL


def test_after_a_pair_comes_text() -> None:
    assert allowed([stamp(0), A, stamp(5), stamp(5)]) == TEXT_AND_SPECIAL


def test_after_one_closing_timestamp_comes_its_twin_or_a_later_one_or_the_end() -> None:
    assert allowed([stamp(0), A, stamp(5)], {EOT: 10.0}) == {stamp(i) for i in range(5, 51)} | (
        set(range(EOT, TIMESTAMP_BEGIN)) - {SPECIAL_IDS["<|notimestamps|>"]}
    )


def test_a_closing_timestamp_is_later_than_the_opening_one() -> None:
    left = allowed([stamp(5), A])
    assert left & TIMESTAMPS == {stamp(i) for i in range(6, 51)}
    assert left >= TEXT_AND_SPECIAL


def test_timestamps_win_where_together_they_are_likelier_than_any_text() -> None:
    """Thirty timestamps of -2 sum to more than one text token of 0."""
    each = {stamp(i): -2.0 for i in range(1, 31)}
    assert allowed([stamp(0), A], each) == {stamp(i) for i in range(1, 51)}
    assert A in allowed([stamp(0), A], {stamp(i): -2.0 for i in range(1, 7)})


def test_no_timestamps_token_is_banned_always() -> None:
    for sampled in ([], [stamp(0)], [stamp(0), A]):
        assert SPECIAL_IDS["<|notimestamps|>"] not in allowed(sampled)


def test_suppress_blank_only_at_the_start() -> None:
    for sampled, banned in (([], {32, EOT}), ([stamp(0)], set())):
        logits = np.zeros(N_VOCAB, np.float32)
        SuppressBlank(special()).apply(logits, sampled)
        assert set(np.flatnonzero(np.isneginf(logits))) == banned


def test_suppress_tokens_bans_symbols_and_misplaced_specials() -> None:
    logits = np.zeros(N_VOCAB, np.float32)
    SuppressTokens(special()).apply(logits, [])
    names = ("startoftranscript", "translate", "transcribe", "startoflm", "startofprev", "nospeech")
    assert set(np.flatnonzero(np.isneginf(logits))) == {1, 2, 7} | {SPECIAL_IDS[f"<|{name}|>"] for name in names}


class ScriptedDecoder:
    """Gives each step's logits from a list of chosen tokens; keeps what it was fed."""

    def __init__(self, choices: Sequence[int], no_speech: float = 0.0) -> None:
        self.choices, self.no_speech = list(choices), no_speech
        self.fed: list[list[int]] = []
        self.restarts = 0

    def restart(self) -> None:
        self.restarts += 1

    def reorder(self, sources: Sequence[int]) -> None:
        assert list(sources) == [0]

    def step(self, tokens: Sequence[int], positions: Sequence[int], timings: LayerTimings) -> np.ndarray:
        self.fed.append(list(tokens))
        logits = np.zeros((len(positions), N_VOCAB), np.float32)
        if len(positions) == 2:
            logits[0, SPECIAL_IDS["<|nospeech|>"]] = self.no_speech
        choice = self.choices.pop(0) if self.choices else EOT
        logits[-1, choice] = 30.0
        return logits


def run(
    decoder: object,
    prompt: Sequence[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
    multilingual: bool = False,
    prefix: Sequence[int] = (),
    check: Callable[[], None] = lambda: None,
    **options: object,
) -> DecodingResult:
    """Decode one window with a scripted decoder; `options` are `DecodingOptions`'s."""
    model = SimpleNamespace(decoder=decoder, dims=DIMS)
    asked = DecodingOptions("de" if multilingual else "en", **options)
    task = DecodingTask(model, tokenizer(multilingual), asked, prefix)
    return task.run(asked.language, prompt, temperature, seed, LayerTimings(), check)


def test_tokens_come_until_the_end_token_each_fed_once() -> None:
    decoder = ScriptedDecoder([stamp(0), A, B, stamp(9)])
    result = run(decoder)
    assert result.tokens == [stamp(0), A, B, stamp(9)]
    assert decoder.fed == [[special().sot], [stamp(0)], [A], [B], [stamp(9)]]


def test_a_window_ends_at_half_the_context() -> None:
    decoder = ScriptedDecoder([stamp(0), *[A] * 100])
    result = run(decoder)
    assert len(result.tokens) == DIMS.n_text_ctx // 2


@pytest.mark.parametrize("n_prompt", [0, 1, 14, 15, 16, 200])
def test_a17_the_prompts_end_is_kept_and_the_context_is_never_passed(n_prompt: int) -> None:
    prompt = tuple(range(40, 40 + n_prompt))
    decoder = ScriptedDecoder([stamp(0), *[A] * 100])
    run(decoder, prompt)
    kept = prompt[-15:]  # half the context, less one
    assert decoder.fed[0] == ([special().sot_prev, *kept] if prompt else []) + [special().sot]
    assert sum(len(tokens) for tokens in decoder.fed) <= DIMS.n_text_ctx


def test_no_speech_probability_is_the_start_tokens_before_filters() -> None:
    decoder = ScriptedDecoder([stamp(0)], no_speech=10.0)
    result = run(decoder, (A, B))
    assert result.no_speech_prob == pytest.approx(np.exp(10) / (np.exp(10) + N_VOCAB - 1), rel=1e-4)


def test_mean_log_probability_counts_the_end() -> None:
    result = run(ScriptedDecoder([stamp(0), A]))
    # each choice stands 30 above all others: its log-probability is nearly 0
    assert result.avg_logprob == pytest.approx(0.0, abs=1e-6)


def test_multilingual_start_sequence_and_task() -> None:
    for name in ("transcribe", "translate"):
        decoder = ScriptedDecoder([])
        run(decoder, multilingual=True, task=name)
        assert decoder.fed[0] == [special().sot, SPECIAL_IDS["<|de|>"], SPECIAL_IDS[f"<|{name}|>"]]


def test_language_is_the_likeliest_language_token_and_leaves_the_window_ready() -> None:
    decoder = ScriptedDecoder([SPECIAL_IDS["<|de|>"]])
    code, probability = detect_language(decoder, special(multilingual=True), LayerTimings())
    assert (code, probability) == ("de", pytest.approx(1.0))
    assert decoder.restarts == 1


def test_a_cancelled_window_stops_at_the_next_token() -> None:
    decoder = ScriptedDecoder([stamp(0), *[A] * 100])

    def check() -> None:
        if len(decoder.fed) == 4:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        run(decoder, check=check)
    assert len(decoder.fed) == 4


@pytest.mark.parametrize("text", ["en", "EN", "en-US", "en_us", "English", " english "])
def test_a25_spellings_of_a_language(text: str) -> None:
    assert tokenizer().language(text) == "en"


@pytest.mark.parametrize("text", ["xx", "null", "e" * 300, "de", "en-", "", "日本語"])
def test_a25_other_languages_are_refused_by_english_only_weights(text: str) -> None:
    if text == "en-":
        assert tokenizer().language(text) == "en"
        return
    with pytest.raises(UnsupportedLanguage, match="en"):
        tokenizer().language(text)


def test_a22_bytes_of_a_character_join_across_tokens() -> None:
    text = "北京のテスト 🎉 ņ"
    tokens = list(text.encode())
    assert tokenizer().decode(tokens) == text
    assert tokenizer().decode([stamp(0), *tokens[:1], EOT, stamp(3), *tokens[1:], stamp(9)]) == text
    assert tokenizer().decode(tokens[:2]) == "�"


def test_a18_special_tokens_have_no_text() -> None:
    assert tokenizer().decode([*range(N_TEXT_TOKENS, N_VOCAB)]) == ""
