"""A byte budget → the way to run inside it, and what that will cost, said beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from engine.errors import MemoryBudgetExceeded
from engine.model import arena_bytes
from engine.shards.manifest import Manifest
from engine.shards.residency import Residency, named

WORK_BYTES = 5 << 20
"""What a job takes beside the arena and the weights: the recording's blocks, Python's own objects, and pages of libraries that
only work touches (engine/DESIGN.md has what was measured)."""

KV_CHOICES = ("int8", "shared-int8")
"""K/V policies where none is asked for: the first, or under a budget the first that fits it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model runs, and what of.

    Attributes
    ----------
    kv : str
        K/V policy.
    residency : Residency
        Which weights stay, and how the others come and go.
    process_bytes : int
        Resident before there is a model: the interpreter, its libraries.
    arena_bytes : int
        Activations and K/V caches, in a window of 30 s of speech, five sequences wide.
    weight_bytes : int
        The most weights that are mapped at a time.
    window_read_bytes, token_read_bytes : int
        Streamed for every window (the encoder, and the decoder's cross K/V) and for every token. Memory that nothing else
        needs may keep them, and then they are not read from storage again.
    """

    kv: str
    residency: Residency
    process_bytes: int
    arena_bytes: int
    weight_bytes: int
    window_read_bytes: int
    token_read_bytes: int

    @property
    def work_bytes(self) -> int:
        """What a job takes beside the arena and the weights."""
        return WORK_BYTES

    @property
    def peak_bytes(self) -> int:
        """The most that the process will have resident."""
        return self.process_bytes + self.work_bytes + self.arena_bytes + self.weight_bytes

    def to_json(self) -> dict[str, object]:
        values = asdict(self) | {"work_bytes": self.work_bytes, "peak_bytes": self.peak_bytes}
        return values | {"residency": asdict(self.residency) | {"pinned": sorted(self.residency.pinned)}}


def make_plan(manifest: Manifest, budget_bytes: int, process_bytes: int, kv_policies: tuple[str, ...]) -> Plan:
    """The first of the ways to run, from the fastest to the smallest, whose peak is within the budget.

    Parameters
    ----------
    budget_bytes : of resident memory, for the whole process
    process_bytes : resident before the model is loaded
    kv_policies : those that may be chosen, the best first

    Raises
    ------
    MemoryBudgetExceeded
        Not even the smallest fits.
    """
    plans = all_plans(manifest, process_bytes, kv_policies)
    for plan in plans:
        if plan.peak_bytes <= budget_bytes:
            return plan
    least = plans[-1].peak_bytes
    raise MemoryBudgetExceeded(
        f"{budget_bytes} bytes do not do: {least} are needed at least, {process_bytes + WORK_BYTES} of them for the process; "
        "a smaller model, fewer layers per shard (thimble reshard) or --kv shared-int8 need less",
        least,
    )


def all_plans(manifest: Manifest, process_bytes: int, kv_policies: tuple[str, ...]) -> list[Plan]:
    """The ways to run, from the fastest to the smallest: each takes less memory than those before it.

    Parameters are `make_plan`'s.
    """
    plans = [_made(manifest, kv, residency, process_bytes) for kv in kv_policies for residency in _residencies(manifest)]
    # What is read at every token costs most, then what arithmetic must wait for, then what is read once a window.
    plans.sort(
        key=lambda plan: (
            kv_policies.index(plan.kv),
            plan.token_read_bytes,
            plan.window_read_bytes > 0,
            -plan.residency.slots,
            plan.window_read_bytes,
        )
    )
    smaller = plans[:1]
    for plan in plans[1:]:
        if plan.peak_bytes < smaller[-1].peak_bytes:
            smaller.append(plan)
    return smaller


def _made(manifest: Manifest, kv: str, residency: Residency, process_bytes: int) -> Plan:
    streamed = [file for file in manifest.files if file.stack != "tokenizer" and file.file not in residency.pinned]
    of_encoder = sum(file.n_bytes for file in streamed if file.stack == "encoder")
    of_layers = sum(file.n_bytes for file in streamed if file.stack == "decoder" and file.part != "embedding")
    of_embedding = sum(file.n_bytes for file in streamed if file.part == "embedding")
    # Shared features have no keys and values to be filled, layer by layer, at a window's begin.
    for_window = of_encoder + (0 if kv.startswith("shared") else of_layers)
    weights = residency.weight_bytes(manifest)
    return Plan(kv, residency, process_bytes, arena_bytes(manifest.dims, kv), weights, for_window, of_layers + of_embedding)


def _residencies(manifest: Manifest) -> Iterator[Residency]:
    """Everything stays; or the encoder, needed once a window, is streamed, and of the decoder what is not among its first
    layers; and the embedding too. Each with a piece read ahead, and with none."""
    yield named("resident", manifest)
    stream = named("stream", manifest)
    embedding = {file.file for file in manifest.files if file.part == "embedding"}
    layers = [file.file for file in manifest.files if file.stack == "decoder" and file.part != "embedding"]
    for beside in (embedding, set[str]()):
        for n_pinned in range(len(layers), -1, -1):
            for slots in (2, 1):
                yield replace(stream, pinned=frozenset(beside | set(layers[:n_pinned])), slots=slots)
