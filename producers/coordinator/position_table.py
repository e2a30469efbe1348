"""Where each row's final line lies in the ledger: one fixed-width entry a position, in pages of the plan's windows.

A few pages are in memory; the others wait in a temporary file. Rows are answered more or less in planned order, so a
page is seldom needed twice, and memory does not grow with the file.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.messages import Kind
from common.plan import Window
from producers.coordinator.row_states import Positions

ENTRY = np.dtype([("place", "<u8"), ("length", "<u4"), ("rank", "<u4")])

#: What a row has, weakest first. A stronger one replaces a weaker; of equals the first stays, of `RETRY` the last.
#: An `ERROR` of length 0 has no line in the ledger: `place` is then the number of the decision that it is made from.
NOTHING, RETRY, ERROR, OUTPUT = range(4)

_RANK = np.zeros(256, dtype=np.uint32)
_RANK[Kind.OUTPUT], _RANK[Kind.ERROR], _RANK[Kind.RETRY] = OUTPUT, ERROR, RETRY


class PositionTable:
    """Entries of the positions that `windows` cover, which follow one another from 0."""

    def __init__(self, windows: Sequence[Window], spill: Path, keep: int = 3) -> None:
        self._starts = np.array([w.pos_start for w in windows], dtype=np.int64)
        self._windows = windows
        self._spill = spill
        self._keep = keep
        self._fd = -1
        self._pages: OrderedDict[int, npt.NDArray[np.void]] = OrderedDict()
        self._spilled: set[int] = set()

    def put(
        self,
        positions: Positions,
        kinds: npt.NDArray[np.uint8],
        places: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint32],
    ) -> None:
        """Fold in results in the order of the ledger; `places` is where each line starts."""
        self._put(positions, _RANK[kinds], places, lengths)

    def give_up(self, positions: Positions, number: int, *, keep_line: bool) -> None:
        """Rows whose attempts are used up, by decision `number`; `keep_line`: the last attempt's line is final."""
        for page, where in self._by_page(positions):
            table = self._page(page)
            local = positions[where] - int(self._starts[page])
            rank = table["rank"][local]
            made = rank == NOTHING if keep_line else rank <= RETRY
            table["rank"][local[rank <= RETRY]] = ERROR
            table["place"][local[made]] = number
            table["length"][local[made]] = 0

    def window(self, number: int) -> npt.NDArray[np.void]:
        """The entries of one window, by position."""
        return self._page(number)

    def close(self) -> None:
        """Remove the temporary file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._spill.unlink(missing_ok=True)

    def _put(
        self,
        positions: Positions,
        ranks: npt.NDArray[np.uint32],
        places: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint32],
    ) -> None:
        ascending = bool((positions[1:] > positions[:-1]).all())
        if not ascending and len(np.unique(positions)) != len(positions):
            for i in range(len(positions)):
                one = slice(i, i + 1)
                self._put(positions[one], ranks[one], places[one], lengths[one])
            return
        for page, where in self._by_page(positions):
            table = self._page(page)
            local = positions[where] - int(self._starts[page])
            new, old = ranks[where], table["rank"][local]
            better = (new > old) | ((new == RETRY) & (old == RETRY))
            mine = local[better]
            table["place"][mine] = places[where][better]
            table["length"][mine] = lengths[where][better]
            table["rank"][mine] = new[better]

    def _by_page(self, positions: Positions) -> list[tuple[int, slice | npt.NDArray[np.bool_]]]:
        if not len(positions):
            return []
        low, high = (
            int(x) for x in np.searchsorted(self._starts, (positions.min(), positions.max()), side="right") - 1
        )
        if low == high:
            return [(low, slice(None))]
        pages = np.searchsorted(self._starts, positions, side="right") - 1
        return [(int(page), pages == page) for page in np.unique(pages)]

    def _page(self, number: int) -> npt.NDArray[np.void]:
        table = self._pages.get(number)
        if table is not None:
            self._pages.move_to_end(number)
            return table
        while len(self._pages) >= self._keep:
            self._save(*self._pages.popitem(last=False))
        window = self._windows[number]
        size = window.pos_end - window.pos_start
        if number in self._spilled:
            raw = bytearray(size * ENTRY.itemsize)
            if os.preadv(self._fd, [raw], window.pos_start * ENTRY.itemsize) != len(raw):
                raise OSError(f"{self._spill}: shorter than what was written to it")
            table = np.frombuffer(raw, dtype=ENTRY)
        else:
            table = np.zeros(size, dtype=ENTRY)
        self._pages[number] = table
        return table

    def _save(self, number: int, table: npt.NDArray[np.void]) -> None:
        if self._fd < 0:
            self._spill.unlink(missing_ok=True)
            self._fd = os.open(self._spill, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        data = table.tobytes()
        at = self._windows[number].pos_start * ENTRY.itemsize
        written = 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], at + written)
        self._spilled.add(number)
