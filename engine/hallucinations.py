"""Text that its words give away: improbable, far too short or far too long, between silences (openai/whisper transcribe.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.segments import APPENDED, PREPENDED, Segment, Word

# Source of these: openai/whisper transcribe.py.
IMPROBABLE = 0.15
SHORT_SECONDS, SHORT_WEIGHT = 0.133, 15.0
LONG_SECONDS = 2.0
JUDGED_WORDS = 8
ANOMALY_SCORE = 3.0
EDGE_SECONDS = 2.0
"""So near to a window's edge, the edge counts as silence."""


@dataclass(frozen=True, slots=True)
class WindowTimes:
    """Seconds from the recording's start: the window's, its content's end, and the recording's length."""

    start: float
    end: float
    content_end: float
    recording_end: float


def anomaly_score(word: Word) -> float:
    """0 for a plain word; 1 and more for one that was hardly said."""
    seconds = word.end - word.start
    score = 1.0 if word.probability < IMPROBABLE else 0.0
    score += max(0.0, SHORT_SECONDS - seconds) * SHORT_WEIGHT
    return score + max(0.0, seconds - LONG_SECONDS)


def is_anomaly(segment: Segment | None) -> bool:
    """The segment's first words are anomalous, together or nearly each."""
    if segment is None or not segment.words:
        return False
    words = [word for word in segment.words if word.word not in PREPENDED + APPENDED][:JUDGED_WORDS]
    score = sum(map(anomaly_score, words))
    return score >= ANOMALY_SCORE or score + 0.01 >= len(words)


def without_hallucinations(
    segments: Sequence[Segment], window: WindowTimes, last_speech: float, threshold: float
) -> tuple[list[Segment], float | None]:
    """The segments up to the first that is a hallucination, and where to look again, in seconds; None where all are kept.

    Parameters
    ----------
    last_speech : end of what was said before the window
    threshold : seconds of silence that make an anomaly a hallucination
    """
    spoken = [segment for segment in segments if segment.words]
    if spoken and is_anomaly(spoken[0]) and spoken[0].start - window.start > threshold:
        return [], spoken[0].start  # look again, without the silence before it
    for i, segment in enumerate(segments):
        if not segment.words:
            continue
        following = next((later for later in segments[i + 1 :] if later.words), None)
        if is_anomaly(segment) and _stands_alone(segment, following, window, last_speech, threshold):
            if window.recording_end - segment.end < threshold:
                return list(segments[:i]), window.recording_end
            return list(segments[:i]), max(window.start + 1.0, segment.start)
        last_speech = segment.end
    return list(segments), None


def _stands_alone(
    segment: Segment, following: Segment | None, window: WindowTimes, last_speech: float, threshold: float
) -> bool:
    """Silence, another anomaly or an edge lies on both sides of it."""
    next_start = following.words[0].start if following else window.content_end
    before = segment.start - last_speech > threshold or segment.start < threshold
    after = next_start - segment.end > threshold or is_anomaly(following) or window.end - segment.end < EDGE_SECONDS
    return (before or segment.start - window.start < EDGE_SECONDS) and after
