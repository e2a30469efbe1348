"""Result records out of the ledger, each read and decoded once for all the batches that share it."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from producers.coordinator.ledger import Reader
from producers.coordinator.records import Type
from producers.coordinator.segments import Record

#: Bytes of records that are kept when batches are ended together.
KEPT_BYTES = 16 << 20


class Part(msgspec.Struct, array_like=True):
    """What a record says of one batch; see `common.messages.Part`."""

    batch: str
    pos: bytes
    kind: bytes
    length: bytes
    #: A view into the record, so that its place is known and nothing is copied.
    lines: memoryview
    usage: msgspec.Raw


class _Results(msgspec.Struct):
    parts: list[Part]


_decode = msgspec.msgpack.Decoder(_Results).decode


class ResultRecords:
    """Reads by place; keeps the last `kept_bytes` of records. One thread at a time."""

    def __init__(self, reader: Reader, kept_bytes: int = 0) -> None:
        self.reader = reader
        self._kept_bytes = kept_bytes
        self._held = 0
        self._kept: OrderedDict[int, tuple[Record, dict[str, list[Part]]]] = OrderedDict()

    def get(self, place: int, batch: str) -> tuple[Record, list[Part]] | None:
        """The record, and its parts of one batch (none when it holds no results); None when it is damaged."""
        found = self._kept.get(place)
        if found is None:
            record = self.reader.read(place)
            if record is None:
                return None
            found = record, self._parts(record)
            self._keep(place, *found)
        return found[0], found[1].get(batch, [])

    def _parts(self, record: Record) -> dict[str, list[Part]]:
        parts: dict[str, list[Part]] = {}
        if record.type is Type.RESULTS:
            for part in _decode(record.payload).parts:
                parts.setdefault(part.batch, []).append(part)
        return parts

    def _keep(self, place: int, record: Record, parts: dict[str, list[Part]]) -> None:
        if len(record.payload) > self._kept_bytes:
            return
        self._kept[place] = record, parts
        self._held += len(record.payload)
        while self._held > self._kept_bytes:
            self._held -= len(self._kept.popitem(last=False)[1][0].payload)
