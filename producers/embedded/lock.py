"""A file lock (flock): given back by the kernel however its holder ends, and never inherited by a child."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType


class FileLock:
    """A lock on a file, exclusive or shared. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def try_acquire(self, *, shared: bool = False) -> bool:
        """Take it if it is free; a held one is changed to the asked kind (not atomically: flock(2))."""
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        return True

    def acquire(self, timeout_s: float, *, shared: bool = False) -> bool:
        """Take it within `timeout_s` seconds, or say False."""
        deadline = time.monotonic() + timeout_s
        while not self.try_acquire(shared=shared):
            if time.monotonic() >= deadline:
                return False
            # flock has no time limit, and an alarm would take the process's only SIGALRM.
            time.sleep(0.05)
        return True

    def write_pid(self) -> None:
        """Write this process's id into the file; for the holder."""
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Give it back; may be called again."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def is_held(path: Path) -> bool:
    """True when somebody holds the lock exclusively."""
    if not path.exists():
        return False
    with FileLock(path) as probe:
        return not probe.try_acquire(shared=True)


def holder_pid(path: Path) -> int | None:
    """The process id that the holder wrote; None when nobody holds it or has written yet."""
    if not is_held(path):
        return None
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None
