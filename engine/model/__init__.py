"""The two stacks of Whisper over a shard store."""

from __future__ import annotations

from engine.model.decoder import TextDecoder
from engine.model.whisper import Whisper, arena_bytes

__all__ = ["TextDecoder", "Whisper", "arena_bytes"]
