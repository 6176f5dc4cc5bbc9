"""A child process's end, turned into a cause that log, metric and client can be told."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

from service.control_group import find_memory_group, machine_oom_kills

OOM_SCORE_ADJ = 500
"""Above the front end's own: as if the child held half of the limit more (proc_pid_oom_score_adj(5)). Out of memory, the kernel
takes it and not the front end, which answers for it, starts another, and may well be the larger of the two."""
MAX_OOM_SCORE_ADJ = 1000
MIB = 1 << 20


class ChildWatch:
    """Watches over one child process from its start.

    Parameters
    ----------
    pid : int
        The child, just started. It becomes the first that the kernel kills where memory runs out.
    root : Path
        Below which `proc` and `sys` are; a test hands in its own.
    """

    def __init__(self, pid: int, root: Path = Path("/")) -> None:
        self._root = root
        self._group = find_memory_group(root)
        self.look()
        with suppress(OSError, ValueError):  # the child is gone, or /proc not as it should be: the kernel then chooses by size
            own = int((root / "proc/self/oom_score_adj").read_text())
            score = min(own + OOM_SCORE_ADJ, MAX_OOM_SCORE_ADJ)
            (root / "proc" / str(pid) / "oom_score_adj").write_text(str(score))

    def look(self) -> None:
        """Take the kernel's counts; only what rises after this is blamed on it. At the start of each piece of work."""
        self._kills_before = self._kills()
        self._failures_before = self._group.limit_failures() if self._group else None

    def cause(self, status: int) -> tuple[str, str]:
        """Why the child ended, in words, and the metric's reason: out_of_memory, killed (by a signal) or crashed (by itself).

        Parameters
        ----------
        status : int
            As `subprocess` tells it: negative for a signal.
        """
        if status == -signal.SIGKILL and self._kills() > self._kills_before:
            return f"killed by the kernel: {self._used_up()} is used up", "out_of_memory"
        if status < 0:
            try:
                name = signal.Signals(-status).name
            except ValueError:  # real-time signals have no name
                name = f"signal {-status}"
            return f"killed by {name}", "killed"
        return f"ended with exit status {status}", "crashed"

    def _kills(self) -> int:
        """A count that rises when the kernel kills for want of memory: the group's, or without one the machine's."""
        return self._group.oom_kills() if self._group else machine_oom_kills(self._root)

    def _used_up(self) -> str:
        """What ran out: the group counts its dead whether its own limit or the whole machine did."""
        limit = self._group.limit_bytes() if self._group else None
        if self._group is None or limit is None:
            return "the machine's memory"
        if self._failures_before is None:
            is_limit = self._group.has_been_full()
        else:
            is_limit = (self._group.limit_failures() or 0) > self._failures_before
        return f"the memory limit of {limit / MIB:.0f} MiB" if is_limit else "the machine's memory"
