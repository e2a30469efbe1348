"""A private folder for the sockets between an engine's processes.

vLLM puts them into the common temporary folder under random names and leaves them there when it is killed. In a folder
of ours they are closed to other users, and the next start finds what a dead one left: a folder is locked for as long
as its process lives. (Its pid would not do: containers that share the folder number their processes each by itself.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

_PREFIX = "batchmill-engine-"
#: What fits before vLLM's `/<uuid>` into the 107 bytes of a socket's address.
_MOST = 107 - 37


class SocketFolder:
    """The folder, made and locked; vLLM is told of it. Those that dead processes of this user left are removed."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls) -> Self:
        """Raises `OSError` when none can be made."""
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base)) + len(_PREFIX) + 10 > _MOST:
            base = Path("/tmp")
        for folder in base.glob(f"{_PREFIX}*"):
            _sweep(folder)
        lock = None
        while lock is None:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            # None: another start, at work in this very moment, took it for a dead one's.
            lock = _lock(folder)
        os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
        return cls(folder, lock)

    def remove(self) -> None:
        """The engine has stopped."""
        os.environ.pop("VLLM_RPC_BASE_PATH", None)
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if folder.stat().st_uid == os.getuid() and (lock := _lock(folder)) is not None:
            try:
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None when another has it, or had it and removed the folder."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
