"""The file that `workers cache export` writes: entries in checked blocks, with their number and a checksum at the end.

`BMCACHE1`, then blocks of `length (u32) | blake3 of the payload | payload`, a payload being the MessagePack list of
`[key, zstd frame]`; a block of length 0 ends them, followed by the number of entries (u64) and blake3 over all the
blocks' digests. Numbers are little-endian. What is exported is not signed: whoever imports it vouches for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO, Protocol

import msgspec
from blake3 import blake3

from common.errors import UsageError
from workers.cache.key import KEY_BYTES
from workers.cache.value import MAX_BODY

MAGIC = b"BMCACHE1"

#: Bytes of a block's payload, about; a reader refuses one that says it has more than these and one large answer.
_BLOCK = 1 << 20
_LONGEST = _BLOCK + 2 * MAX_BODY
_DIGEST = 32

Entry = tuple[bytes, bytes]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Entry]).decode


class Sink(Protocol):
    """What an archive is written to."""

    def write(self, data: bytes, /) -> object:
        """Take all of it."""
        ...


class Writer:
    """Writes an archive; without `close` it is none."""

    def __init__(self, file: Sink) -> None:
        self._file = file
        self._hash = blake3()
        self._held: list[Entry] = []
        self._size = 0
        #: Entries and bytes so far.
        self.count = self.bytes = 0
        self._write(MAGIC)

    def add(self, key: bytes, frame: bytes) -> None:
        """One entry more."""
        self._held.append((key, frame))
        self._size += len(frame)
        self.count += 1
        if self._size >= _BLOCK:
            self._flush()

    def close(self) -> None:
        """Write the end. The file stays open."""
        if self._held:
            self._flush()
        self._write(bytes(4) + self.count.to_bytes(8, "little") + self._hash.digest())

    def _flush(self) -> None:
        payload = _encode(self._held)
        digest = blake3(payload).digest()
        self._hash.update(digest)
        self._write(len(payload).to_bytes(4, "little") + digest + payload)
        self._held.clear()
        self._size = 0

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.bytes += len(data)


def read(file: BinaryIO, name: str) -> Iterator[Sequence[Entry]]:
    """The entries of an archive, block by block, each checked; `UsageError` where it is not whole."""

    def exactly(size: int) -> bytes:
        data = file.read(size)
        if len(data) != size:
            raise UsageError(f"{name}: ends in the middle (a copy that was cut off?)")
        return data

    if file.read(len(MAGIC)) != MAGIC:
        raise UsageError(f"{name}: is no file of `workers cache export`")
    total = blake3()
    count = block = 0
    while length := int.from_bytes(exactly(4), "little"):
        block += 1
        digest = exactly(_DIGEST)
        payload = exactly(length) if length <= _LONGEST else b""
        if blake3(payload).digest() != digest:
            raise UsageError(f"{name}: is damaged: block {block} is not what was written")
        try:
            entries = _decode(payload)
        except msgspec.DecodeError:
            raise UsageError(f"{name}: is damaged: block {block} does not decode") from None
        if not all(len(key) == KEY_BYTES for key, _ in entries):
            raise UsageError(f"{name}: has keys of another kind; it was written by another version")
        total.update(digest)
        count += len(entries)
        yield entries
    if int.from_bytes(exactly(8), "little") != count or exactly(_DIGEST) != total.digest() or file.read(1):
        raise UsageError(f"{name}: is damaged: its end is not what was written")
