"""The write-ahead log of a shard: all batches' results, dispatches, losses and decisions, in the order they count.

Appending copies into the page cache (what a killed process leaves behind is kept); `sync` makes it durable, on a
thread of its own, for all that was appended meanwhile; only then is a result acknowledged. Segments roll at a size
and are deleted once no open batch has a record in them. A leader never appends to a segment of an earlier one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from common.errors import Unreachable
from common.logs import get
from common.store import sync_folder
from producers.coordinator import manifest, segments
from producers.coordinator.records import Type
from producers.coordinator.segments import Damage, Name, Record

log = get(__name__)

#: Bytes at which a segment rolls.
SEGMENT_BYTES = 64 << 20
#: Bytes left free on the ledger's disk: enough for the status files that say that it is full.
RESERVE_BYTES = 32 << 20
#: A place is a segment's ordinal shifted by this, and the offset in the segment.
OFFSET_BITS = 40
_OFFSET_MASK = (1 << OFFSET_BITS) - 1
_LEFT_OVER = (".tmp-", ".assembly-")
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskFull(Exception):
    """The ledger's disk has no room; nothing was appended."""


class LedgerFailed(Exception):
    """The ledger's disk does not work; only what is durable can be relied on."""


@dataclass(slots=True)
class _Segment:
    path: Path
    #: Bytes that count.
    length: int
    batches: set[str] = field(default_factory=set)


def free_bytes(folder: Path) -> int:
    """Bytes an ordinary process can still write."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


class Ledger:
    """The log of one shard, written by the leader of `epoch`. Thread-safe.

    A record's *place* is one number that `Reader.read` takes: the segment's ordinal and the offset in it.
    """

    def __init__(
        self,
        folder: Path,
        epoch: int,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        reserve_bytes: int = RESERVE_BYTES,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self.folder = folder
        self._epoch = epoch
        self._segment_bytes = segment_bytes
        self._reserve = reserve_bytes
        self._free = free
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._ordinal = -1
        self._number = 0
        self._fd = -1
        self._seed = b""
        #: Descriptors with bytes that are not durable yet.
        self._dirty: set[int] = set()
        #: Descriptors of segments that are full, to be closed once they are durable.
        self._retired: list[int] = []
        self._written = 0
        #: Bytes that may be appended before the disk is looked at again.
        self._unchecked = 0
        self._changed = threading.Condition(self._lock)
        self._closed = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise Unreachable(f"ledger folder {folder}: cannot be opened: {exc.strerror}") from None

    # -- at the start of a life ------------------------------------------------------------------------------------

    def recover(self) -> Iterator[tuple[int, Record] | Damage]:
        """Seal what earlier leaders wrote, then yield it: (place, record) in order, and damaged stretches.

        Whoever iterates calls `hold` for each batch that still needs a record; `seal_past` ends it.
        """
        there = os.listdir(self.folder)
        for name in there:
            # What a killed leader was about to seal with, or had spilled from memory.
            if name.startswith(_LEFT_OVER):
                (self.folder / name).unlink(missing_ok=True)
        counted = manifest.latest(self.folder, self._epoch)
        for segment in sorted(filter(None, map(segments.parse_name, there))):
            if segment.epoch >= self._epoch:
                # Another leader's, later than ours: it will be noticed as such by the epoch check.
                continue
            if counted is not None and not counted.counts(segment):
                log.warning("segment_too_late", segment=str(segment), sealed_by=counted.epoch)
                (self.folder / str(segment)).unlink(missing_ok=True)
                segments.seal_path(self.folder / str(segment)).unlink(missing_ok=True)
                continue
            yield from self._recover_segment(segment)

    def _recover_segment(self, name: Name) -> Iterator[tuple[int, Record] | Damage]:
        path = self.folder / str(name)
        fd = os.open(path, os.O_RDONLY)
        try:
            seal = segments.read_seal(path)
            size = os.fstat(fd).st_size
            length = min(size, seal.length) if seal else size
            self._ordinal += 1
            place = self._ordinal << OFFSET_BITS
            segment = self._segments[self._ordinal] = _Segment(path, length)
            end = min(length, segments.HEADER)
            for item in segments.scan(fd, length):
                if isinstance(item, Record):
                    yield place | item.offset, item
                    end = item.offset + segments.FRAME + len(item.payload)
                else:
                    say = log.info if item.torn else log.error
                    say("ledger_damage", segment=path.name, offset=item.offset, bytes=item.length, torn=item.torn)
                    yield item
            if seal is None:
                # Its writer may have been killed before it synced; from here on others go by what was read.
                _make_durable(fd, self.folder)
                # What the scan made of it is what counts from now on, whatever its old writer still appends.
                seal = segments.write_seal(path, segments.seal_of(end, self._epoch), sync_folder)
            segment.length = seal.length
        finally:
            os.close(fd)

    def hold(self, place: int, batch: str) -> None:
        """Keep the segment of a record until `batch` is released."""
        self._segments[place >> OFFSET_BITS].batches.add(batch)

    def seal_past(self) -> None:
        """End `recover`: no other segment of an earlier leader counts; those that no open batch needs are deleted."""
        with self._lock:
            manifest.write(self.folder, self._epoch, [segment.path.name for segment in self._segments.values()])
            self._drop()

    # -- writing ---------------------------------------------------------------------------------------------------

    def append(self, kind: Type, payload: bytes, batches: Iterable[str] = ()) -> int:
        """Append a record that these batches need; returns its place. `DiskFull` when there is no room.

        It survives the death of this process at once, and of this machine once `sync` covered it.
        """
        with self._lock:
            if self._closed:
                raise LedgerFailed(f"{self.folder}: the ledger is closed")
            self._check_space(len(payload))
            if self._fd < 0 or self._segments[self._ordinal].length + len(payload) > self._segment_bytes:
                self._roll()
            segment = self._segments[self._ordinal]
            start = segment.length
            head = segments.frame(self._seed, kind, payload)
            self._write_whole(start, head, payload)
            segment.length = start + len(head) + len(payload)
            segment.batches.update(batches)
            self._written += len(head) + len(payload)
            self._dirty.add(self._fd)
            self._changed.notify_all()
            return self._ordinal << OFFSET_BITS | start

    @property
    def written(self) -> int:
        """Bytes appended in this life; compare with what `sync` returns."""
        return self._written

    def sync(self) -> int:
        """Make all that was appended durable; returns how much that was (`written`).

        `LedgerFailed` is fatal: after a failed fsync nobody knows what the disk has.
        """
        with self._syncing:
            return self._sync()

    def _sync(self) -> int:
        with self._lock:
            # What is appended from here on marks its file as dirty again.
            dirty, self._dirty = self._dirty, set()
            retired, self._retired = self._retired, []
            written = self._written
        for fd in dirty:
            _make_durable(fd, self.folder)
        for fd in retired:
            os.close(fd)
        return written

    def wait_for_more(self, after: int, timeout: float) -> bool:
        """Wait until more than `after` bytes were appended; False when the time is up or the ledger closed."""
        with self._lock:
            return self._changed.wait_for(lambda: self._written > after or self._closed, timeout) and not self._closed

    def release(self, batches: Iterable[str]) -> None:
        """These batches need their records no more; segments that are needed by none are deleted."""
        gone = set(batches)
        with self._lock:
            for segment in self._segments.values():
                segment.batches -= gone
            self._drop()

    def has_space(self) -> bool:
        """True when there is room beyond the reserve."""
        return self._free(self.folder) > self._reserve

    def path_of(self, ordinal: int) -> Path:
        """The file of a segment."""
        with self._lock:
            return self._segments[ordinal].path

    def complete(self) -> None:
        """Append nothing more to the current segment: the next record begins another one."""
        with self._lock:
            if self._fd >= 0:
                self._retired.append(self._fd)
                self._fd = -1
                self._drop()
        self.sync()

    def completed(self) -> dict[str, int]:
        """Name and length of the segments that are kept, but for the one that is appended to."""
        with self._lock:
            current = self._ordinal if self._fd >= 0 else -1
            return {s.path.name: s.length for o, s in self._segments.items() if o != current}

    @property
    def segment_count(self) -> int:
        """Segments that are kept."""
        return len(self._segments)

    def close(self) -> None:
        """Make everything durable and close; the segments stay."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self.sync()
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _check_space(self, size: int) -> None:
        # A look at the disk every few MB: the reserve is larger than what goes unseen.
        if self._unchecked < size:
            if not self.has_space():
                self._unchecked = 0
                raise DiskFull(f"{self.folder}: fewer than {self._reserve >> 20} MiB are free")
            self._unchecked = max(size, self._reserve // 8)
        self._unchecked -= size

    def _roll(self) -> None:
        path = self.folder / str(Name(self._epoch, self._number))
        header, seed = segments.new_header()
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as exc:
            raise _full_or(exc) from None
        try:
            if os.pwrite(fd, header, 0) != len(header):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync_folder(self.folder)
        except OSError as exc:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise _full_or(exc) from None
        if self._fd >= 0:
            self._retired.append(self._fd)
        self._number += 1
        self._ordinal += 1
        self._segments[self._ordinal] = _Segment(path, len(header))
        self._fd, self._seed = fd, seed
        self._dirty.add(fd)
        self._drop()

    def _write_whole(self, start: int, head: bytes, payload: bytes) -> None:
        try:
            written = os.pwritev(self._fd, (head, payload), start)
            whole = head + payload if written < len(head) + len(payload) else b""
            while written < len(head) + len(payload):
                more = os.pwrite(self._fd, whole[written:], start + written)
                if not more:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += more
        except OSError as exc:
            # The next record must start here; what the failed one left would look like damage.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, start)
            raise _full_or(exc) from None

    def _drop(self) -> None:
        current = self._ordinal if self._fd >= 0 else -1
        for ordinal in [o for o, s in self._segments.items() if not s.batches and o != current]:
            segment = self._segments.pop(ordinal)
            segment.path.unlink(missing_ok=True)
            segments.seal_path(segment.path).unlink(missing_ok=True)


class Paths(Protocol):
    """Where the segments lie; a `Ledger`, or whoever only reads one."""

    def path_of(self, ordinal: int) -> Path:
        """The file of a segment."""
        ...


class Reader:
    """Reads records by place; one thread at a time.

    `owner`: nobody else deletes segments, so that one that is gone is damage, and not an end that came meanwhile.
    """

    def __init__(self, ledger: Paths, keep_open: int = 16, *, owner: bool = False) -> None:
        self._ledger = ledger
        self._keep = keep_open
        self._owner = owner
        self._open: dict[int, tuple[int, bytes]] = {}

    def read(self, place: int) -> Record | None:
        """The record; None when it is damaged. Of a segment that is gone `FileNotFoundError`, for its owner None."""
        try:
            fd, seed = self._segment(place >> OFFSET_BITS)
        except FileNotFoundError:
            if not self._owner:
                raise
            return None
        return segments.read_record(fd, seed, place & _OFFSET_MASK)

    def pread(self, place: int, length: int) -> bytes:
        """Bytes of a segment from a place on."""
        fd, _ = self._segment(place >> OFFSET_BITS)
        return segments.pread_all(fd, length, place & _OFFSET_MASK)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1][0])

    def _segment(self, ordinal: int) -> tuple[int, bytes]:
        found = self._open.get(ordinal)
        if found is None:
            if len(self._open) >= self._keep:
                os.close(self._open.pop(next(iter(self._open)))[0])
            fd = os.open(self._ledger.path_of(ordinal), os.O_RDONLY)
            seed = segments.read_seed(os.pread(fd, segments.HEADER, 0))
            found = self._open[ordinal] = (fd, seed if seed is not None else b"")
        return found


def _make_durable(fd: int, folder: Path) -> None:
    try:
        os.fdatasync(fd)
    except OSError as exc:
        raise LedgerFailed(f"{folder}: {exc.strerror}") from None


def _full_or(exc: OSError) -> Exception:
    text = f"{exc.filename or 'ledger'}: {exc.strerror}"
    return DiskFull(text) if exc.errno in _NO_SPACE else LedgerFailed(text)
