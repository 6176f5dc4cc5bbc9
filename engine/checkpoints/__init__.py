"""Readers of published checkpoints: tensors under OpenAI's names, whatever the file."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from engine.checkpoints.ctranslate2 import CTranslate2Checkpoint
from engine.checkpoints.huggingface import INDEX_FILE, SINGLE_FILE, HuggingFaceCheckpoint
from engine.dims import ModelDimensions
from engine.errors import CheckpointInvalid
from engine.tokenizer import Vocabulary


class Checkpoint(Protocol):
    """What conversion needs of a checkpoint; see the readers."""

    @property
    def format(self) -> str: ...

    @property
    def dims(self) -> ModelDimensions: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def alignment_heads(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def files(self) -> list[Path]: ...

    def read(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]: ...


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open the checkpoint in `directory`, deciding its kind by the weight files there.

    Raises
    ------
    CheckpointInvalid
        No known weight file, or a damaged one.
    """
    if (directory / SINGLE_FILE).exists() or (directory / INDEX_FILE).exists():
        return HuggingFaceCheckpoint(directory)
    if (directory / "model.bin").exists():
        return CTranslate2Checkpoint(directory)
    raise CheckpointInvalid(f"{directory.name} holds no {SINGLE_FILE}, {INDEX_FILE} or CTranslate2 model.bin")
