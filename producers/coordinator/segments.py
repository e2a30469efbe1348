"""A segment of the ledger: how records lie in a file, and how they are found again in one that is damaged.

A segment starts with a header that holds a random seed three times. A record is a frame of 17 bytes (marker, type,
length, CRC32) and its payload. The marker is the seed, so that no content of a payload can be taken for a record
when a damaged stretch is searched for where the next one starts; the CRC covers type and payload.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from common.codec import MAX_PAYLOAD
from common.logs import get
from producers.coordinator.records import Type

log = get(__name__)

_MAGIC = b"BMWAL1\0\n"
_SEED = 8
HEADER = len(_MAGIC) + 3 * _SEED
_FRAME = struct.Struct("<8sBII")
FRAME = _FRAME.size
_MAX = MAX_PAYLOAD + (1 << 20)
_READ = 4 << 20
_TYPES = frozenset(int(t) for t in Type)


class Name(NamedTuple):
    """`<epoch>-<n>`: segments sort by who wrote them and when."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch:08d}-{self.number:06d}"


class Record(NamedTuple):
    """A whole record and where its frame starts."""

    offset: int
    type: Type
    payload: bytes


class Damage(NamedTuple):
    """A stretch that holds no readable record. `torn`: it reaches to the end, as after a crash in mid-write."""

    offset: int
    length: int
    torn: bool


class Seal(msgspec.Struct, frozen=True):
    """How much of a segment counts, written by the leader that followed: what comes later there is ignored."""

    length: int
    by_epoch: int
    #: CRC32 of the two numbers; 0 in the seals of an earlier version.
    crc: int = 0


def seal_of(length: int, by_epoch: int) -> Seal:
    """A seal with its check sum."""
    return Seal(length, by_epoch, zlib.crc32(b"%d %d" % (length, by_epoch)))


def parse_name(text: str) -> Name | None:
    """The name out of a file's name; None for other files."""
    epoch, dash, number = text.partition("-")
    if not dash or not epoch.isdigit() or not number.isdigit():
        return None
    return Name(int(epoch), int(number))


def new_header() -> tuple[bytes, bytes]:
    """(header of a new segment, its seed)."""
    seed = os.urandom(_SEED)
    return _MAGIC + seed * 3, seed


def frame(seed: bytes, kind: Type, payload: bytes) -> bytes:
    """What goes before a payload."""
    return _FRAME.pack(seed, kind, len(payload), _crc(kind, payload))


def read_seed(header: bytes) -> bytes | None:
    """The seed of a segment, by majority of its three copies; None when it is no segment or too damaged."""
    copies = [header[8 + i * _SEED : 8 + (i + 1) * _SEED] for i in range(3)]
    for copy in copies:
        if len(copy) == _SEED and copies.count(copy) >= 2:
            return copy
    return None


def read_record(fd: int, seed: bytes, offset: int) -> Record | None:
    """The record whose frame starts at `offset`, or None when it is damaged."""
    head = os.pread(fd, FRAME, offset)
    if len(head) < FRAME:
        return None
    marker, kind, length, crc = _FRAME.unpack(head)
    if marker != seed or kind not in _TYPES or length > _MAX:
        return None
    payload = pread_all(fd, length, offset + FRAME)
    if len(payload) < length or _crc(kind, payload) != crc:
        return None
    return Record(offset, Type(kind), payload)


def scan(fd: int, length: int) -> Iterator[Record | Damage]:
    """All records of the first `length` bytes of a segment, and what is damaged between them."""
    seed = read_seed(os.pread(fd, HEADER, 0)) if length >= HEADER else None
    if seed is None:
        if length:
            yield Damage(0, length, torn=length < HEADER)
        return
    at = HEADER
    while at < length:
        record = read_record(fd, seed, at)
        if record is not None and at + FRAME + len(record.payload) <= length:
            yield record
            at += FRAME + len(record.payload)
            continue
        following = _next_record(fd, seed, at + 1, length)
        yield Damage(at, (following or length) - at, torn=following is None)
        at = following or length


def _next_record(fd: int, seed: bytes, start: int, length: int) -> int | None:
    """Where the next readable record starts."""
    at = start
    while at < length:
        block = os.pread(fd, min(_READ, length - at), at)
        found = block.find(seed)
        while found >= 0:
            record = read_record(fd, seed, at + found)
            if record is not None and at + found + FRAME + len(record.payload) <= length:
                return at + found
            found = block.find(seed, found + 1)
        if len(block) < _SEED:
            return None
        # A marker may lie across the border of two blocks.
        at += len(block) - _SEED + 1 if at + len(block) < length else len(block)
    return None


def valid_length(fd: int, length: int) -> int:
    """Where the last readable record of the first `length` bytes ends."""
    end = min(HEADER, length)
    for item in scan(fd, length):
        if isinstance(item, Record):
            end = item.offset + FRAME + len(item.payload)
    return end


def pread_all(fd: int, length: int, offset: int) -> bytes:
    """`length` bytes, or fewer at the end of the file."""
    data = os.pread(fd, length, offset)
    if len(data) == length or not data:
        return data
    parts = [data]
    got = len(data)
    while got < length:
        data = os.pread(fd, length - got, offset + got)
        if not data:
            break
        parts.append(data)
        got += len(data)
    return b"".join(parts)


def seal_path(segment: Path) -> Path:
    """Where the seal of a segment lies."""
    return segment.with_name(segment.name + ".seal")


def read_seal(segment: Path) -> Seal | None:
    """The seal of a segment, if it has one that can be read.

    Without it every whole record counts. That costs nothing but what an old leader may have written behind it, and
    results that come twice count once.
    """
    try:
        seal: Seal | None = msgspec.json.decode(seal_path(segment).read_bytes(), type=Seal)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        seal = None
    if seal is None or (seal.crc and seal != seal_of(seal.length, seal.by_epoch)):
        log.error("seal_damaged", segment=segment.name)
        return None
    return seal


def write_seal(segment: Path, seal: Seal, sync: Callable[[Path], None]) -> Seal:
    """Seal a segment unless it is sealed already; returns the seal that counts."""
    target = seal_path(segment)
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, msgspec.json.encode(seal))
        os.fsync(fd)
    finally:
        os.close(fd)
    try:
        os.link(temporary, target)
    except FileExistsError:
        existing = read_seal(segment)
        if existing is not None:
            return existing
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync(segment.parent)
    return seal


def _crc(kind: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(bytes((kind,))))
