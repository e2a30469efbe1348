"""The engine's processes die with the worker, however it dies; a survivor would hold the GPU for good.

vLLM calls `install` in each of its processes, as a plug-in of the group `vllm.general_plugins`. There it asks the
kernel for a SIGKILL at the death of the parent (`prctl(PR_SET_PDEATHSIG)`). Two things follow from how Linux does that:

- The signal comes when the *thread* that started the process ends, not only when its process does. So the thread that
  starts the engine (the engine loop's) must live as long as the engine.
- The wish is made by the child, so a parent that dies before would be missed: `install` looks once more afterwards.

Until a child has come as far as loading plug-ins (its imports take seconds), it is not yet bound.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from importlib.metadata import entry_points
from pathlib import Path

from workers.engine import privacy

GROUP = "vllm.general_plugins"
NAME = "batchmill_parent_death"

#: The process that owns an engine names itself here; its descendants inherit the name and find that they are not it.
_OWNER = "BATCHMILL_ENGINE_OWNER"
_PR_SET_PDEATHSIG = 1


def own_engine() -> None:
    """Called by the process that is about to start an engine: from now on its vLLM children bind themselves to it.

    Works from a checkout too. vLLM finds plug-ins by the metadata of installed distributions; where Batchmill's are not
    installed, the folder `plugin`, which holds just this entry point, goes on `sys.path`; spawned children get that
    from us.
    """
    os.environ[_OWNER] = str(os.getpid())
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        os.environ["VLLM_PLUGINS"] = f"{allowed},{NAME}" if allowed else NAME
    if not entry_points(group=GROUP, name=NAME):
        sys.path.append(str(Path(__file__).with_name("plugin")))


def install() -> None:
    """Bind this process to its parent; does nothing in the owner itself, and nothing where no engine is owned."""
    owner = os.environ.get(_OWNER, "")
    if not owner or owner == str(os.getpid()):
        return
    privacy.guard_logs()
    if sys.platform != "linux":
        return
    _leave_group(int(owner))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        # The parent was gone before the kernel knew of the wish.
        os.kill(os.getpid(), signal.SIGKILL)


def _leave_group(owner: int) -> None:
    """Out of a worker's process group that a terminal may signal as a whole: Ctrl-C means that the worker drains, and
    an engine that got it too would abort every request at once.

    A worker that leads a session of its own, as under the supervisor, has no terminal; there the group stays together,
    so that the supervisor can kill what a worker leaves.
    """
    with contextlib.suppress(OSError):
        if os.getsid(owner) != owner and os.getpgid(0) == os.getpgid(owner):
            os.setpgid(0, 0)
