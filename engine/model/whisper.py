"""`Whisper`: one model, loaded once, and the state that one window needs, allocated once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.arena import DECODE, ENCODE, FILL, Arena, Room, place
from engine.dims import CONV_WIDTH, TILE_ROWS, Float32, ModelDimensions
from engine.kv_cache import CrossKVCache, SelfKVCache, make_caches
from engine.model.decoder import TextDecoder
from engine.model.encoder import AudioEncoder
from engine.shards.store import ShardStore
from engine.tail import TAILS
from engine.timings import LayerTimings

N_SEQUENCES = 5
"""Sequences that the arena has room for: openai/whisper's number of draws and of beams."""


def arena_bytes(dims: ModelDimensions, kv: str) -> int:
    """What a window takes of a model of these dimensions, under a K/V policy."""
    return place(window_rooms(dims, *make_caches(kv, dims)))[1]


def window_rooms(dims: ModelDimensions, self_kv: SelfKVCache, cross_kv: CrossKVCache) -> list[Room]:
    """All that a window needs of an arena."""
    n_state = dims.n_audio_state
    # Expanded whole: the second convolution; position encodings; keys and values of a sequence's own tokens, and a head's of a
    # window. Everything else comes in tiles.
    cross_heads = 2 * dims.n_audio_ctx * n_state // dims.n_text_head
    whole = (CONV_WIDTH * n_state * max(n_state, dims.n_mels), 2 * n_state * dims.n_text_ctx, cross_heads)
    return [
        Room("scratch", (max(*whole, TILE_ROWS * n_state),), np.float32, frozenset({ENCODE, FILL, DECODE})),
        Room("spare", (2, dims.n_audio_ctx, n_state), np.float32, frozenset({FILL})),
        Room("log_mel", (dims.n_frames, dims.n_mels), np.float32, frozenset({ENCODE, FILL, DECODE})),
        *AudioEncoder.rooms(dims),
        *TextDecoder.rooms(dims, N_SEQUENCES),
        *self_kv.rooms(N_SEQUENCES),
        *cross_kv.rooms(),
    ]


class Whisper:
    """Encoder, decoder and caches over one store.

    Parameters
    ----------
    store : ShardStore
    kv : str
        K/V policy, one of `engine.kv_cache.KV_POLICIES`.
    tail : str
        What becomes of the padding behind a short window's sound, one of `engine.tail.TAILS`.

    Attributes
    ----------
    self_kv_bytes, cross_kv_bytes : int
        What the caches hold, for one sequence.
    arena_bytes : int
        What a window takes, the caches included.
    log_mel : float32 [dims.n_frames, dims.n_mels]
        Room for a window's log-mel; what it holds stays from window to window.
    """

    def __init__(self, store: ShardStore, kv: str, tail: str = "merged") -> None:
        dims = store.dims
        self_kv, cross_kv = make_caches(kv, dims)
        arena = Arena(window_rooms(dims, self_kv, cross_kv))
        self_kv.bind(arena)
        cross_kv.bind(arena)
        self._spare: Float32 = arena["spare"]
        self.log_mel: Float32 = arena["log_mel"]
        self.arena_bytes = arena.n_bytes
        self.dims: ModelDimensions = dims
        self._positions = TAILS[tail]
        self.self_kv_bytes, self.cross_kv_bytes = self_kv.n_bytes, cross_kv.n_bytes
        self.encoder = AudioEncoder(store, arena)
        self.decoder = TextDecoder(store, self_kv, cross_kv, arena)

    def begin_window(self, log_mel: Float32, timings: LayerTimings, check: Callable[[], None]) -> None:
        """Encode a window and get the decoder ready for it.

        Parameters
        ----------
        log_mel : float32 [n, n_mels], time first
            The window's first n frames, at most dims.n_frames; those up to its end are zero.
        check : callable
            Called before every layer; what it raises ends the work.
        """
        with timings.stage("encode"):
            positions = self._positions(len(log_mel), self.dims.n_audio_ctx)
            audio_features = self.encoder.encode(log_mel, positions, timings, check)
            self.decoder.begin_window(audio_features, positions.log_counts, self._spare, timings, check)
