"""What is known of each row of one batch, in memory that the dispatch window bounds, not the file.

Two bitsets by position, in pages: a page that was not reached yet takes nothing, a page that is done takes one
pointer, and only the pages in between hold bits. A row is settled by a final outcome; `failed` says that the outcome
is an error, which a later success still replaces until the batch is finalised.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.messages import Kind

Positions = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]

#: Positions of a page.
PAGE = 1 << 16
_SHIFT = 16
_WITHIN = np.uint32(PAGE - 1)


class PagedBits:
    """A set of positions out of `[0, size)`."""

    def __init__(self, size: int) -> None:
        self.size = size
        #: How many positions are in the set.
        self.count = 0
        # A missing page is all zero, None is all one.
        self._pages: dict[int, npt.NDArray[np.uint8] | None] = {}
        self._counts: dict[int, int] = {}

    def get(self, positions: Positions) -> Mask:
        """Which of these positions (any order) are in the set."""
        found = np.zeros(len(positions), dtype=np.bool_)
        for page, where in _by_page(positions):
            if page not in self._pages:
                continue
            bits = self._pages[page]
            if bits is None:
                found[where] = True
                continue
            local = positions[where] & _WITHIN
            first, view = _window(bits, local)
            found[where] = np.unpackbits(view, bitorder="little")[local - (first << 3)]
        return found

    def add(self, positions: Positions) -> None:
        """Put positions into the set."""
        for page, where in _by_page(positions):
            if page in self._pages and self._pages[page] is None:
                continue
            self._write(page, positions[where] & _WITHIN, 1)

    def discard(self, positions: Positions) -> None:
        """Take positions out of the set."""
        for page, where in _by_page(positions):
            if page in self._pages:
                self._write(page, positions[where] & _WITHIN, 0)

    def span(self, start: int, end: int) -> Mask:
        """One flag for every position of `[start, end)`."""
        flags = np.zeros(end - start, dtype=np.bool_)
        for page in range(start >> _SHIFT, ((end - 1) >> _SHIFT) + 1 if end > start else 0):
            if page not in self._pages:
                continue
            base = page << _SHIFT
            low, high = max(start, base), min(end, base + PAGE)
            bits = self._pages[page]
            if bits is None:
                flags[low - start : high - start] = True
                continue
            first = (low - base) >> 3
            view = np.unpackbits(bits[first : ((high - base - 1) >> 3) + 1], bitorder="little")
            skip = (low - base) - (first << 3)
            flags[low - start : high - start] = view[skip : skip + high - low]
        return flags

    def full_until(self, start: int) -> int:
        """The first position from `start` on that is not in the set (`size` when there is none)."""
        at = start
        while at < self.size:
            page = at >> _SHIFT
            end = min(self.size, (page + 1) << _SHIFT)
            if page not in self._pages:
                return at
            if self._pages[page] is not None:
                missing = np.flatnonzero(~self.span(at, end))
                if len(missing):
                    return at + int(missing[0])
            at = end
        return self.size

    @property
    def pages_held(self) -> int:
        """Pages that take memory."""
        return sum(1 for bits in self._pages.values() if bits is not None)

    def _write(self, page: int, local: npt.NDArray[np.uint32], value: int) -> None:
        size = min(PAGE, self.size - (page << _SHIFT))
        bits = self._pages.get(page)
        if bits is None:
            filler = 255 if page in self._pages else 0
            bits = self._pages[page] = np.full((size + 7) >> 3, filler, dtype=np.uint8)
        first, view = _window(bits, local)
        flags = np.unpackbits(view, bitorder="little")
        before = int(np.count_nonzero(flags))
        flags[local - (first << 3)] = value
        change = int(np.count_nonzero(flags)) - before
        view[:] = np.packbits(flags, bitorder="little")
        held = self._counts.get(page, 0) + change
        self._counts[page] = held
        self.count += change
        if held == size:
            self._pages[page] = None
        elif held == 0:
            del self._pages[page], self._counts[page]


def _window(bits: npt.NDArray[np.uint8], local: npt.NDArray[np.uint32]) -> tuple[int, npt.NDArray[np.uint8]]:
    # Only the bytes between the lowest and the highest position are unpacked: a chunk's rows lie close together.
    first = int(local.min()) >> 3
    return first, bits[first : (int(local.max()) >> 3) + 1]


def _by_page(positions: Positions) -> list[tuple[int, slice | Mask]]:
    if not len(positions):
        return []
    low, high = int(positions.min()) >> _SHIFT, int(positions.max()) >> _SHIFT
    if low == high:
        return [(low, slice(None))]
    pages = positions >> _SHIFT
    return [(int(page), pages == page) for page in np.unique(pages)]


class Merge(NamedTuple):
    """What a part of results did, as one flag a result, in the part's order. The rest are duplicates."""

    #: Settled a row that was open.
    fresh: Mask
    #: A success that took the place of an error.
    replaced: Mask
    #: An attempt failed, and the row is open.
    retry: Mask

    @property
    def accepted(self) -> Mask:
        """Results that now stand."""
        return self.fresh | self.replaced


class RowStates:
    """Which rows of a batch of `planned` rows are settled, and which of those are errors."""

    def __init__(self, planned: int) -> None:
        self.planned = planned
        self.settled = PagedBits(planned)
        self.failed = PagedBits(planned)

    def merge(self, positions: Positions, kinds: npt.NDArray[np.uint8]) -> Merge:
        """Fold in results; the first success of a row wins, then its first error.

        `ValueError` when a position is outside the batch (nothing is changed then).
        """
        if len(positions) and int(positions.max()) >= self.planned:
            raise ValueError(f"position {int(positions.max())} of a batch of {self.planned} rows")
        if len(positions) > 1 and not bool((positions[1:] > positions[:-1]).all()):
            occurrence = _occurrences(positions)
            if occurrence.any():
                return self._merge_repeated(positions, kinds, occurrence)
        return self._merge_unique(positions, kinds)

    def settle_failed(self, positions: Positions) -> Positions:
        """Make open rows errors; returns those that were open."""
        opened = positions[~self.settled.get(positions)]
        self.settled.add(opened)
        self.failed.add(opened)
        return opened

    def reopen(self, positions: Positions) -> None:
        """Forget outcomes: their records turned out to be damaged."""
        self.settled.discard(positions)
        self.failed.discard(positions)

    def open_rows(self, positions: Positions) -> Positions:
        """Those of the positions that are not settled."""
        return positions[~self.settled.get(positions)]

    def _merge_unique(self, positions: Positions, kinds: npt.NDArray[np.uint8]) -> Merge:
        settled = self.settled.get(positions)
        success = kinds == Kind.OUTPUT
        final = success | (kinds == Kind.ERROR)
        fresh = final & ~settled
        retry = (kinds == Kind.RETRY) & ~settled
        replaced = np.zeros(len(positions), dtype=np.bool_)
        if settled.any():
            replaced = settled & success & self.failed.get(positions)
            self.failed.discard(positions[replaced])
        self.settled.add(positions[fresh])
        self.failed.add(positions[fresh & ~success])
        return Merge(fresh, replaced, retry)

    def _merge_repeated(
        self, positions: Positions, kinds: npt.NDArray[np.uint8], occurrence: npt.NDArray[np.int64]
    ) -> Merge:
        # One row several times in one part: in the part's order, one occurrence after the other.
        merged = Merge(*(np.zeros(len(positions), dtype=np.bool_) for _ in range(3)))
        for number in range(int(occurrence.max()) + 1):
            where = np.flatnonzero(occurrence == number)
            part = self._merge_unique(positions[where], kinds[where])
            for whole, piece in zip(merged, part, strict=True):
                whole[where] = piece
        return merged


def _occurrences(positions: Positions) -> npt.NDArray[np.int64]:
    """For each element, how many equal ones stand before it."""
    order = np.argsort(positions, kind="stable")
    ranked = positions[order]
    starts = np.concatenate(([True], ranked[1:] != ranked[:-1]))
    first = np.maximum.accumulate(np.where(starts, np.arange(len(ranked)), 0))
    counts = np.empty(len(positions), dtype=np.int64)
    counts[order] = np.arange(len(ranked)) - first
    return counts
