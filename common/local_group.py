"""Many files on a local disk with few waits: they are synced side by side, or, very many, with their file system.

A sync of the whole file system costs a third of the CPU time that 800 single ones take, and may wait for what others
write to the same disk: so it is for large groups alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from common.store import Fence, LocalStore, make_folders, sync_folder, temporary_name

#: From so many files on, several are synced at a time, and how many.
_MANY = 16
_AT_ONCE = 8
#: From so many files on, the file system is synced as a whole.
_VERY_MANY = 64
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
#: Stands for the descriptor of a file that was written and closed.
_CLOSED = -2


class LocalGroup:
    """See `common.store.FileGroup`. Not thread-safe."""

    def __init__(self, store: LocalStore, fence: Fence) -> None:
        self._store = store
        self._fence = fence
        #: (path in the store, temporary file, where it will be).
        self._made: list[tuple[str, str, str]] = []
        #: A temporary file of the group that is empty.
        self._empty: str | None = None

    @contextlib.contextmanager
    def open_write(self, path: str) -> Iterator[BinaryIO]:
        made = self._name(path)
        try:
            with _NewFile(self._store, made) as file:
                yield cast(BinaryIO, file)
            if not file.begun:
                self._make_empty(made)
        except BaseException:
            _remove(made[1])
            raise
        self._made.append(made)

    def put(self, path: str, data: bytes) -> None:
        """A new file of the group, whole."""
        with self.open_write(path) as file:
            file.write(data)

    def _name(self, path: str) -> tuple[str, str, str]:
        # Text, not `Path`s: this is done tens of thousands of times.
        target = self._store.path_text(path)
        return path, f"{target[: target.rindex('/')]}/{temporary_name()}", target

    def _make_empty(self, made: tuple[str, str, str]) -> None:
        """An empty file. All of a group are one, under many names: a name costs a tenth of what a file does."""
        if self._empty is not None:
            # No such link here: the first one was discarded, another file system, too many of them, no links at all.
            with contextlib.suppress(OSError):
                os.link(self._empty, made[1])
                return
        with self._store.errors(f"{made[0]}: cannot be written"):
            os.close(_create(made[1]))
        self._empty = made[1]

    def discard(self, folder: str) -> None:
        """Take the files of a folder out of the group."""
        kept = []
        for made in self._made:
            if made[0].startswith(f"{folder}/"):
                _remove(made[1])
            else:
                kept.append(made)
        self._made = kept

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if exc is None and self._made:
                self._commit()
        finally:
            for _, temporary, _ in self._made:
                _remove(temporary)
            self._made = []

    def _commit(self) -> None:
        with self._store.errors("files cannot be written"):
            self._sync([temporary for _, temporary, _ in self._made], _sync_file)
            self._fence()
            folders = dict.fromkeys(target[: target.rindex("/")] for _, _, target in self._made)
            for path, temporary, target in self._made:
                with self._store.errors(f"{path}: cannot be written"):
                    os.replace(temporary, target)
            self._made = []
            self._sync(list(folders), lambda folder: sync_folder(Path(folder)))

    def _sync(self, paths: list[str], one: Callable[[str], None]) -> None:
        if len(paths) >= _VERY_MANY and _syncfs is not None:
            self._sync_all(_syncfs)
        elif len(paths) >= _MANY:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                for _ in pool.map(one, paths):
                    pass
        else:
            for path in paths:
                one(path)

    def _sync_all(self, syncfs: Callable[[int], int]) -> None:
        fd = os.open(self._store.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if syncfs(fd):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        finally:
            os.close(fd)


class _NewFile(io.RawIOBase):
    """A file that comes to be with its first byte.

    Not buffered: whoever writes thousands of small files gives each in one piece or two.
    """

    def __init__(self, store: LocalStore, made: tuple[str, str, str]) -> None:
        self._errors = store.errors(f"{made[0]}: cannot be written")
        self._path = made[1]
        self._fd = -1

    @property
    def begun(self) -> bool:
        """Something was written."""
        return self._fd >= 0 or self._fd == _CLOSED

    def writable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def write(self, data: Any, /) -> int:
        """All of `data`."""
        rest = memoryview(data)
        size = len(rest)
        with self._errors:
            if size and self._fd < 0:
                self._fd = _create(self._path)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        return size

    def close(self) -> None:
        """See `io.RawIOBase`."""
        super().close()
        fd, self._fd = self._fd, _CLOSED if self.begun else -1
        if fd >= 0:
            os.close(fd)


def _create(path: str) -> int:
    try:
        return os.open(path, _NEW, 0o600)
    except FileNotFoundError:
        make_folders(Path(path).parent)
        return os.open(path, _NEW, 0o600)


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


#: Linux has it.
_syncfs: Callable[[int], int] | None = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
