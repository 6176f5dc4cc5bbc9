"""What Prometheus sees: one registry, handed in; the worker's numbers arrive in its messages.

Every label value comes from a fixed set: nothing that a client sends becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from service.control_group import MemoryGroup
from service.jobs import Job, JobState
from service.protocol import Finished, Ready

LAYER_KINDS = {
    "load": "Seconds that mapping a layer's shard and reading its pages took, by whichever thread, per load.",
    "wait": "Seconds that arithmetic stood still for a layer's weights, per load.",
    "compute": "Seconds of arithmetic that one pass over a layer took.",
}
RESTART_REASONS = ("max_jobs", "deadline", "model", "out_of_memory", "killed", "crashed")


class _LayerSummaries(Collector):
    """Sums and counts per stack and layer, added up over all workers."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], list[float]] = {}

    def add(self, stack: str, layer: str, kind: str, seconds: float, count: int) -> None:
        row = self._rows.setdefault((kind, stack, layer), [0.0, 0.0])
        row[0] += seconds
        row[1] += count

    def collect(self) -> Iterator[Metric]:
        for kind, help_text in LAYER_KINDS.items():
            family = SummaryMetricFamily(f"thimble_layer_{kind}_seconds", help_text, labels=("stack", "layer"))
            for (row_kind, stack, layer), (seconds, count) in self._rows.items():
                if row_kind == kind:
                    family.add_metric((stack, layer), count_value=int(count), sum_value=seconds)
            yield family


class _WorkerMemory(Collector):
    """The worker's resident memory by kind, read when asked."""

    def __init__(self, worker_pid: Callable[[], int | None]) -> None:
        self._worker_pid = worker_pid

    def collect(self) -> Iterator[Metric]:
        help_text = "Resident memory of the worker: anonymous is its own, file is mapped weights and code."
        family = GaugeMetricFamily("thimble_worker_resident_bytes", help_text, labels=("kind",))
        pid = self._worker_pid()
        for kind, size in resident_bytes(pid).items() if pid else ():
            family.add_metric((kind,), size)
        yield family


class _GroupMemory(Collector):
    """Memory of the control group, read when asked; no samples where no group accounts for it."""

    def __init__(self, group: MemoryGroup | None) -> None:
        self._group = group

    def collect(self) -> Iterator[Metric]:
        limit = GaugeMetricFamily("thimble_memory_limit_bytes", "Memory that the service may use: its control group's limit.")
        help_text = (
            "Memory that the limit is held against, by kind; the kernel drops file, where it needs room, and nothing else."
        )
        used = GaugeMetricFamily("thimble_memory_used_bytes", help_text, labels=("kind",))
        faults = CounterMetricFamily("thimble_memory_major_faults", "Pages read from storage because somebody touched them.")
        kills = CounterMetricFamily("thimble_memory_oom_kills", "Processes that the kernel killed for want of memory.")
        if self._group:
            if (limit_bytes := self._group.limit_bytes()) is not None:
                limit.add_metric((), limit_bytes)
            for kind, size in self._group.used_bytes().items():
                used.add_metric((kind,), size)
            faults.add_metric((), self._group.major_faults())
            kills.add_metric((), self._group.oom_kills())
        return iter((limit, used, faults, kills))


@dataclass(frozen=True, slots=True)
class Sources:
    """What is asked at every scrape.

    Attributes
    ----------
    queue_depth : callable
        Jobs waiting.
    is_ready : callable
        Whether a recording sent now would be transcribed.
    worker_pid : callable
        The worker's process, None while there is none.
    group : MemoryGroup or None
        The service's control group.
    """

    queue_depth: Callable[[], int]
    is_ready: Callable[[], bool]
    worker_pid: Callable[[], int | None]
    group: MemoryGroup | None


class Metrics:
    """Every metric of the service.

    Parameters
    ----------
    sources : Sources
    queue_capacity : int
        Jobs that may wait.
    """

    def __init__(self, sources: Sources, queue_capacity: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # when each series began doubles the page and tells an operator nothing
        self.registry = registry = CollectorRegistry()
        self._layers = _LayerSummaries()
        registry.register(self._layers)
        registry.register(_WorkerMemory(sources.worker_pid))
        registry.register(_GroupMemory(sources.group))
        ProcessCollector(registry=registry)
        depth = Gauge("thimble_queue_depth", "Jobs waiting for the worker.", registry=registry)
        depth.set_function(sources.queue_depth)
        Gauge("thimble_queue_capacity", "Jobs that may wait.", registry=registry).set(queue_capacity)
        ready = Gauge("thimble_ready", "1 where a recording sent now would be transcribed.", registry=registry)
        ready.set_function(sources.is_ready)
        self._stages = Summary(
            "thimble_stage_seconds", "Seconds per job and stage of the data path.", ("stage",), registry=registry
        )
        self._jobs = Counter("thimble_jobs", "Jobs that ended, by outcome.", ("outcome",), registry=registry)
        self._refused = Counter("thimble_refusals", "Requests answered by an error, by code.", ("code",), registry=registry)
        self._audio = Counter("thimble_audio_seconds", "Seconds of sound transcribed.", registry=registry)
        self._processing = Counter(
            "thimble_processing_seconds",
            "Seconds the worker spent on them; by audio seconds, the real-time factor: below 1 is faster than real time.",
            registry=registry,
        )
        self._tokens = Counter("thimble_tokens", "Tokens decoded.", registry=registry)
        self._fallbacks = Counter(
            "thimble_fallbacks", "Decodings of a window beyond its first, at a higher temperature.", registry=registry
        )
        self._loops = Counter(
            "thimble_loops", "Windows whose text repeated itself at every temperature, and was cut.", registry=registry
        )
        self._silent_windows = Counter("thimble_silent_windows", "Windows in which nothing was said.", registry=registry)
        self._repairs = Counter(
            "thimble_time_repairs", "Times of segments and words moved: out of order, or past the end.", registry=registry
        )
        self._shard_loads = Counter("thimble_shard_loads", "Shards mapped.", registry=registry)
        self._shard_bytes = Counter("thimble_shard_mapped_bytes", "Bytes of the shards mapped.", registry=registry)
        self._shard_read_bytes = Counter(
            "thimble_shard_read_bytes", "Bytes of them that came from storage, and not from the page cache.", registry=registry
        )
        self._prefetch_hits = Counter(
            "thimble_prefetch_hits", "Streamed layers that had been read ahead when they were asked for.", registry=registry
        )
        self._prefetch_waits = Counter(
            "thimble_prefetch_waits", "Streamed layers that were still being read then.", registry=registry
        )
        self._compute_major_faults = Counter(
            "thimble_compute_major_faults", "Pages that arithmetic waited for: read, and dropped before use.", registry=registry
        )
        self._restarts = Counter("thimble_worker_restarts", "Workers replaced, by reason.", ("reason",), registry=registry)
        for reason in RESTART_REASONS:
            self._restarts.labels(reason)
        self._refused.labels("queue_full")
        for state in (JobState.DONE, JobState.FAILED, JobState.CANCELLED):
            self._jobs.labels(state.value)
        self._model_bytes = Gauge("thimble_model_bytes", "Bytes of the model's files.", registry=registry)
        about = "Most bytes that the worker foresees to have resident; 0 where it was told how to run, and foresees nothing."
        self._planned = Gauge("thimble_worker_planned_peak_bytes", about, registry=registry)
        self._kv_bytes = Gauge("thimble_kv_cache_bytes", "Bytes of the K/V caches.", ("cache",), registry=registry)
        self._build = Gauge(
            "thimble_build_info", "Constant 1; what runs.", ("version", "weights", "kernels"), registry=registry
        )

    def page(self) -> bytes:
        """The exposition page."""
        return generate_latest(self.registry)

    def worker_ready(self, ready: Ready) -> None:
        self._model_bytes.set(ready.model_bytes)
        self._planned.set(ready.planned_peak_bytes or 0)
        for cache, size in ready.kv_bytes.items():
            self._kv_bytes.labels(cache).set(size)
        self._build.labels(version("thimble-stt"), ready.weights, ready.kernels).set(1)

    def worker_restarted(self, reason: str) -> None:
        self._restarts.labels(reason).inc()

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def timings(self, timings: dict[str, Any]) -> None:
        """Add one job's `LayerTimings.to_json`."""
        for stack, layer, kind, seconds, count in timings.get("layers", []):
            self._layers.add(stack, layer, kind, seconds, count)
        for name, seconds, _ in timings.get("stages", []):
            self._stages.labels(name).observe(seconds)
        self._fallbacks.inc(timings.get("fallbacks", 0))
        self._loops.inc(timings.get("loops", 0))
        self._silent_windows.inc(timings.get("silent_windows", 0))
        self._repairs.inc(timings.get("repairs", 0))
        self._shard_loads.inc(timings.get("shard_loads", 0))
        self._shard_bytes.inc(timings.get("shard_bytes", 0))
        self._shard_read_bytes.inc(timings.get("shard_read_bytes", 0))
        self._prefetch_hits.inc(timings.get("prefetch_hits", 0))
        self._prefetch_waits.inc(timings.get("prefetch_waits", 0))
        self._compute_major_faults.inc(timings.get("compute_major_faults", 0))

    def job_ended(self, job: Job, outcome: object) -> None:
        """Count a job that is over."""
        self._jobs.labels(job.state.value).inc()
        self._stages.labels("upload").observe(job.upload_seconds)
        self._stages.labels("queue").observe(job.queue_seconds)
        if isinstance(outcome, Finished):
            self._audio.inc(outcome.seconds)
            self._processing.inc(outcome.processing_seconds)
            self._tokens.inc(outcome.n_tokens)


def resident_bytes(pid: int, proc_root: Path = Path("/proc")) -> dict[str, int]:
    """Resident memory of a process by kind, from its `status` file; empty where it is gone."""
    kinds = {"RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared"}
    try:
        lines = (proc_root / str(pid) / "status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {kind: int(fields[name].split()[0]) * 1024 for name, kind in kinds.items() if name in fields}
