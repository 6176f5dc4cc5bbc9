"""`Whisper`: one model, loaded once, and the state that one window needs, allocated once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.dims import CONV_WIDTH, Float32, ModelDimensions
from engine.kv_cache import make_caches
from engine.model.decoder import TextDecoder
from engine.model.encoder import AudioEncoder
from engine.shards.store import ShardStore
from engine.tail import TAILS
from engine.timings import LayerTimings


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
        What the caches hold.
    """

    def __init__(self, store: ShardStore, kv: str, tail: str = "merged") -> None:
        dims = store.dims
        n_state = dims.n_audio_state
        # Expanded whole: the second convolution; position encodings, or the keys of a sequence's own tokens; a head's keys of a
        # window. Everything else comes in tiles.
        cross_head = dims.n_audio_ctx * n_state // dims.n_text_head
        whole = (CONV_WIDTH * n_state * max(n_state, dims.n_mels), n_state * dims.n_text_ctx, cross_head)
        scratch: Float32 = np.zeros(max(whole), np.float32)
        self_kv, cross_kv = make_caches(kv, dims)
        self.dims: ModelDimensions = dims
        self._positions = TAILS[tail]
        self.self_kv_bytes, self.cross_kv_bytes = self_kv.n_bytes, cross_kv.n_bytes
        self.encoder = AudioEncoder(store, scratch)
        self.decoder = TextDecoder(store, self_kv, cross_kv, scratch)

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
            self.decoder.begin_window(audio_features, positions.log_counts, self.encoder.spare, timings, check)
