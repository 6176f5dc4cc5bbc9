"""What the decoder's cross-attention needs of one window's audio features, and what every way of storing it has in common.

A window's encoder positions come with log counts, which are added to their scores: 0 for a position that stands for itself,
log 4 for one that stands for four.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from engine.arena import DECODE, FILL, Arena, Room
from engine.dims import Float32, ModelDimensions
from engine.kernels.reference import softmax
from engine.quantization import Weight

ScoreObserver = Callable[[int, int, Float32], None]
"""Called with a layer, a head and its scores [n, n_positions] of the window's positions, without log counts and before their
softmax; it must leave them as they are, and not keep them."""


@dataclass(frozen=True, slots=True)
class CrossProjections:
    """How one layer's cross-attention projects audio features: views of its weights, which must not outlive its `with` block.

    Attributes
    ----------
    key, value : [n_state, n_state], any stored dtype
        The key projection has no bias.
    value_bias : float32 [n_state]
    """

    key: Weight
    value: Weight
    value_bias: Float32


@dataclass(frozen=True, slots=True)
class CrossWork:
    """What one layer's cross-attention works with, as `CrossKVCache.attend` is given it."""

    projections: CrossProjections
    scratch: Float32
    scores: Float32
    observe: ScoreObserver | None


class CrossKVCache(ABC):
    """One window's audio features, or the keys and values that each decoder layer makes of them.

    All sequences (beams, or draws) of the window share it. It is allocated for `n_audio_ctx` positions, and a window may have
    fewer. Everything that is expanded goes through the caller's `scratch`: float32, flat, at least 2 · `n_audio_ctx` · d_head
    and d_head · n_state elements.

    Parameters
    ----------
    every : int
        Keep one position of so many.

    Attributes
    ----------
    layers_to_fill : range
        Layers whose keys and values are stored: `fill` is called for each after `begin`. Empty where audio features are.
    """

    def __init__(self, dims: ModelDimensions, every: int = 1) -> None:
        self.n_head = dims.n_text_head
        self.d_head = dims.n_text_state // dims.n_text_head
        self.layers_to_fill = range(dims.n_text_layer)
        self._every = every
        self._n_stored = -(-dims.n_audio_ctx // every)
        self._n_positions = 0
        self._log_counts: Float32 = np.zeros(0, np.float32)

    def begin(self, audio_features: Float32, log_counts: Float32, scratch: Float32) -> None:
        """Forget the window before, and take over what this one has for all layers.

        Parameters
        ----------
        audio_features : [n_positions, n_state]
        log_counts : [n_positions]
            Added to the positions' scores. Where positions are left out, each of those kept stands for `every` times as many:
            the same constant for all of them, which a softmax does not see, so nothing more is added.

        Raises
        ------
        ValueError
            There are no positions, or more than `n_audio_ctx`, or not as many log counts.
        """
        kept = log_counts[:: self._every].copy()
        if not 0 < len(kept) <= self._n_stored or len(log_counts) != len(audio_features):
            expected = f"at most {self._n_stored * self._every} positions with a log count each"
            raise ValueError(f"{len(audio_features)} positions with {len(log_counts)} log counts: expected {expected}")
        self._n_positions, self._log_counts = len(log_counts), kept

    @abstractmethod
    def fill(
        self, layer: int, audio_features: Float32, projections: CrossProjections, spare: Float32, scratch: Float32
    ) -> None:
        """Store the keys and values of one of `layers_to_fill`.

        Parameters
        ----------
        audio_features : [n_positions, n_state], as given to `begin`; left as they are
        spare : [2, at least n_positions, n_state], overwritten

        Raises
        ------
        ValueError
            It is none of them.
        """

    def attend(
        self,
        layer: int,
        q: Float32,
        projections: CrossProjections,
        scratch: Float32,
        scores: Float32,
        observe: ScoreObserver | None = None,
    ) -> None:
        """Attention to the window's positions.

        Parameters
        ----------
        q : [n, n_state], overwritten: row i holds what it attended to
        scores : flat, at least n_audio_ctx elements: so many rows of scores exist at a time, but for an observer
        observe : given every head's scores. A position that is left out has there the score of the one before it.
        """
        q *= np.float32(self.d_head**-0.5)
        self._attend(layer, q, CrossWork(projections, scratch, scores, observe))

    @abstractmethod
    def _attend(self, layer: int, q: Float32, work: CrossWork) -> None:
        """As `attend`, q scaled by 1 / √d_head."""

    @property
    @abstractmethod
    def _form(self) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike]]:
        """Its arrays: shapes and dtypes."""

    def rooms(self) -> list[Room]:
        """What it needs of an arena."""
        phases = frozenset({FILL, DECODE})
        return [Room(f"cross_{name}", shape, dtype, phases) for name, (shape, dtype) in self._form.items()]

    def bind(self, arena: Arena) -> None:
        """Live in `arena` from now on, which has its `rooms`."""
        self._arrays = {name: arena[f"cross_{name}"] for name in self._form}

    @property
    def n_bytes(self) -> int:
        """Of what is stored for `n_audio_ctx` positions, scales included."""
        return sum(prod(shape) * np.dtype(dtype).itemsize for shape, dtype in self._form.values())

    def _tiles(self, n_rows: int, work: CrossWork) -> Iterator[tuple[slice, Float32]]:
        """Rows of a head a tile at a time, with room for their scores [rows, kept positions]; all at once for an observer."""
        n, scores = len(self._log_counts), work.scores
        if work.observe is not None and scores.size < n_rows * n:
            scores = np.empty(n_rows * n, np.float32)
        step = min(n_rows, scores.size // n)
        for start in range(0, n_rows, step):
            stop = min(start + step, n_rows)
            yield slice(start, stop), scores[: (stop - start) * n].reshape(-1, n)

    def _weigh(self, layer: int, head: int, scores: Float32, observe: ScoreObserver | None) -> None:
        """Show a head's scores [n, kept positions] to `observe`, then let them become attention weights."""
        if observe is not None:
            whole = scores if self._every == 1 else np.repeat(scores, self._every, axis=1)[:, : self._n_positions]
            observe(layer, head, whole)
        scores += self._log_counts
        softmax(scores)
