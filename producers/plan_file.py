"""The files that intake leaves and the coordinator works from: `rows` and `plan`.

Writers take a window at a time, so nobody ever holds more than the window at hand. The layout is described in
`producers.batch`; the coordinator's reader is `producers.coordinator.batch_files`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from common.messages import Row
from common.pieces import Body, length, whole
from common.plan import PLAN_RECORD, Window
from producers.planner import Key, Planner

if TYPE_CHECKING:
    from common.plan_reader import Records

#: Rows encoded and written at a time, at most, and bytes of their bodies (one larger row goes alone): few system calls,
#: and only a fraction of a window in memory twice.
_WRITE_ROWS = 2048
_WRITE_BYTES = 1 << 20

_encode_row = msgspec.msgpack.Encoder().encode

#: A valid request on its way into a window's plan: index, line (from 1), custom id (a JSON string literal), url code,
#: body, key (`planner.hold_key`), cost in tokens, how much of that is the answer. A bare tuple, as one is made for
#: every request.
WindowRow = tuple[int, int, bytes, int, Body, Key, int, int]


class PlanWriter:
    """Writes `rows` and `plan`, window after window, into files opened by the caller."""

    def __init__(self, rows: BinaryIO, plan: BinaryIO) -> None:
        self._rows = rows
        self._plan = plan
        self._planner = Planner()
        self._offset = 0
        #: Rows written so far, which is the position of the next.
        self.planned = 0
        #: Sum of their costs.
        self.cost = 0
        self.windows: list[Window] = []

    def add(self, rows: Sequence[WindowRow], index_start: int, index_end: int) -> None:
        """Plan a window and write it; all its rows have indexes in `[index_start, index_end)`."""
        first = self.planned
        if rows:
            indexes, _, custom_ids, urls, bodies, keys, costs, outputs = zip(*rows, strict=True)
            planned, shared = self._planner.order(keys, bodies, costs, outputs)
            for at, end in _parts([length(bodies[k]) for k in planned]):
                part = planned[at:end]
                self._write(
                    [
                        _encode_row(Row(pos, indexes[k], custom_ids[k], urls[k], whole(bodies[k])))
                        for pos, k in enumerate(part, first + at)
                    ],
                    [indexes[k] for k in part],
                    [costs[k] for k in part],
                    shared[at:end],
                )
        self._close_window(first, index_start, index_end)

    def copy(self, rows: Iterable[Row], records: Records, kept: Sequence[int], start: int, end: int) -> None:
        """Write those `kept` of a window that has its order already (its plan: `records`), with new positions.

        `rows`: those that are kept; all have indexes in `[start, end)`.
        """
        first = self.planned
        rows = iter(rows)
        costs = records["cost"][kept].tolist()
        given = records["shared"].tolist()
        # What two rows have in common, all between them have.
        shared = [min(given[start : n + 1]) for start, n in zip([0, *(n + 1 for n in kept[:-1])], kept, strict=False)]
        for at, stop in _parts(records["length"][kept].tolist()):
            part = list(islice(rows, stop - at))
            self._write(
                [_encode_row(Row(pos, r.index, r.custom_id, r.url, r.body)) for pos, r in enumerate(part, first + at)],
                [r.index for r in part],
                costs[at:stop],
                shared[at:stop],
            )
        self._close_window(first, start, end)

    def _write(self, encoded: list[bytes], indexes: list[int], costs: list[int], shared: list[int]) -> None:
        lengths = list(map(len, encoded))
        *offsets, end = accumulate(lengths, initial=self._offset)
        self._rows.write(b"".join(encoded))
        self._plan.write(b"".join(map(PLAN_RECORD.pack, offsets, lengths, indexes, costs, shared)))
        self._offset = end
        self.planned += len(encoded)
        self.cost += sum(costs)

    def _close_window(self, first: int, index_start: int, index_end: int) -> None:
        if index_end > index_start:
            self.windows.append(Window(first, self.planned, index_start, index_end))


def _parts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of rows whose bodies have these sizes, each as much as is written at a time."""
    start = size = 0
    for at, more in enumerate(sizes):
        if at > start and (at - start == _WRITE_ROWS or size + more > _WRITE_BYTES):
            yield start, at
            start, size = at, 0
        size += more
    if sizes:
        yield start, len(sizes)
