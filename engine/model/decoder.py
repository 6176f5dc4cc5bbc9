"""`TextDecoder`: tokens and a window's cross K/V → logits, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.arena import DECODE, Arena, Room
from engine.dims import Float32, ModelDimensions
from engine.errors import NonFiniteLogits
from engine.kernels import reference as kernels
from engine.kv_cache import CrossKVCache, CrossProjections, ScoreObserver, SelfKVCache
from engine.model.encoder import vector
from engine.quantization import Weight
from engine.shards.pieces import TABLE
from engine.shards.store import ShardStore
from engine.timings import LayerTimings

HIDDEN_ROWS = 64
"""Tokens of a prompt whose hidden width, keys and values exist at a time; a row of scores is there for as many of each head."""
EMBEDDED_TOGETHER = 32
"""Tokens whose embeddings are read at a time."""


class TextDecoder:
    """The decoder of openai/whisper model.py.

    Parameters
    ----------
    store : ShardStore
    self_kv, cross_kv : the caches of one policy
    arena : Arena
        With its `rooms`, and `scratch`: float32, flat, where weights and INT8 caches are expanded, as large as the caches ask.
    """

    def __init__(self, store: ShardStore, self_kv: SelfKVCache, cross_kv: CrossKVCache, arena: Arena) -> None:
        self._store = store
        self._dims = store.dims
        self._self_kv = self_kv
        self._cross_kv = cross_kv
        self._scratch: Float32 = arena["scratch"]
        self._rows: Float32 = arena["decoder"]
        self._hidden: Float32 = arena["decoder_hidden"]
        self._scores: Float32 = arena["decoder_scores"]
        self._logits_rows: Float32 = arena["logits"]

    @staticmethod
    def rooms(dims: ModelDimensions, n_sequences: int) -> list[Room]:
        """What it needs of an arena, beside `scratch`, the logits of `n_sequences` among it."""
        n_state, decode = dims.n_text_state, frozenset({DECODE})
        n_scores = HIDDEN_ROWS * max(dims.n_audio_ctx, dims.n_text_head * dims.n_text_ctx)
        return [
            Room("decoder", (3, dims.n_text_ctx, n_state), np.float32, decode),
            Room("decoder_hidden", (HIDDEN_ROWS * 4 * n_state,), np.float32, decode),
            Room("decoder_scores", (n_scores,), np.float32, decode),
            Room("logits", (n_sequences, dims.n_vocab), np.float32, decode),
        ]

    def begin_window(
        self,
        audio_features: Float32,
        log_counts: Float32,
        spare: Float32,
        timings: LayerTimings,
        check: Callable[[], None],
    ) -> None:
        """Take over a window, with the cross K/V of every layer where the policy stores these, and forget all tokens.

        Parameters
        ----------
        audio_features : float32 [n_positions, n_audio_state], at most n_audio_ctx positions
        log_counts : float32 [n_positions]
            Added to the positions' scores: 0 for a position that stands for itself, log 4 for one that stands for four.
        spare : float32 [2, n_audio_ctx, n_audio_state], overwritten
        check : called before every layer; what it raises ends the work
        """
        self.restart()
        self._cross_kv.begin(audio_features, log_counts, self._scratch)
        for layer in self._cross_kv.layers_to_fill:
            check()
            with self._store.layer("decoder", str(layer), timings) as weights:
                self._cross_kv.fill(layer, audio_features, _cross_projections(weights), spare, self._scratch)

    def reserve(self, n_sequences: int) -> None:
        """Make room for the self K/V of this many sequences, which share the window's cross K/V; all tokens are forgotten."""
        self._self_kv.reserve(n_sequences)

    def restart(self) -> None:
        """Forget all tokens; the window's cross K/V stay, for another attempt at the same window."""
        self._self_kv.reset()

    def reorder(self, sources: Sequence[int]) -> None:
        """Let sequence i go on from what was sequence `sources[i]`; one is live after `restart`."""
        self._self_kv.reorder(sources)

    def step(self, tokens: Sequence[int], positions: Sequence[int], timings: LayerTimings) -> Float32:
        """Feed `tokens` after those fed before, and project some of them.

        Parameters
        ----------
        tokens : n token ids: of one sequence, several at once only as a window's first step (prefill); or one of each
            live sequence
        positions : which of the n to give logits for; the projection is by far the largest product of a step

        Returns
        -------
        logits : float32 [len(positions), n_vocab], overwritten by the next step

        Raises
        ------
        ValueError
            The tokens do not fit `n_text_ctx`.
        NonFiniteLogits
            A logit is NaN or infinite.
        """
        return self._logits(self._feed(tokens, timings, None)[list(positions)], timings)

    def token_probabilities(
        self, tokens: Sequence[int], asked: slice, n_choices: int, timings: LayerTimings, observe: ScoreObserver
    ) -> Float32:
        """Feed a whole sequence at once: how likely was each token of `asked`, given those before it?

        The logits of all positions never exist together (they would be 93 MB for 448 tokens): the vocabulary is passed
        in tiles, of which each position keeps a sum and the score of its own token.

        Parameters
        ----------
        tokens : the whole sequence, after `restart`
        asked : positions [start, stop), start from 1 on
        n_choices : only ids below this count as choices; the tokens asked about are below it
        observe : given the scores of cross-attention, layer by layer and head by head

        Returns
        -------
        probabilities : float32 [stop - start]
        """
        x = self._feed(tokens, timings, observe)[asked.start - 1 : asked.stop - 1]
        self._norm_last(x, timings)
        chosen = kernels.ChosenProbabilities(x, np.asarray(tokens[asked]), self._scratch)
        for rows, weights in self._store.embedding_blocks(timings):
            if rows.start < n_choices:
                chosen.add(rows.start, weights[TABLE].rows(0, n_choices - rows.start))
        return chosen.result()

    def _feed(self, tokens: Sequence[int], timings: LayerTimings, observe: ScoreObserver | None) -> Float32:
        """What the blocks make of `tokens`: [n, n_state], before the last norm, overwritten by the next call."""
        x = self._embed(tokens, timings)
        for layer in range(self._dims.n_text_layer):
            with self._store.layer("decoder", str(layer), timings) as weights:
                self._block(x, layer, weights, observe)
        self._self_kv.advance(len(tokens))
        return x

    def _embed(self, tokens: Sequence[int], timings: LayerTimings) -> Float32:
        places = self._self_kv.new_positions(len(tokens))
        x = self._rows[0, : len(tokens)]
        for start in range(0, len(tokens), EMBEDDED_TOGETHER):
            some = tokens[start : start + EMBEDDED_TOGETHER]
            x[start : start + len(some)] = self._store.token_rows(some, timings).expand(self._scratch)
        with self._store.layer("decoder", "embedding", timings) as weights:
            x += weights["positional_embedding"].rows(places.start, places.stop).expand(self._scratch)
        return x

    def _block(self, x: Float32, layer: int, weights: dict[str, Weight], observe: ScoreObserver | None) -> None:
        """One residual block on x [n, n_state], in place. What is wider than x exists for `HIDDEN_ROWS` tokens at a time."""
        y, q = self._rows[1:, : len(x)]
        n_state = x.shape[1]
        tiles = [slice(start, min(start + HIDDEN_ROWS, len(x))) for start in range(0, len(x), HIDDEN_ROWS)]

        def project(source: Float32, name: str, out: Float32, has_bias: bool = True) -> Float32:
            bias = vector(weights, f"{name}.bias") if has_bias else None
            kernels.linear(source, weights[f"{name}.weight"], bias, out, self._scratch)
            return out

        def norm(name: str) -> None:
            kernels.layer_norm(x, vector(weights, f"{name}.weight"), vector(weights, f"{name}.bias"), y)

        norm("attn_ln")
        for rows in tiles:
            k, v = self._hidden[: 2 * n_state * (rows.stop - rows.start)].reshape(2, -1, n_state)
            project(y[rows], "attn.key", k, has_bias=False)
            project(y[rows], "attn.value", v)
            self._self_kv.append(layer, k, v, rows.start)
        self._self_kv.attend(layer, project(y, "attn.query", q), self._scratch, self._scores)
        x += project(q, "attn.out", y)
        norm("cross_attn_ln")
        project(y, "cross_attn.query", q)
        self._cross_kv.attend(layer, q, _cross_projections(weights), self._scratch, self._scores, observe)
        x += project(q, "cross_attn.out", y)
        norm("mlp_ln")
        for rows in tiles:
            hidden = self._hidden[: 4 * n_state * (rows.stop - rows.start)].reshape(-1, 4 * n_state)
            kernels.gelu(project(y[rows], "mlp.0", hidden))
            x[rows] += project(hidden, "mlp.2", y[rows])

    def _norm_last(self, x: Float32, timings: LayerTimings) -> None:
        """The norm behind the blocks, on x [n, n_state], in place."""
        with self._store.layer("decoder", "ln", timings) as weights:
            kernels.layer_norm(x, vector(weights, "ln.weight"), vector(weights, "ln.bias"), x)

    def _logits(self, x: Float32, timings: LayerTimings) -> Float32:
        self._norm_last(x, timings)
        logits = self._logits_rows[: len(x)]
        if len(logits) < len(x):
            logits = np.empty((len(x), self._dims.n_vocab), np.float32)
        for rows, weights in self._store.embedding_blocks(timings):
            kernels.linear(x, weights[TABLE], None, logits[:, rows], self._scratch)
        # By their extremes, which NaN would be too: to test each would take an array as long.
        if not all(np.isfinite((row.min(), row.max())).all() for row in logits):
            raise NonFiniteLogits("the decoder's logits are not finite: the weights or the arithmetic are broken")
        return logits


def _cross_projections(weights: dict[str, Weight]) -> CrossProjections:
    key, value = weights["cross_attn.key.weight"], weights["cross_attn.value.weight"]
    return CrossProjections(key, value, vector(weights, "cross_attn.value.bias"))
