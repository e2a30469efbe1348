"""The store: where batches live, the only truth of the system.

Paths are relative, `/`-separated. Files are 0600 and folders 0700 on a local disk, since they hold prompts and answers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from common.errors import Unreachable, UsageError


class Store(Protocol):
    """What every store can do. Missing paths raise `FileNotFoundError`, a store that does not answer `Unreachable`."""

    url: str

    def read(self, path: str) -> bytes:
        """The whole of a (small) file."""
        ...

    def read_range(self, path: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`; fewer only at the end of the file."""
        ...

    def size(self, path: str) -> int:
        """Bytes of a file."""
        ...

    def exists(self, path: str) -> bool:
        """True for a file or a folder."""
        ...

    def put_atomic(self, path: str, data: bytes) -> None:
        """Write or replace a file: a reader sees the old bytes or the new, and a crash loses neither."""
        ...

    def create_exclusive(self, path: str, data: bytes) -> bool:
        """Create a file that is not there yet, whole; False when another was first."""
        ...

    def list(self, path: str) -> list[str]:
        """Sorted names directly below a folder; none when it is missing."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file or a folder with all below it; no error when it is missing."""
        ...

    def open_read(self, path: str) -> BinaryIO:
        """A file for reading."""
        ...

    def open_write(self, path: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A new file, visible under its name only when the block ends without an exception, durable then."""
        ...


def open_store(url: str) -> Store:
    """The store at a folder, a `file://` URL, or any URL that fsspec opens (`s3://bucket/prefix`)."""
    if "://" not in url or url.startswith("file://"):
        return LocalStore(Path(url.removeprefix("file://")).expanduser())
    from common.object_store import ObjectStore

    return ObjectStore(url)


class LocalStore:
    """A folder on a POSIX disk."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = str(self.root)
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise Unreachable(f"store {self.root}: cannot be opened: {exc.strerror}") from None

    def local_path(self, path: str) -> Path:
        """Where a path lies on the disk."""
        parts = path.split("/")
        if path.startswith("/") or ".." in parts:
            raise UsageError(f"store path {path!r} leaves the store")
        return self.root.joinpath(*parts)

    def read(self, path: str) -> bytes:
        return self.local_path(path).read_bytes()

    def read_range(self, path: str, start: int, length: int) -> bytes:
        fd = os.open(self.local_path(path), os.O_RDONLY)
        try:
            parts = []
            while length > 0:
                part = os.pread(fd, length, start)
                if not part:
                    break
                parts.append(part)
                start += len(part)
                length -= len(part)
            return b"".join(parts)
        finally:
            os.close(fd)

    def size(self, path: str) -> int:
        return self.local_path(path).stat().st_size

    def exists(self, path: str) -> bool:
        return self.local_path(path).exists()

    def put_atomic(self, path: str, data: bytes) -> None:
        with self.open_write(path) as file:
            file.write(data)

    def create_exclusive(self, path: str, data: bytes) -> bool:
        target = self.local_path(path)
        temporary = self._temporary(target)
        try:
            with open(temporary, "xb", opener=_private) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # link() is the one POSIX call that creates a name with its content and fails when the name is taken.
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(target.parent)
        return True

    def list(self, path: str) -> list[str]:
        try:
            names = os.listdir(self.local_path(path) if path else self.root)
        except FileNotFoundError:
            return []
        return sorted(n for n in names if not n.startswith(".tmp-"))

    def delete(self, path: str) -> None:
        target = self.local_path(path)
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        else:
            target.unlink(missing_ok=True)

    def open_read(self, path: str) -> BinaryIO:
        return open(self.local_path(path), "rb")

    @contextlib.contextmanager
    def open_write(self, path: str) -> Iterator[BinaryIO]:
        target = self.local_path(path)
        temporary = self._temporary(target)
        try:
            with open(temporary, "xb", buffering=1 << 18, opener=_private) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)

    def _temporary(self, target: Path) -> Path:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return target.parent / f".tmp-{uuid.uuid4().hex}"


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
