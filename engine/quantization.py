"""INT8 in blocks: quantise at conversion, expand when a weight is used.

A block is `BLOCK` weights along the input dimension with one float32 scale, symmetric:
scale = max |w| / 127, codes in [-127, 127]. An all-zero block gets scale 1, so nothing is divided by zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.dims import BLOCK, Float32, Int8

MAX_CODE = 127
"""-128 is never used: the codes stay symmetric."""


def symmetric_scale(peak: Float32) -> Float32:
    """Scales, float32, for blocks whose largest magnitudes are `peak` (any shape)."""
    scale: Float32 = np.divide(peak, np.float32(MAX_CODE), dtype=np.float32)
    # A peak so small that peak / 127 underflows has no usable scale either.
    scale[scale < np.finfo(np.float32).tiny] = 1.0
    return scale


def quantize_blocks(weight: Float32) -> tuple[Int8, Float32]:
    """Quantise `weight` [rows, cols], cols a multiple of `BLOCK`.

    Returns
    -------
    codes : int8 [rows, cols]
    scale : float32 [rows, cols // BLOCK]
    """
    rows, cols = weight.shape
    blocks = weight.reshape(rows, cols // BLOCK, BLOCK)
    scale = symmetric_scale(np.abs(blocks).max(axis=2))
    codes = np.rint(blocks / scale[:, :, None]).astype(np.int8)
    return codes.reshape(rows, cols), scale


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor as it is stored: float32, float16, or INT8 codes with their scales.

    Attributes
    ----------
    data : float32, float16 or int8, any shape; [rows, cols] if int8
        Usually a view of a shard's mapping: it must not outlive the layer it came with.
    scale : float32 [rows, cols // BLOCK], or None unless `data` is int8
    """

    data: npt.NDArray[np.generic]
    scale: Float32 | None = None

    def rows(self, start: int, stop: int) -> Weight:
        """Rows `[start, stop)`, as views."""
        return Weight(self.data[start:stop], None if self.scale is None else self.scale[start:stop])

    def columns(self, start: int, stop: int) -> Weight:
        """Columns `[start, stop)`, as views; both ends multiples of `BLOCK`."""
        scale = None if self.scale is None else self.scale[:, start // BLOCK : stop // BLOCK]
        return Weight(self.data[:, start:stop], scale)

    def expand(self, scratch: Float32) -> Float32:
        """The tensor in float32: `data` itself where it is that already, else written to the start of `scratch`.

        `scratch` is flat and holds at least `data.size` elements.
        """
        if self.data.dtype == np.float32:
            return self.data  # type: ignore[return-value]
        out = scratch[: self.data.size].reshape(self.data.shape)
        np.copyto(out, self.data, casting="same_kind" if self.data.dtype == np.float16 else "safe")
        if self.scale is not None:
            blocks = out.reshape(*self.scale.shape, BLOCK)
            blocks *= self.scale[:, :, None]
        return out
