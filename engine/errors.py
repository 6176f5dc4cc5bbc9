"""What can go wrong in the engine: one tree, each leaf with a stable `code` that clients may rely on.

A message says what was expected and what was found. It names files by their name alone, never by a path: the
service passes messages on to clients.
"""

from __future__ import annotations

from typing import ClassVar


class EngineError(Exception):
    """Root of the tree; only its leaves are raised."""

    code: ClassVar[str] = "engine_error"


class AudioError(EngineError):
    """The recording cannot be transcribed; the fault is in the file."""

    code = "audio_error"


class EmptyAudio(AudioError):
    """The file holds no sample."""

    code = "empty_audio"


class UnsupportedAudio(AudioError):
    """libsndfile does not know the file's form, or finds it broken."""

    code = "unsupported_audio"


class BadSamples(AudioError):
    """A sample is not a finite number, or far beyond full scale."""

    code = "bad_samples"


class AudioTooLong(AudioError):
    """The recording is longer than the caller allows."""

    code = "audio_too_long"


class RequestError(EngineError):
    """The call asks for what this model cannot do."""

    code = "request_error"


class UnsupportedLanguage(RequestError):
    """The language is unknown, or the weights are English-only."""

    code = "unsupported_language"


class InvalidOptions(RequestError):
    """An option is out of range, or two contradict each other."""

    code = "invalid_options"


class Cancelled(EngineError):
    """The caller asked to stop; nothing is wrong."""

    code = "cancelled"


class ModelError(EngineError):
    """The model's files cannot be used; no recording can be transcribed."""

    code = "model_error"


class ModelNotFound(ModelError):
    """There is no manifest where the model should be."""

    code = "model_not_found"


class UnknownModel(ModelError):
    """Neither a model directory nor the name of a published model."""

    code = "unknown_model"


class ManifestInvalid(ModelError):
    """The manifest is not one, or contradicts itself."""

    code = "manifest_invalid"


class ModelOutdated(ManifestInvalid):
    """The model was written by an earlier version of this program: fetch or convert it again."""

    code = "model_outdated"


class ShardMissing(ModelError):
    """A file that the manifest lists is not there, or cannot be read."""

    code = "shard_missing"


class ShardCorrupt(ModelError):
    """A shard's size, header or SHA-256 is not the manifest's."""

    code = "shard_corrupt"


class ShardMismatch(ModelError):
    """A shard is whole, but was cut from another checkpoint than the manifest."""

    code = "shard_mismatch"


class ShardNotMapped(ModelError):
    """A whole shard finds no room in the process's address space, which a 32-bit processor has 3 GiB of."""

    code = "shard_not_mapped"


class CheckpointInvalid(ModelError):
    """A published checkpoint is damaged, or lacks, adds or misshapes a tensor."""

    code = "checkpoint_invalid"


class FetchFailed(ModelError):
    """No source gave the model's files as pinned."""

    code = "fetch_failed"


class NotEnoughDisk(ModelError):
    """The files would not fit on the disk."""

    code = "not_enough_disk"


class TargetNotAModel(ModelError):
    """What stands where a model would be written is not a model, and is left alone."""

    code = "target_not_a_model"


class NameTaken(EngineError):
    """What would be written would replace something else."""

    code = "name_taken"


class MemoryBudgetExceeded(EngineError):
    """The model cannot run in so few bytes; in `least_bytes` it can."""

    code = "memory_budget_exceeded"

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class MeasuringUnavailable(EngineError):
    """Error rates cannot be told: a package or a transcript is missing."""

    code = "measuring_unavailable"


class NonFiniteLogits(ModelError):
    """The network's output is not a number: wrong weights or broken arithmetic, never a token."""

    code = "non_finite_logits"
