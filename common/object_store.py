"""The store on object storage, or on whatever else fsspec opens (`s3://bucket/prefix`, `gs://…`, `memory://…`).

An object appears whole or not at all, so there are no temporary names. What is asked of the service: reads see the last
write (S3 and its like do), and a conditional create (`If-None-Match: *` on S3, which s3fs sends for `mode="create"`).
"""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from common.errors import BatchmillError, StoreFull, Unreachable, UsageError
from common.store import Fence, FileGroup

#: Bytes of one part of an upload; S3 takes 10,000 parts, so files up to 160 GB.
PART_BYTES = 16 << 20

#: Where an object that is being written can be given up; elsewhere it is written under another name first.
_DEFERRED = frozenset({"s3", "s3a", "gs", "gcs"})
_TEMPORARY = ".tmp-"
#: Objects of a group that are committed at a time.
_AT_ONCE = 16


class ObjectStore:
    """A prefix of an fsspec file system. Listings are never cached: other machines write too."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        try:
            fs, self._root = fsspec.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as exc:
            raise UsageError(f"store {url}: cannot be opened: {exc}") from None
        self._fs: Any = fs
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
        self._deferred = not _DEFERRED.isdisjoint(protocols)
        self.exists("")

    def read(self, path: str) -> bytes:
        with self._errors(f"{path}: cannot be read"):
            return cast(bytes, self._fs.cat_file(self._full(path)))

    def read_range(self, path: str, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        with self._errors(f"{path}: cannot be read"):
            try:
                return cast(bytes, self._fs.cat_file(self._full(path), start=start, end=start + length))
            except FileNotFoundError:
                raise
            except Exception:
                # S3 answers 416 to a range that starts at the end of the object or after it.
                if start >= self.size(path):
                    return b""
                raise

    def size(self, path: str) -> int:
        with self._errors(f"{path}: cannot be read"):
            self._fresh()
            return int(self._fs.info(self._full(path))["size"])

    def exists(self, path: str) -> bool:
        # Not the file system's own exists(): of a service that does not answer it says False.
        with self._errors(f"{path}: cannot be read" if path else "cannot be opened"):
            self._fresh()
            try:
                self._fs.info(self._full(path))
            except FileNotFoundError:
                return False
            return True

    def put_atomic(self, path: str, data: bytes) -> None:
        with self._errors(f"{path}: cannot be written"):
            self._fs.pipe_file(self._full(path), data)

    def create_exclusive(self, path: str, data: bytes) -> bool:
        with self._errors(f"{path}: cannot be written"):
            try:
                self._fs.pipe_file(self._full(path), data, mode="create")
            except FileExistsError:
                return False
            except OSError as exc:
                if _is_precondition(exc):
                    return False
                raise
            return True

    def list(self, path: str) -> list[str]:
        with self._errors(f"{path}: cannot be read"):
            self._fresh()
            full = self._full(path)
            try:
                found = self._fs.ls(full, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        below = full.strip("/") + "/"
        names = (str(name).strip("/") for name in found)
        found = sorted(n.removeprefix(below) for n in names if n.startswith(below))
        return [n for n in found if n and not n.startswith(_TEMPORARY)]

    def delete(self, path: str) -> None:
        with self._errors(f"{path}: cannot be removed"):
            self._fresh()
            try:
                self._fs.rm(self._full(path), recursive=True)
            except FileNotFoundError:
                return

    def open_read(self, path: str) -> BinaryIO:
        with self._errors(f"{path}: cannot be read"):
            return cast(BinaryIO, self._fs.open(self._full(path), "rb"))

    @contextlib.contextmanager
    def open_write(self, path: str) -> Iterator[BinaryIO]:
        pending = self.begin(path)
        try:
            yield pending.file
            pending.finish()
            pending.commit()
        except BaseException:
            pending.discard()
            raise

    def group(self, fence: Fence) -> FileGroup:
        return _ObjectGroup(self, fence)

    def sweep(self, path: str, *, dead_only: bool = False) -> None:
        """Objects appear whole, so there is nothing to remove."""

    def begin(self, path: str) -> _Pending:
        """An object to be written and then committed or discarded."""
        return _Pending(self, path)

    def _full(self, path: str) -> str:
        if path.startswith("/") or ".." in path.split("/"):
            raise UsageError(f"store path {path!r} leaves the store")
        return f"{self._root.rstrip('/')}/{path}" if path else self._root

    def _fresh(self) -> None:
        self._fs.invalidate_cache()

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Errors of the service as one line; a missing object stays `FileNotFoundError`, which callers expect."""
        try:
            yield
        except BatchmillError:
            raise
        except FileNotFoundError:
            if what.endswith("read"):
                raise
            # Nothing has to be there before a write but the bucket.
            raise Unreachable(f"store {self.url}: {what}: there is no such bucket") from None
        except Exception as exc:
            # Each service's client has exceptions of its own, and no base is common to them.
            if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFull(f"store {self.url}: {what}: {exc.strerror}; free some space") from None
            raise Unreachable(f"store {self.url}: {what}: {type(exc).__name__}: {exc}") from None

    def errors(self, what: str) -> contextlib.AbstractContextManager[None]:
        """The translation of errors, for files that are being written."""
        return self._errors(what)


class _Pending:
    """An object that is being written and has no name yet."""

    def __init__(self, store: ObjectStore, path: str) -> None:
        self.path = path
        self._store = store
        self._what = f"{path}: cannot be written"
        self._full = store._full(path)
        folder, _, name = self._full.rpartition("/")
        self._under = self._full if store._deferred else f"{folder}/{_TEMPORARY}{uuid.uuid4().hex}-{name}"
        with store.errors(self._what):
            self._file = store._fs.open(self._under, "wb", block_size=PART_BYTES, autocommit=not store._deferred)
        self.file = cast(BinaryIO, _Upload(self._file, store, self._what))

    def finish(self) -> None:
        """No more bytes come."""
        with self._store.errors(self._what):
            self._file.close()

    def commit(self) -> None:
        """Give it its name."""
        with self._store.errors(self._what):
            if self._store._deferred:
                self._file.commit()
            else:
                self._store._fs.mv(self._under, self._full)

    def discard(self) -> None:
        """Give it up; parts that were sent already are given back. Never raises: an error that led here is reported."""
        with contextlib.suppress(Exception):
            if self._store._deferred:
                self._file.discard()
                self._file.closed = True  # or it would try to finish the upload when it is collected
            else:
                self._store._fs.rm(self._under)


class _ObjectGroup:
    """Objects that are committed together, several at a time: each takes a round trip or two."""

    def __init__(self, store: ObjectStore, fence: Fence) -> None:
        self._store = store
        self._fence = fence
        self._made: list[_Pending] = []

    @contextlib.contextmanager
    def open_write(self, path: str) -> Iterator[BinaryIO]:
        pending = self._store.begin(path)
        try:
            yield pending.file
            pending.finish()
        except BaseException:
            pending.discard()
            raise
        self._made.append(pending)

    def put(self, path: str, data: bytes) -> None:
        with self.open_write(path) as file:
            file.write(data)

    def discard(self, folder: str) -> None:
        for pending in self._made:
            if pending.path.startswith(f"{folder}/"):
                pending.discard()
        self._made = [p for p in self._made if not p.path.startswith(f"{folder}/")]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        made, self._made = self._made, []
        try:
            if exc is not None:
                return
            self._fence()
            if len(made) <= 2:
                while made:
                    made[0].commit()
                    made.pop(0)
                return
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                results = [pool.submit(pending.commit) for pending in made]
            made = [p for p, result in zip(made, results, strict=True) if result.exception() is not None]
            for result in results:
                result.result()
        finally:
            for pending in made:
                pending.discard()


class _Upload:
    """An object being written; only its own errors are the store's."""

    def __init__(self, file: Any, store: ObjectStore, what: str) -> None:
        self._file = file
        self._store = store
        self._what = what

    def write(self, data: bytes) -> int:
        """Append bytes."""
        with self._store.errors(self._what):
            return int(self._file.write(data))

    def flush(self) -> None:
        """Parts are sent as they fill up."""

    def tell(self) -> int:
        """Bytes written."""
        return int(self._file.tell())


def _is_precondition(exc: OSError) -> bool:
    """True for HTTP 412 and 409: another was first (409: both at the same moment)."""
    text = str(exc)
    return "PreconditionFailed" in text or "ConditionalRequestConflict" in text or "pre-conditions" in text
