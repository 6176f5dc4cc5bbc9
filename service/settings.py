"""Settings: read once from the environment, checked, frozen, passed down."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

PREFIX = "THIMBLE_"


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """The place for a user's data (XDG Base Directory Specification)."""
    base = environ.get("XDG_DATA_HOME") or str(Path(environ.get("HOME", "/nonexistent"), ".local", "share"))
    return Path(base, "thimble")


def _size(value: object) -> object:
    """Bytes of a size such as 90M; K, M and G are powers of 1024, as Docker has them."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(?:I?B)?", value.strip().upper())
    if found is None:
        raise ValueError("is no size: write 90M, 1.5G or a number of bytes")
    return int(float(found[1]) * (1 << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]]))


class Settings(BaseModel):
    """Everything an operator can set; each field is the variable `THIMBLE_` and its name in capitals."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[str, Field(min_length=1, description="Name of a published model, or a model directory")] = "tiny.en"
    data_dir: Annotated[Path, Field(description="Directory of models and spool")]
    host: Annotated[str, Field(description="Address to listen on; 0.0.0.0 for every interface")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="Port to listen on; 0 takes a free one")] = 8000
    weights: Annotated[Literal["int8", "f16", "f32"], Field(description="How a fetched model's weights are stored")] = "int8"
    memory_budget: Annotated[
        int | None, BeforeValidator(_size), Field(ge=1, description="Memory of the worker, as 90M; how it runs follows from it")
    ] = None
    kv: Annotated[
        Literal["int8", "f32", "shared-int8", "shared-f32", "int8-half"] | None,
        Field(description="K/V cache policy; int8, or what the budget allows"),
    ] = None
    residency: Annotated[
        Literal["resident", "stream"] | None, Field(description="Keep all shards mapped, or stream them; not beside a budget")
    ] = None
    tail: Annotated[Literal["merged", "whole"], Field(description="Silence that fills a window: merged, or computed whole")] = (
        "merged"
    )
    threads: Annotated[int, Field(ge=1, le=64, description="Threads of the worker's matrix products")] = 1
    worker_max_jobs: Annotated[int, Field(ge=1, le=1_000_000, description="Jobs after which the worker is replaced")] = 100
    queue_capacity: Annotated[int, Field(ge=1, le=1000, description="Jobs that may wait; more are refused with 429")] = 8
    max_upload_bytes: Annotated[int, Field(ge=1, le=1 << 40, description="Bytes of the largest recording taken")] = 100 << 20
    max_audio_seconds: Annotated[float, Field(gt=0, le=604_800, description="Seconds of the longest recording taken")] = (
        14_400.0
    )
    job_deadline_seconds: Annotated[
        float, Field(gt=0, le=604_800, description="Seconds a job may run before it is given up")
    ] = 3600.0
    drain_seconds: Annotated[
        float, Field(ge=0, le=3600, description="Seconds after SIGTERM in which accepted jobs may still finish")
    ] = 30.0

    @field_validator("residency")
    @classmethod
    def _one_says_how_to_run(cls, residency: str | None, info: ValidationInfo) -> str | None:
        if residency is not None and info.data.get("memory_budget") is not None:
            raise ValueError("follows from THIMBLE_MEMORY_BUDGET: set one of them")
        return residency

    @property
    def models_dir(self) -> Path:
        return self.data_dir / "models"

    @property
    def spool_dir(self) -> Path:
        return self.data_dir / "spool"


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Settings from the variables that start with `THIMBLE_`.

    Raises
    ------
    pydantic.ValidationError
        A variable is unknown, or its value is out of range.
    """
    values = {name[len(PREFIX) :].lower(): value for name, value in environ.items() if name.startswith(PREFIX)}
    values.setdefault("data_dir", str(default_data_dir(environ)))
    return Settings.model_validate(values)
