"""How long a plan takes: arithmetic as it was measured once, against what storage reads in the meantime."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InvalidOptions
from engine.plan import Plan


@dataclass(frozen=True, slots=True)
class Work:
    """What a recording took, without any waiting for weights.

    Attributes
    ----------
    n_windows, n_steps : int
        Passes of the encoder and of the decoder.
    window_seconds, step_seconds : float
        Arithmetic of one. That of the cross K/V, once a window, is spread over the decoder's passes.
    other_seconds : float
        Of the whole recording: reading it, the log-mel, choosing tokens.
    """

    n_windows: int
    n_steps: int
    window_seconds: float
    step_seconds: float
    other_seconds: float


def read_work(path: Path) -> Work:
    """What `thimble bench --json` printed into a file.

    Raises
    ------
    InvalidOptions
        It printed something else, or heard nothing.
    """
    try:
        figures = json.loads(path.read_text())
        sums = {("encoder", "compute"): 0.0, ("decoder", "compute"): 0.0, ("encoder", "wait"): 0.0, ("decoder", "wait"): 0.0}
        passes = {"encoder": 0, "decoder": 0}
        for stack, layer, kind, seconds, count in figures["timings"]["layers"]:
            if (stack, kind) in sums:
                sums[stack, kind] += seconds
            if kind == "compute" and layer in ("ln_post", "ln"):  # one each in every pass
                passes[stack] = count
        return Work(
            passes["encoder"],
            passes["decoder"],
            sums["encoder", "compute"] / passes["encoder"],
            sums["decoder", "compute"] / passes["decoder"],
            figures["seconds"] - sum(sums.values()),
        )
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        raise InvalidOptions(f"{path.name} is not what `thimble bench --json` prints of a recording with speech") from None


def forecast(plan: Plan, read_bps: float | None, work: Work | None) -> dict[str, float]:
    """Seconds by name, as far as they follow from what is known; the most that they can be, with no page cache left.

    Parameters
    ----------
    read_bps : bytes that storage reads a second; None: it is no matter
    work : None: what arithmetic takes is not known, and only reading is told
    """
    window_read, step_read = (n / read_bps if read_bps else 0.0 for n in (plan.window_read_bytes, plan.token_read_bytes))
    seconds = {"window_read_seconds": window_read, "token_read_seconds": step_read} if read_bps else {}
    if work is not None:
        # With a piece read ahead the slower of the two is all that shows; with one slot they take turns.
        together = max if plan.residency.slots > 1 else lambda *both: sum(both)
        window, step = together(work.window_seconds, window_read), together(work.step_seconds, step_read)
        whole = work.n_windows * window + work.n_steps * step + work.other_seconds
        seconds |= {"window_seconds": window, "token_seconds": step, "recording_seconds": whole}
    return seconds
