"""Many files on a local disk with few waits: one sync of the file system where there would be one of every file."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, cast

from common.store import Fence, LocalStore, RawFile, sync_folder

#: From so many files on, the file system is synced as a whole. Below, what others write is not waited for.
_MANY = 16


class LocalGroup:
    """See `common.store.FileGroup`. Not thread-safe."""

    def __init__(self, store: LocalStore, fence: Fence) -> None:
        self._store = store
        self._fence = fence
        #: (path in the store, temporary file, where it will be).
        self._made: list[tuple[str, Path, Path]] = []

    @contextlib.contextmanager
    def open_write(self, path: str) -> Iterator[BinaryIO]:
        target = self._store.local_path(path)
        what = f"{path}: cannot be written"
        with self._store.errors(what):
            temporary = self._store.temporary(target)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with io.BufferedWriter(RawFile(fd, self._store, what), 1 << 16) as file:
                yield cast(BinaryIO, file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._made.append((path, temporary, target))

    def put(self, path: str, data: bytes) -> None:
        """A new file of the group, whole."""
        with self.open_write(path) as file:
            file.write(data)

    def discard(self, folder: str) -> None:
        """Take the files of a folder out of the group."""
        kept = []
        for made in self._made:
            if made[0].startswith(f"{folder}/"):
                made[1].unlink(missing_ok=True)
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
                temporary.unlink(missing_ok=True)
            self._made = []

    def _commit(self) -> None:
        with self._store.errors("files cannot be written"):
            self._sync([temporary for _, temporary, _ in self._made], _sync_file)
            self._fence()
            folders = dict.fromkeys(target.parent for _, _, target in self._made)
            for path, temporary, target in self._made:
                with self._store.errors(f"{path}: cannot be written"):
                    temporary.replace(target)
            self._made = []
            self._sync(list(folders), sync_folder)

    def _sync(self, paths: list[Path], one: Callable[[Path], None]) -> None:
        if len(paths) < _MANY or _syncfs is None:
            for path in paths:
                one(path)
            return
        fd = os.open(self._store.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _syncfs(fd):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        finally:
            os.close(fd)


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


#: Linux has it; elsewhere every file is synced by itself.
_syncfs: Callable[[int], int] | None = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
