"""Many files on a local disk with few waits: they are synced side by side, or, very many, with their file system.

A sync of the whole file system costs a third of the CPU time that 800 single ones take, and may wait for what others
write to the same disk: so it is for large groups alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from common.store import Fence, LocalStore, RawFile, make_folders, sync_folder, temporary_name

#: From so many files on, several are synced at a time, and how many.
_MANY = 16
_AT_ONCE = 8
#: From so many files on, the file system is synced as a whole.
_VERY_MANY = 64
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class LocalGroup:
    """See `common.store.FileGroup`. Not thread-safe."""

    def __init__(self, store: LocalStore, fence: Fence) -> None:
        self._store = store
        self._fence = fence
        #: (path in the store, temporary file, where it will be).
        self._made: list[tuple[str, str, str]] = []

    @contextlib.contextmanager
    def open_write(self, path: str) -> Iterator[BinaryIO]:
        fd, made, what = self._begin(path)
        try:
            with _WholeFile(fd, self._store, what) as file:
                yield cast(BinaryIO, file)
        except BaseException:
            _remove(made[1])
            raise
        self._made.append(made)

    def put(self, path: str, data: bytes) -> None:
        """A new file of the group, whole."""
        fd, made, what = self._begin(path)
        try:
            with self._store.errors(what):
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(fd, rest) :]
        except BaseException:
            _remove(made[1])
            raise
        finally:
            os.close(fd)
        self._made.append(made)

    def _begin(self, path: str) -> tuple[int, tuple[str, str, str], str]:
        # Text, not `Path`s: this is done tens of thousands of times.
        target = self._store.path_text(path)
        folder = target[: target.rindex("/")]
        what = f"{path}: cannot be written"
        with self._store.errors(what):
            temporary = f"{folder}/{temporary_name()}"
            try:
                fd = os.open(temporary, _NEW, 0o600)
            except FileNotFoundError:
                make_folders(Path(folder))
                fd = os.open(temporary, _NEW, 0o600)
        return fd, (path, temporary, target), what

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


class _WholeFile(RawFile):
    """Not buffered: whoever writes thousands of small files gives each in one piece or two."""

    def write(self, data: Any, /) -> int:
        rest = memoryview(data)
        size = len(rest)
        while rest:
            rest = rest[super().write(rest) :]
        return size


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
