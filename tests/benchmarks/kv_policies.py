"""What each K/V policy costs: words wrong, transcripts changed, bytes, and milliseconds per decoder token.

    python -m tests.benchmarks.kv_policies --model DIR SPEECH_DIR SET [SET …]

Every recording of the sets is transcribed under each policy in turn, with the default options in English, and with two
combinations that no name gives: INT8 self K/V with float32 cross K/V, and the reverse. A window that two of them hear is
encoded once. Changed are the texts that differ from those of f32 by a character. A token's time is the median of the steps
that feed one token; `begin` is the median of what a window costs the decoder before its first token.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from engine.arena import Arena
from engine.decoding import DecodingOptions
from engine.dims import Float32
from engine.kv_cache import KV_POLICIES, CrossKVCache, SelfKVCache, make_caches
from engine.model.decoder import TextDecoder
from engine.model.encoder import AudioEncoder
from engine.model.whisper import window_rooms
from engine.progress import show_progress
from engine.tail import Positions
from engine.timings import LayerTimings
from engine.transcribe import Engine
from engine.wer import Score, Scorer, read_rows

MIXED = {"f32, self int8": ("int8", "f32"), "int8, self f32": ("f32", "int8")}
"""Policies of the self and the cross K/V."""


class RememberingEncoder:
    """Gives the audio features of a window that was encoded before without encoding it again."""

    def __init__(self, encoder: AudioEncoder) -> None:
        self._encoder = encoder
        self._known = dict[bytes, Float32]()

    def encode(self, log_mel: Float32, positions: Positions, timings: LayerTimings, check: Callable[[], None]) -> Float32:
        window = log_mel.tobytes()
        if window not in self._known:
            self._known[window] = self._encoder.encode(log_mel, positions, timings, check).copy()
        return self._known[window]

    def forget(self) -> None:
        self._known.clear()


class TimedDecoder(TextDecoder):
    """Keeps the seconds of every step that feeds one token, and of every window's beginning; in an arena of its own."""

    def __init__(self, engine: Engine, self_kv: SelfKVCache, cross_kv: CrossKVCache) -> None:
        arena = Arena(window_rooms(engine._model.dims, self_kv, cross_kv))
        self_kv.bind(arena)
        cross_kv.bind(arena)
        super().__init__(engine._store, self_kv, cross_kv, arena)
        self.kv_bytes = self_kv.n_bytes, cross_kv.n_bytes
        self.token_seconds: list[float] = []
        self.begin_seconds: list[float] = []

    def step(self, tokens: Sequence[int], positions: Sequence[int], timings: LayerTimings) -> Float32:
        started = time.perf_counter()
        logits = super().step(tokens, positions, timings)
        if len(tokens) == 1:
            self.token_seconds.append(time.perf_counter() - started)
        return logits

    def begin_window(self, *arguments: object) -> None:
        started = time.perf_counter()
        super().begin_window(*arguments)  # type: ignore[arg-type]
        self.begin_seconds.append(time.perf_counter() - started)


def engines(directory: Path) -> tuple[dict[str, Engine], dict[str, TimedDecoder], RememberingEncoder]:
    """An engine and its decoder for every policy and combination, and the encoder that they share."""
    made, decoders = dict[str, Engine](), dict[str, TimedDecoder]()
    for name in [*KV_POLICIES, *MIXED]:
        for_self, for_cross = MIXED.get(name, (name, name))
        made[name] = engine = Engine(directory, for_cross)
        dims = engine._model.dims
        decoders[name] = TimedDecoder(engine, make_caches(for_self, dims)[0], make_caches(for_cross, dims)[1])
        engine._model.decoder = decoders[name]
    encoder = RememberingEncoder(made["f32"]._model.encoder)
    for engine in made.values():
        engine._model.encoder = encoder  # type: ignore[assignment]
    return made, decoders, encoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speech", type=Path)
    parser.add_argument("sets", nargs="+")
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    rows = read_rows(args.speech / "manifest.jsonl", args.sets)
    scorer, options = Scorer(), DecodingOptions("en")
    made, decoders, encoder = engines(args.model)
    heard: dict[str, list[str]] = {name: [] for name in made}
    for number, row in enumerate(rows, 1):
        for name, engine in made.items():
            heard[name].append(engine.transcribe(args.speech / row.path, LayerTimings(), options).text)
        encoder.forget()
        show_progress("recordings", number / len(rows), f"{number} of {len(rows)}")
    scores = {name: scorer.scores(rows, texts) for name, texts in heard.items()}
    sets = [name for name in scores["f32"] if name != "total"]
    print(f"{len(rows)} recordings, {scores['f32']['total'].n_units} words")
    columns = f"{'changed':>8} {'self':>9} {'cross':>9} {'ms/token':>9} {'begin ms':>9}"
    print(f"{'policy':15} {'wrong':>8} {columns}  wrong in {', '.join(sets)}")
    for name, texts in heard.items():
        changed = sum(text != plain for text, plain in zip(texts, heard["f32"], strict=True))
        print(f"{name:15} {_line(scores[name], changed, decoders[name])}  {_of_sets(scores[name], sets)}")


def _line(scores: dict[str, Score], changed: int, decoder: TimedDecoder) -> str:
    own, cross = (f"{n_bytes / 1e6:6.2f} MB" for n_bytes in decoder.kv_bytes)
    times = f"{1e3 * median(decoder.token_seconds):9.2f} {1e3 * median(decoder.begin_seconds):9.2f}"
    return f"{scores['total'].percent:6.2f} % {changed:8} {own} {cross} {times}"


def _of_sets(scores: dict[str, Score], sets: Sequence[str]) -> str:
    return ", ".join(f"{scores[name].percent:.2f} %" for name in sets)


if __name__ == "__main__":
    main()
