"""The determined answers of a finished batch, read from the store: what `workers cache warm` puts into the cache.

Each line says by its fingerprint which engine answered, so an answer goes to the key space that it came from, whatever
the fleet runs by now.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

from common.errors import UsageError
from common.ids import is_batch_id
from common.lines import Marks
from common.messages import Row
from common.pieces import Body, Pieces, whole
from common.plan import Window
from common.plan_reader import PlanReader
from common.store import Store
from workers.cache.key import Space

#: Rows read at a time.
_ROWS = 2048


class _Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What counts here of a batch's `batch.json`."""

    model: str
    planned: int
    windows: list[Window]
    tenant: str = "default"


class _Response(msgspec.Struct, frozen=True):
    status_code: int
    body: msgspec.Raw


class _Line(msgspec.Struct, frozen=True):
    custom_id: msgspec.Raw
    response: _Response
    batchmill: Marks


_decode_row = msgspec.msgpack.Decoder(Row).decode
_decode_line = msgspec.json.Decoder(_Line).decode


@dataclass
class Tally:
    """What became of the lines of a batch."""

    lines: int = 0
    #: Determined, and so of use to the cache.
    determined: int = 0
    #: Written by a release that put no fingerprint on them.
    unmarked: int = 0


class FinishedBatch:
    """`UsageError` when there is no such batch, or when it has not ended."""

    def __init__(self, store: Store, batch_id: str) -> None:
        if not is_batch_id(batch_id):
            raise UsageError(f"'{batch_id}' is not a batch id (batch_…); `producers list` shows them")
        self._store = store
        self._folder = f"batches/{batch_id}"
        self._id = batch_id
        self._where = f"{store.url}/{self._folder}/output.jsonl"
        try:
            self._batch = msgspec.json.decode(store.read(f"{self._folder}/batch.json"), type=_Batch)
        except FileNotFoundError:
            raise UsageError(f"no batch {batch_id} in {store.url}; `producers list` shows what is there") from None
        except msgspec.DecodeError:
            raise UsageError(f"{store.url}/{self._folder}/batch.json is damaged") from None
        self.model = self._batch.model
        self.tally = Tally()

    def answers(self, *, everything: bool) -> Iterator[tuple[bytes, bytes]]:
        """Keys and bodies of its answers; `everything`: those that were sampled too.

        Lines stand in input order and rows in planned order, which differ only inside a window, so one window of
        requests is held at a time.
        """
        spaces: dict[str, Space] = {}
        with self._open() as file:
            line = self._next(file)
            reader = PlanReader(self._store, self._folder, self._batch.planned)
            for window in self._batch.windows:
                rows = self._rows(reader, window) if line is not None else {}
                while line is not None and (row := rows.get(bytes(line.custom_id))) is not None:
                    self.tally.lines += 1
                    mark = line.batchmill.fingerprint
                    if not mark:
                        self.tally.unmarked += 1
                    elif line.response.status_code == 200:
                        space = spaces.get(mark)
                        if space is None:
                            space = spaces[mark] = Space(line.batchmill.model, mark, everything=everything, today=None)
                        url, body = row
                        key = space.key(self._batch.tenant, url, whole(body))
                        if key is not None:
                            self.tally.determined += 1
                            yield key, bytes(line.response.body)
                    line = self._next(file)
            if line is not None:
                raise UsageError(f"{self._where} is damaged: it has a line that the batch has no request for")

    def _open(self) -> BinaryIO:
        try:
            return self._store.open_read(f"{self._folder}/output.jsonl")
        except FileNotFoundError:
            raise UsageError(
                f"batch {self._id} has no outputs yet; `producers watch {self._id}` waits for them"
            ) from None

    def _next(self, file: BinaryIO) -> _Line | None:
        data = file.readline()
        if not data:
            return None
        try:
            return _decode_line(data)
        except msgspec.DecodeError:
            raise UsageError(f"{self._where} is damaged: line {self.tally.lines + 1} is no result") from None

    def _rows(self, reader: PlanReader, window: Window) -> dict[bytes, tuple[int, Body]]:
        found: dict[bytes, tuple[int, Body]] = {}
        pieces = Pieces()
        for start in range(window.pos_start, window.pos_end, _ROWS):
            for data in reader.rows(reader.plan(start, min(start + _ROWS, window.pos_end))):
                row = _decode_row(data)
                found[row.custom_id] = row.url, pieces.hold(row.body)[0]
        return found
