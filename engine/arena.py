"""One block of memory for everything a window needs, where what is not needed at the same time shares bytes.

A window passes through phases: it is encoded, its cross K/V are filled, its tokens are decoded. An array lives in some of
them. Where each lies is worked out from sizes alone, so the block's size is known before there is one.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector a processor loads."""


ENCODE, FILL, DECODE = "encode", "fill", "decode"
"""The phases of a window: audio features are made; the decoder takes them over; tokens are decoded, from the beginning again
where a temperature did not help."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one array takes.

    Attributes
    ----------
    phases : frozenset of str
        In which it must keep its values. Arrays without a phase in common may lie over each other.
    """

    name: str
    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    phases: frozenset[str]

    @property
    def n_bytes(self) -> int:
        """Up to the next multiple of `ALIGNMENT`."""
        return -(-prod(self.shape) * np.dtype(self.dtype).itemsize // ALIGNMENT) * ALIGNMENT


def place(rooms: Sequence[Room]) -> tuple[dict[str, int], int]:
    """Where each array begins, and how many bytes all of them take together.

    The largest first, each at the lowest place that is free in all of its phases; then again with each array in turn before
    all others, of which the best counts: for every size of Whisper that takes no more than its widest phase.
    """
    ordered = sorted(rooms, key=lambda room: -room.n_bytes)
    orders = [[room, *(other for other in ordered if other is not room)] for room in ordered] or [ordered]
    return min(map(_placed, orders), key=lambda placed: placed[1])


def _placed(order: Sequence[Room]) -> tuple[dict[str, int], int]:
    placed: list[tuple[int, Room]] = []
    for room in order:
        begin = 0
        for start, other in sorted(((s, o) for s, o in placed if o.phases & room.phases), key=lambda pair: pair[0]):
            if begin + room.n_bytes <= start:
                break
            begin = max(begin, start + other.n_bytes)
        placed.append((begin, room))
    return {room.name: begin for begin, room in placed}, max((begin + room.n_bytes for begin, room in placed), default=0)


class Arena:
    """The block, and the arrays in it.

    Pages that no array has touched take no memory: a short recording does not pay for a long one's buffers.

    Parameters
    ----------
    rooms : Sequence of Room, of different names
    """

    def __init__(self, rooms: Sequence[Room]) -> None:
        begins, self.n_bytes = place(rooms)
        block = mmap.mmap(-1, max(self.n_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages; else each would take 2 MB for its first byte
            block.madvise(mmap.MADV_NOHUGEPAGE)
        self._arrays = {
            room.name: np.frombuffer(block, room.dtype, prod(room.shape), begins[room.name]).reshape(room.shape)
            for room in rooms
        }

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """The array of that name. Its values mean nothing before they are written in its first phase."""
        return self._arrays[name]
