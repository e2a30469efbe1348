"""Where a batch file comes from: a path, `-`, or any URL that fsspec opens; plain, gzip or zstd by its first bytes.

A `Source` gives the decompressed bytes in blocks of bounded size, and knows how many bytes it read and their digest.
"""

from __future__ import annotations

import io
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from blake3 import blake3

from common import addresses
from common.errors import BatchmillError, InvalidInput, Unreachable, UsageError
from common.places import expanded
from producers.batch import Input

#: Bytes read at a time.
BLOCK = 256 << 10

#: zstd gives back all that a piece unpacks to at once: with pieces of a kilobyte that is 32 MiB at the very worst (a
#: block of 128 KiB can be 4 bytes long), whatever the file was made to do.
_ZSTD_PIECE = 1 << 10

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = tuple(bytes((0x50 + n, 0x2A, 0x4D, 0x18)) for n in range(16))
#: /dev/null, as Linux numbers it.
_NULL = os.makedev(1, 3)
_FOREIGN = (
    (b"BZh", "bzip2 data; unpack it first (bunzip2), or use .gz or .zst"),
    (b"\xfd7zXZ", "xz data; unpack it first (unxz), or use .gz or .zst"),
    (b"PK\x03\x04", "a zip archive; unpack it first (unzip), or use .gz or .zst"),
    (b"\xff\xfe", "UTF-16 text; save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text; save it as UTF-8"),
    (b"PAR1", "a Parquet file; a batch is one JSON object a line"),
)


class Source:
    """An opened input. Iterate `blocks()` once, to the end, then `verify()`."""

    def __init__(self, name: str, raw: BinaryIO) -> None:
        #: For messages and `batch.json`: text, though a file's name may be any bytes.
        self.name = name.encode("utf-8", "replace").decode()
        self._raw = raw
        self._hash = blake3()
        #: Bytes as read, before decompression.
        self.bytes_read = 0
        #: Why the compressed data is not whole, once `blocks()` has ended; None: it is.
        self.broken: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close what was opened."""
        self._raw.close()

    def facts(self) -> Input:
        """What `batch.json` says of the input."""
        return Input(self.name, self.bytes_read, self._hash.hexdigest())

    def verify(self) -> None:
        """`InvalidInput` when the file changed while it was read; not every kind of source can tell."""

    def skim(self, progress: Callable[[int, int], None] | None = None) -> Input:
        """Read it for its digest alone, instead of `blocks()`; `progress` is told of bytes, and of no lines."""
        while self._read():
            if progress is not None:
                progress(self.bytes_read, 0)
        return self.facts()

    def blocks(self) -> Iterator[bytes]:
        """The content, decompressed, a BOM at its start dropped; blocks are never empty.

        Damage to compressed data ends the blocks and sets `broken`. Raises `UsageError` for what is no text at all.
        """
        first = self._read()
        while 0 < len(first) < 6 and (more := self._read()):
            first += more
        for magic, what in _FOREIGN:
            if first.startswith(magic):
                raise UsageError(f"{self.name}: is {what}")
        if first.startswith(_GZIP_MAGIC):
            blocks = self._gunzip(first)
        elif first.startswith((_ZSTD_MAGIC, *_ZSTD_SKIPPABLE)):
            blocks = self._unzstd(first)
        else:
            blocks = self._plain(first)
        return _without_bom(blocks)

    def _read(self) -> bytes:
        try:
            data = self._raw.read(BLOCK)
        except OSError as exc:
            raise UsageError(f"{self.name}: cannot be read: {exc.strerror or exc}") from None
        self._hash.update(data)
        self.bytes_read += len(data)
        return data

    def _plain(self, data: bytes) -> Iterator[bytes]:
        while data:
            yield data
            data = self._read()

    def _gunzip(self, data: bytes) -> Iterator[bytes]:
        inflate = zlib.decompressobj(wbits=31)
        while True:
            try:
                block = inflate.decompress(data, BLOCK)
            except zlib.error as exc:
                self.broken = f"the gzip data is damaged ({exc})"
                return
            if block:
                yield block
            if inflate.eof:
                # Members may follow one another; zeros after the last are padding (RFC 1952, and what gzip accepts).
                data = inflate.unused_data.lstrip(b"\0")
                while not data:
                    data = self._read()
                    if not data:
                        return
                    data = data.lstrip(b"\0")
                inflate = zlib.decompressobj(wbits=31)
            else:
                data = inflate.unconsumed_tail
                if not data and len(block) < BLOCK:
                    data = self._read()
                    if not data:
                        self.broken = "the gzip data ends in the middle (a download or copy that was cut off?)"
                        return

    def _unzstd(self, data: bytes) -> Iterator[bytes]:
        import zstandard

        frame = zstandard.ZstdDecompressor().decompressobj()
        fresh = True
        parts: list[bytes] = []
        size = 0
        while data:
            at = 0
            while at < len(data):
                piece = data[at : at + _ZSTD_PIECE]
                try:
                    part = frame.decompress(piece)
                except zstandard.ZstdError as exc:
                    yield from parts
                    self.broken = f"the zstd data is damaged or not supported ({exc})"
                    return
                fresh = False
                at += len(piece)
                if part:
                    parts.append(part)
                    size += len(part)
                if frame.eof:
                    at -= len(frame.unused_data)
                    frame = zstandard.ZstdDecompressor().decompressobj()
                    fresh = True
                if size >= BLOCK:
                    yield b"".join(parts)
                    parts.clear()
                    size = 0
            data = self._read()
        if parts:
            yield b"".join(parts)
        if not fresh:
            self.broken = "the zstd data ends in the middle (a download or copy that was cut off?)"


class _LocalFile(Source):
    """A file on this machine, which can tell whether it was changed under our hands."""

    def __init__(self, path: Path) -> None:
        raw = io.FileIO(path)
        _check_ends(raw, str(path))
        super().__init__(str(path), raw)
        self._path = path
        self._before = _identity(os.fstat(raw.fileno()))
        self._regular = stat.S_ISREG(os.fstat(raw.fileno()).st_mode)

    def verify(self) -> None:
        if not self._regular:
            return
        try:
            after = _identity(os.stat(self._path))
        except OSError:
            after = None
        if after != self._before or self.bytes_read != self._before[2]:
            raise InvalidInput(
                f"{self.name}: changed while it was read; submit it again once nothing writes to it any more"
            )


class _RemoteFile(Source):
    """A file behind an fsspec URL."""

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            fs, path = fsspec.url_to_fs(url)
            self._fs, self._path = fs, path
            self._before = self._identity()
            raw = fs.open(path, "rb")
        except (BatchmillError, KeyboardInterrupt):
            raise
        except (FileNotFoundError, IsADirectoryError, PermissionError) as exc:
            if (trouble := _behind(exc)) is not None:
                raise Unreachable(f"{url}: cannot be opened: {type(trouble).__name__}: {trouble}") from None
            raise UsageError(f"{url}: {_plain_reason(exc)}") from None
        except (ValueError, ImportError) as exc:
            # An unknown scheme, or one whose package is not installed.
            raise UsageError(f"{url}: cannot be opened: {exc}") from None
        except Exception as exc:
            raise Unreachable(f"{url}: cannot be opened: {type(exc).__name__}: {exc}") from None
        super().__init__(addresses.shown(url), raw)

    def verify(self) -> None:
        try:
            self._fs.invalidate_cache()
            after = self._identity()
        except Exception:
            after = None
        if after != self._before:
            raise InvalidInput(
                f"{self.name}: changed while it was read; submit it again once nothing writes to it any more"
            )

    def _read(self) -> bytes:
        try:
            return super()._read()
        except BatchmillError:
            raise
        except Exception as exc:
            # Each service's client has exceptions of its own (botocore, aiohttp, …), and no base is common to them.
            raise Unreachable(f"{self.name}: cannot be read: {type(exc).__name__}: {exc}") from None

    def _identity(self) -> tuple[Any, ...]:
        info = self._fs.info(self._path)
        if info.get("type") == "directory":
            raise IsADirectoryError(self._path)
        return tuple(str(info.get(key)) for key in ("size", "ETag", "LastModified", "mtime", "md5Hash", "created"))


def open_source(source: str) -> Source:
    """Open a path, `-` (standard input) or a URL; `UsageError` for what is not there or is no file."""
    if source == "-":
        # A copy of the descriptor: closing the source must not close the process's standard input.
        try:
            raw = io.FileIO(os.dup(0))
            _check_ends(raw, "standard input")
            return Source("standard input", raw)
        except OSError as exc:
            raise UsageError(f"standard input: {_plain_reason(exc)}") from None
    if "://" in source and not source.startswith("file://"):
        return _RemoteFile(source)
    path = expanded(source.removeprefix("file://"))
    try:
        return _LocalFile(path)
    except OSError as exc:
        raise UsageError(f"{path}: {_plain_reason(exc)}") from None


class _Stream(Source):
    """A stream that the caller opened, so closes."""

    def close(self) -> None:
        pass


def open_stream(stream: BinaryIO, name: str) -> Source:
    """A source out of a binary stream; `read(n)` is all that it needs."""
    return _Stream(name, stream)


def _without_bom(blocks: Iterator[bytes]) -> Iterator[bytes]:
    first = next(blocks, b"")
    while len(first) < 3 and (more := next(blocks, b"")):
        first += more
    first = first.removeprefix(b"\xef\xbb\xbf")
    if first:
        yield first
    yield from blocks


def _check_ends(raw: io.FileIO, name: str) -> None:
    """`UsageError` for a device, whose bytes may have no end; a terminal and the empty one have."""
    facts = os.fstat(raw.fileno())
    endless = stat.S_ISCHR(facts.st_mode) and facts.st_rdev != _NULL and not raw.isatty()
    if endless or stat.S_ISBLK(facts.st_mode):
        raw.close()
        raise UsageError(f"{name}: is a device; name a file")


def _identity(facts: os.stat_result) -> tuple[int, int, int, int]:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def _behind(exc: OSError) -> BaseException | None:
    """What fsspec took for a missing file although it is none: its HTTP file system says so of all that goes wrong."""
    cause = exc.__cause__
    if isinstance(cause, OSError) and not isinstance(cause, type(exc)):
        return cause
    return cause if getattr(cause, "status", 404) not in (404, 410) else None


def _plain_reason(exc: OSError) -> str:
    if isinstance(exc, FileNotFoundError):
        return "there is no such file"
    if isinstance(exc, IsADirectoryError):
        return "is a folder; name a file"
    return f"cannot be read: {exc.strerror or exc}"
