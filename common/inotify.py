"""The kernel's word of new names in a folder (inotify(7)), at the moment at which they come about.

Where there is none (another system, a network's file system, too many that ask), looking now and then must do.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections.abc import Iterator
from typing import Self

_CREATED, _MOVED_TO, _NO_MORE = 0x100, 0x80, 0x8000
#: `struct inotify_event`: watch, mask, cookie, bytes of the name, which follows.
_EVENT = struct.Struct("iIII")
#: Bytes of news read at a time.
_BUFFER = 64 << 10


class NewNames:
    """News of one folder. `OSError` where there are none to be had, or no more, since the folder is gone."""

    def __init__(self, folder: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "inotify_init1"):
            raise OSError("this system has no inotify")
        self._fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        if libc.inotify_add_watch(self._fd, os.fsencode(folder), _CREATED | _MOVED_TO) < 0:
            self.close()
            raise OSError(ctypes.get_errno(), "inotify_add_watch")
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """True when names have come since this was last asked that do not begin with a dot, or may have.

        False after `seconds`, and after names that begin with one: files that are being written.
        """
        if not self._poll.poll(seconds * 1000):
            return False
        names = list(self._names())
        return not all(name.startswith(b".") for name in names)

    def _names(self) -> Iterator[bytes]:
        """Names that have come; an empty one stands for more than the kernel could remember."""
        while True:
            try:
                data = os.read(self._fd, _BUFFER)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                _, mask, _, size = _EVENT.unpack_from(data, at)
                if mask & _NO_MORE:
                    raise OSError("the folder is gone")
                at += _EVENT.size
                yield data[at : at + size].rstrip(b"\0")
                at += size

    def close(self) -> None:
        """Let the kernel forget it."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
