"""Where the seconds went: load, wait and compute per layer, and seconds per stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    """A sum of seconds and how many times it was added to."""

    seconds: float = 0.0
    count: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        self.seconds += seconds
        self.count += count


@dataclass(slots=True)
class LayerTimings:
    """Seconds of one job. Layers are keyed (stack, layer): `("encoder", "stem")`, `("decoder", "0")`.

    Attributes
    ----------
    load, wait, compute : Tally by (stack, layer)
        `load` is reading a layer's pages, and mapping its shard where it is the first to need it, by whichever thread;
        `wait` is how long the arithmetic stood still for it; `compute` is the arithmetic of one pass over the layer.
    stages : Tally by stage name
        `audio`, `mel`, `encode`, `detect`, `decode`, `align`.
    shard_loads, shard_bytes : int
        Mappings made and read, of whole shards or of blocks of the embedding, and the bytes behind them.
    shard_read_bytes : int
        Bytes of them that came from storage; the others were in the page cache.
    prefetch_hits, prefetch_waits : int
        Layers and blocks that a thread was to read ahead, and had when they were asked for; and those it had not.
    compute_major_faults : int
        Pages that arithmetic waited for all the same: they were read, and dropped again before their use.
    fallbacks : int
        Decodings of a window beyond its first.
    loops : int
        Windows whose text looped at every temperature, and was cut.
    repairs : int
        Times of segments and words that had to be moved: beyond the recording, or out of order.
    silent_windows : int
        Windows in which nothing was heard.
    """

    load: dict[tuple[str, str], Tally] = field(default_factory=dict)
    wait: dict[tuple[str, str], Tally] = field(default_factory=dict)
    compute: dict[tuple[str, str], Tally] = field(default_factory=dict)
    stages: dict[str, Tally] = field(default_factory=dict)
    shard_loads: int = 0
    shard_bytes: int = 0
    shard_read_bytes: int = 0
    prefetch_hits: int = 0
    prefetch_waits: int = 0
    compute_major_faults: int = 0
    fallbacks: int = 0
    loops: int = 0
    repairs: int = 0
    silent_windows: int = 0

    def add_load(self, stack: str, layer: str, seconds: float, count: int = 1) -> None:
        self.load.setdefault((stack, layer), Tally()).add(seconds, count)

    def add_wait(self, stack: str, layer: str, seconds: float, count: int = 1) -> None:
        self.wait.setdefault((stack, layer), Tally()).add(seconds, count)

    def add_shard(self, n_bytes: int) -> None:
        """Count one mapping."""
        self.shard_loads += 1
        self.shard_bytes += n_bytes

    def add_compute(self, stack: str, layer: str, seconds: float, count: int = 1) -> None:
        self.compute.setdefault((stack, layer), Tally()).add(seconds, count)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a `with` block as one pass of stage `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stages.setdefault(name, Tally()).add(time.perf_counter() - started)

    def to_json(self) -> dict[str, object]:
        """A JSON-ready form: layers as `[stack, layer, kind, seconds, count]` rows."""
        rows = [
            [stack, layer, kind, tally.seconds, tally.count]
            for kind, table in (("load", self.load), ("wait", self.wait), ("compute", self.compute))
            for (stack, layer), tally in table.items()
        ]
        return {
            "layers": rows,
            "stages": [[name, tally.seconds, tally.count] for name, tally in self.stages.items()],
            "shard_loads": self.shard_loads,
            "shard_bytes": self.shard_bytes,
            "shard_read_bytes": self.shard_read_bytes,
            "prefetch_hits": self.prefetch_hits,
            "prefetch_waits": self.prefetch_waits,
            "compute_major_faults": self.compute_major_faults,
            "fallbacks": self.fallbacks,
            "loops": self.loops,
            "repairs": self.repairs,
            "silent_windows": self.silent_windows,
        }
