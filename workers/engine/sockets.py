"""A private folder for the sockets between an engine's processes.

vLLM puts them into the common temporary folder under random names and leaves them there when it is killed. In a folder
of ours, named for the process, they are closed to other users and the next start finds what a dead one left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "batchmill-engine-"
#: What fits before vLLM's `/<uuid>` into the 107 bytes of a socket's address.
_MOST = 107 - 37


def make_folder() -> Path:
    """Make the folder, tell vLLM of it, and remove those of this user's processes that are gone."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) + len(_PREFIX) + 20 > _MOST:
        base = Path("/tmp")
    sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    return folder


def sweep(base: Path) -> None:
    """Remove the folders of processes that are gone."""
    for folder in base.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and folder.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(folder)


def remove(folder: Path) -> None:
    """Remove the folder of an engine that has stopped."""
    os.environ.pop("VLLM_RPC_BASE_PATH", None)
    shutil.rmtree(folder, ignore_errors=True)
