"""A worker ends with its supervisor, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

#: Set by the supervisor for its children: its own process id.
SUPERVISOR_PID = "BATCHMILL_SUPERVISOR_PID"

_PR_SET_PDEATHSIG = 1


def supervisor_pid() -> int | None:
    """The supervisor's process id; None when a person started this worker directly."""
    text = os.environ.get(SUPERVISOR_PID, "")
    return int(text) if text.isdigit() else None


def orphaned() -> bool:
    """True when there was a supervisor and it is gone."""
    expected = supervisor_pid()
    return expected is not None and os.getppid() != expected


def die_with_supervisor() -> None:
    """Ask the kernel for SIGKILL when the supervisor dies (Linux); nothing where there is none.

    The kernel minds the *thread* that started us, which is the supervisor's main thread.
    """
    if supervisor_pid() is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # It may have died before the kernel was told.
    if orphaned():
        os._exit(1)
