"""Files that people name, written so that they are there whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from common.errors import UsageError

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a symlink that leads nowhere"),
)


def destination(target: Path) -> Path:
    """The place that writing `target` replaces: where its symlinks lead, for they stay.

    `UsageError` when something is there that is no regular file: nobody means a device or a FIFO to be replaced.
    """
    place = Path(os.path.realpath(target))
    try:
        mode = os.lstat(place).st_mode
    except OSError:
        return place  # Nothing is there, or whoever writes it will be told.
    for of_kind, name in _KINDS:
        if of_kind(mode):
            raise UsageError(f"{target}: is {name}, not a regular file, and is not replaced; name another file")
    return place


@contextlib.contextmanager
def replacing(target: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file, to be written and read, that takes its name, durable, when the block ends without an exception.

    `mode`: of the new file, less the umask. Raises `UsageError` as `destination`, and `OSError`. What a process that
    was killed in such a block left in the folder is removed.
    """
    place = destination(target)
    _sweep(place)
    temporary = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with open(temporary, "x+b", opener=lambda path, flags: os.open(path, flags | os.O_CLOEXEC, mode)) as file:
            # Tells a sweep, from wherever it looks, that somebody still writes it.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sweep(place: Path) -> None:
    """Remove what dead processes left of this file; one that lives holds its own locked."""
    ours = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{8}}\.part")
    try:
        names = [name for name in os.listdir(place.parent) if ours.fullmatch(name)]
    except OSError:
        return
    for name in names:
        left = place.with_name(name)
        with contextlib.suppress(OSError):
            fd = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                # One that is empty may be that of a process which is about to lock it.
                if os.fstat(fd).st_size:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left.unlink()
            finally:
                os.close(fd)
