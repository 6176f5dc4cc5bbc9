"""Arrays that share bytes, and those that must not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.arena import ALIGNMENT, Arena, Room, place
from engine.checkpoints.random_weights import SIZES
from engine.kv_cache import KV_POLICIES, make_caches
from engine.model.whisper import window_rooms

PHASES = ("encode", "fill", "decode")


def room(name: str, n_bytes: int, *phases: str) -> Room:
    return Room(name, (n_bytes,), np.uint8, frozenset(phases))


def test_what_lives_at_different_times_shares_bytes() -> None:
    begins, n_bytes = place([room("a", 640, "encode"), room("b", 640, "decode"), room("c", 64, "encode", "decode")])
    assert begins == {"a": 0, "b": 0, "c": 640}
    assert n_bytes == 704


def test_a_gap_is_filled() -> None:
    rooms = [
        room("x", 640, "encode", "fill"),
        room("y", 1280, "encode"),
        room("k", 640, "fill", "decode"),
        room("s", 64, "fill"),
    ]
    begins, n_bytes = place(rooms)
    assert n_bytes == 1920
    assert (begins["x"], begins["y"]) in ((1280, 0), (0, 640))


@pytest.mark.parametrize("seed", range(20))
def test_arrays_of_one_phase_never_overlap(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - sizes are no secrets
    rooms = [room(str(i), draw.randint(0, 5000), *draw.sample(PHASES, draw.randint(1, 3))) for i in range(12)]
    begins, n_bytes = place(rooms)
    for phase in PHASES:
        taken = np.zeros(n_bytes, int)
        for one in rooms:
            if phase in one.phases:
                taken[begins[one.name] : begins[one.name] + one.n_bytes] += 1
        assert taken.max() <= 1
    assert all(begin % ALIGNMENT == 0 for begin in begins.values())
    least = max(sum(one.n_bytes for one in rooms if phase in one.phases) for phase in PHASES)
    assert least <= n_bytes <= 2 * least


@pytest.mark.parametrize("kv", KV_POLICIES)
@pytest.mark.parametrize("size", ["tiny", "base", "small", "medium", "large-v3"])
def test_a_window_takes_no_more_than_its_widest_phase(size: str, kv: str) -> None:
    rooms = window_rooms(SIZES[size], *make_caches(kv, SIZES[size]))
    widest = max(sum(one.n_bytes for one in rooms if phase in one.phases) for phase in PHASES)
    assert place(rooms)[1] == widest


def test_arrays_have_their_shapes_and_keep_their_values() -> None:
    rooms = [
        Room("codes", (3, 5), np.int8, frozenset({"decode"})),
        Room("scales", (7,), np.float32, frozenset({"decode"})),
        Room("x", (2, 2), np.float32, frozenset({"encode"})),
    ]
    arena = Arena(rooms)
    arena["codes"][:], arena["scales"][:] = 3, 0.5
    assert (arena["codes"].shape, arena["codes"].dtype) == ((3, 5), np.int8)
    assert (arena["codes"] == 3).all()
    assert (arena["scales"] == 0.5).all()
    arena["x"][:] = 1.0
    assert arena.n_bytes == 128
    assert Arena([]).n_bytes == 0
