"""One window's tokens, chosen step by step."""

from __future__ import annotations

from engine.decoding.fallback import Fallback
from engine.decoding.language import detect_language
from engine.decoding.options import DecodingOptions
from engine.decoding.task import DecodingResult, DecodingTask

__all__ = ["DecodingOptions", "DecodingResult", "DecodingTask", "Fallback", "detect_language"]
