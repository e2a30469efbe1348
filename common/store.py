"""The store: where batches live, the only truth of the system.

Paths are relative, `/`-separated. Files are 0600 and folders 0700 on a local disk, since they hold prompts and answers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import io
import itertools
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol, Self, cast

from common.errors import StoreFull, Unreachable, UsageError
from common.places import expanded

#: Called when files are written and have no name yet; what it raises leaves none of them behind.
Fence = Callable[[], None]


class FileGroup(Protocol):
    """Files that get their names together, when the block that made the group ends without an exception.

    Not all at the same moment: a crash in between leaves some of them, each whole.
    """

    def open_write(self, path: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A new file of the group; it is not part of it when the block ends with an exception."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """A new file of the group, whole."""
        ...

    def discard(self, folder: str) -> None:
        """Take the files of a folder out of the group."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...


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

    def group(self, fence: Fence) -> FileGroup:
        """Files written together, for few waits on the disk; durable when the group's block has ended.

        `fence` is called between the last byte and the first name.
        """
        ...

    def sweep(self, path: str, *, dead_only: bool = False) -> None:
        """Remove what writers left in a folder that were killed; a writer that is only slow then fails.

        `dead_only`: only what processes left that ran on this machine and do no more.
        """
        ...


def open_store(url: str, *, make: bool = True) -> Store:
    """The store at a folder, a `file://` URL, or any URL that fsspec opens (`s3://bucket/prefix`).

    A folder that is not there is made, unless `make` is False: then reading finds nothing in it.
    """
    if "://" not in url or url.startswith("file://"):
        return LocalStore(expanded(url.removeprefix("file://")), make=make)
    from common.object_store import ObjectStore

    return ObjectStore(url)


class LocalStore:
    """A folder on a POSIX disk. Whatever returned is durable: files and the names of files are synced."""

    def __init__(self, root: Path, *, make: bool = True) -> None:
        self.root = root.absolute()
        self.url = str(self.root)
        try:
            with self.errors("cannot be opened"):
                if make:
                    make_folders(self.root)
                if not self.root.is_dir() and (make or self.root.exists()):
                    raise Unreachable(f"store {self.root}: is not a folder")
        except FileNotFoundError as exc:  # where nobody can make a folder, such as /proc, or a link that leads nowhere
            raise Unreachable(f"store {self.root}: cannot be opened: {exc.strerror}") from None

    def local_path(self, path: str) -> Path:
        """Where a path lies on the disk."""
        return Path(self.path_text(path))

    def path_text(self, path: str) -> str:
        """As `local_path`, for what is done tens of thousands of times."""
        if path.startswith("/") or ".." in path.split("/"):
            raise UsageError(f"store path {path!r} leaves the store")
        return f"{self.url}/{path}"

    def is_full(self) -> bool:
        """True when there is no room for as much as a small file."""
        with self.errors("cannot be read"):
            stats = os.statvfs(self.root)
        return stats.f_bavail * stats.f_frsize < SMALL_FILE

    def read(self, path: str) -> bytes:
        with self.errors(f"{path}: cannot be read"):
            return self.local_path(path).read_bytes()

    def read_range(self, path: str, start: int, length: int) -> bytes:
        with self.errors(f"{path}: cannot be read"):
            fd = os.open(self.path_text(path), os.O_RDONLY | os.O_CLOEXEC)
            try:
                parts = []
                while length > 0:
                    part = os.pread(fd, length, start)
                    if not part:
                        break
                    parts.append(part)
                    start += len(part)
                    length -= len(part)
                return parts[0] if len(parts) == 1 else b"".join(parts)
            finally:
                os.close(fd)

    def size(self, path: str) -> int:
        with self.errors(f"{path}: cannot be read"):
            return self.local_path(path).stat().st_size

    def exists(self, path: str) -> bool:
        with self.errors(f"{path}: cannot be read"):
            return self.local_path(path).exists()

    def put_atomic(self, path: str, data: bytes) -> None:
        with self.open_write(path) as file:
            file.write(data)

    def create_exclusive(self, path: str, data: bytes) -> bool:
        target = self.local_path(path)
        with self.errors(f"{path}: cannot be written"):
            while True:
                temporary = self.temporary(target)
                try:
                    with open(temporary, "xb", opener=_private) as file:
                        file.write(data)
                        file.flush()
                        os.fsync(file.fileno())
                    # link() is the one POSIX call that creates a name with its content and fails when it is taken.
                    os.link(temporary, target)
                except FileExistsError:
                    return False
                except FileNotFoundError:
                    # The folder was put away meanwhile, with what was in it (the commands of a batch that has ended).
                    if target.parent.is_dir():
                        raise
                    continue
                finally:
                    temporary.unlink(missing_ok=True)
                with contextlib.suppress(FileNotFoundError):  # put away already
                    sync_folder(target.parent)
                return True

    def list(self, path: str) -> list[str]:
        with self.errors(f"{path}: cannot be read"):
            try:
                names = os.listdir(self.local_path(path) if path else self.root)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(n for n in names if not n.startswith(_TEMPORARY))

    def delete(self, path: str) -> None:
        target = self.path_text(path)
        with self.errors(f"{path}: cannot be removed"):
            try:
                os.unlink(target)
            except FileNotFoundError:
                return
            except (IsADirectoryError, PermissionError):  # which of them, for a folder, depends on the system
                if not os.path.isdir(target):
                    raise
                shutil.rmtree(target, onerror=_unless_gone)

    def open_read(self, path: str) -> BinaryIO:
        with self.errors(f"{path}: cannot be read"):
            return open(self.local_path(path), "rb")

    @contextlib.contextmanager
    def open_write(self, path: str) -> Iterator[BinaryIO]:
        target = self.local_path(path)
        what = f"{path}: cannot be written"
        with self.errors(what):
            temporary = self.temporary(target)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Only the file's own errors are the store's: the block may do other things that fail.
            with io.BufferedWriter(RawFile(fd, self, what), 1 << 18) as file:
                yield cast(BinaryIO, file)
                file.flush()
                with self.errors(what):
                    os.fsync(fd)
            with self.errors(what):
                temporary.replace(target)
                sync_folder(target.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def group(self, fence: Fence) -> FileGroup:
        from common.local_group import LocalGroup

        return LocalGroup(self, fence)

    def sweep(self, path: str, *, dead_only: bool = False) -> None:
        with self.errors(f"{path}: cannot be read"):
            try:
                names = os.listdir(self.local_path(path))
            except (FileNotFoundError, NotADirectoryError):
                return
            for name in names:
                if name.startswith(_TEMPORARY) and not (dead_only and _may_live(name)):
                    (self.local_path(path) / name).unlink(missing_ok=True)

    def move(self, path: str, to: str) -> None:
        """Rename a file or folder, whole and durable; does nothing when it is gone or `to` is there already."""
        source, target = self.local_path(path), self.local_path(to)
        with self.errors(f"{to}: cannot be written"):
            make_folders(target.parent)
            try:
                source.rename(target)
            except FileNotFoundError:
                return
            except OSError as exc:
                if exc.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR):
                    return
                raise
            sync_folder(target.parent)
            sync_folder(source.parent)

    def move_all(self, pairs: Sequence[tuple[str, str]]) -> None:
        """As `move`, of many at once."""
        folders: dict[Path, None] = {}
        with self.errors("folders cannot be moved"):
            for path, to in pairs:
                source, target = self.local_path(path), self.local_path(to)
                if target.parent not in folders:
                    make_folders(target.parent)
                source.rename(target)
                folders |= {target.parent: None, source.parent: None}
            for folder in folders:
                sync_folder(folder)

    def sync(self, path: str) -> None:
        """Make the names in a folder durable."""
        with self.errors(f"{path}: cannot be written"):
            sync_folder(self.local_path(path))

    def create_locked(self, path: str, *, sync: bool = True) -> int:
        """Create a file held with an exclusive flock from its first moment; the lock ends with the descriptor.

        `sync`: its name is durable when this returns.
        """
        target = self.local_path(path)
        with self.errors(f"{path}: cannot be written"):
            temporary = self.temporary(target)
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                temporary.replace(target)
                if sync:
                    sync_folder(target.parent)
            except BaseException:
                os.close(fd)
                temporary.unlink(missing_ok=True)
                raise
            return fd

    def try_lock(self, path: str) -> int | None:
        """A descriptor that holds a file's flock; None when another has it, or when the file is gone."""
        with self.errors(f"{path}: cannot be locked"):
            try:
                fd = os.open(self.local_path(path), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            except BaseException:
                os.close(fd)
                raise
            return fd

    def temporary(self, target: Path) -> Path:
        """A new name beside `target`, whose folder is made where it is missing."""
        make_folders(target.parent)
        return target.parent / temporary_name()

    def errors(self, what: str) -> Errors:
        """Around calls of the disk; `what` failed when they do."""
        return Errors(self.url, what)


class Errors:
    """Errors of the disk as one line; a missing file stays `FileNotFoundError`, which callers expect.

    A class, since it is entered a dozen times for every batch, and a generator would cost three times as much.
    """

    __slots__ = ("_url", "_what")

    def __init__(self, url: str, what: str) -> None:
        self._url = url
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, exc: BaseException | None, _trace: object) -> None:
        if not isinstance(exc, OSError) or isinstance(exc, FileNotFoundError):
            return
        if exc.errno in _FULL:
            text = f"store {self._url}: {self._what}: {os.strerror(exc.errno)}; free some space"
            raise StoreFull(text) from None
        raise Unreachable(f"store {self._url}: {self._what}: {exc.strerror or exc}") from None


#: Bytes that a status or a heartbeat and its place in a folder take, with room to spare.
SMALL_FILE = 64 << 10

_TEMPORARY = ".tmp-"
#: What tells this process from an earlier one of its number, and its names from one another.
_LIFE, _NUMBERS = os.urandom(8).hex(), itertools.count()
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class RawFile(io.FileIO):
    """An open file whose write errors are the store's errors."""

    def __init__(self, fd: int, store: LocalStore, what: str) -> None:
        super().__init__(fd, "wb")
        self._store = store
        self._what = what

    def write(self, data: Any, /) -> int:
        with self._store.errors(self._what):
            return super().write(data)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folders(folder: Path) -> None:
    """A folder and all above it, each private and durable (`mkdir(parents=True)` makes only the last one private)."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
        sync_folder(folder.parent)


def temporary_name() -> str:
    """A new name for a file that is being written; `sweep` knows by it whose it is."""
    return f"{_TEMPORARY}{_machine()}-{os.getpid()}-{_LIFE}-{next(_NUMBERS):x}"


@functools.cache
def _machine() -> str:
    """Eight characters for what numbers processes: this boot of this machine, and the container in it."""
    facts = b""
    with contextlib.suppress(OSError):
        facts = Path("/proc/sys/kernel/random/boot_id").read_bytes() + b"%d" % os.stat("/proc/self/ns/pid").st_ino
    return f"{zlib.crc32(facts or socket.gethostname().encode()):08x}"


def _may_live(temporary: str) -> bool:
    """Whether the process that wrote a temporary file may still be at it."""
    machine, _, rest = temporary.removeprefix(_TEMPORARY).partition("-")
    pid = rest.partition("-")[0]
    if machine != _machine() or not pid.isdigit():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _unless_gone(_function: Any, _path: str, info: tuple[type[BaseException], BaseException, Any]) -> None:
    # Another process may be removing the same folder.
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]
