"""Second copies of what a slow worker still has at the end of the work. Pure: the book in, a chunk out.

When nothing is left to send, one slow worker keeps a whole fleet waiting. So what is still missing of a chunk that runs
far longer than chunks do goes a second time, to workers that have nothing to do, each by its own queue (as the backup
tasks of Dean and Ghemawat's MapReduce, OSDI 2004, section 3.6). The first answer wins. It costs nothing but work of
workers that would stand idle: a copy never goes to one that something else could be sent to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from producers.coordinator.book import Book
from producers.coordinator.lanes import Lane, Outstanding, Share
from producers.coordinator.packing import Draft, Pick
from producers.coordinator.row_states import Positions

#: Seconds that a chunk runs at least before it is copied: who holds it is looked at once a second.
LEAST_S = 2.0


def find(
    book: Book, lane: Lane, nodes: Sequence[str], factor: float, floor: int, now: float, wall: float
) -> Draft | None:
    """The next copy to send; None when there is none. To be asked while nothing else is left to send.

    `nodes`: the workers that take chunks. A chunk straggles when it runs more than `factor` times as long as the median
    row's chunk did. `floor`: rows that are not worth dividing further among idle workers. `now` is in monotonic, `wall`
    in Unix seconds.
    """
    median = lane.times.median
    if factor <= 0 or median is None:
        return None
    mine = [c for c in book.out.values() if c.model == lane.model]
    if any(c.leased_at is None and not c.target for c in mine):
        return None  # Whoever is idle takes that.
    busy = {c.node for c in mine} | {c.target for c in mine}
    idle = [n for n in nodes if n not in busy]
    if not idle:
        return None
    late = max(LEAST_S, factor * median)
    slow = [c for c in mine if _straggles(c, now - late)]
    for chunk in sorted(slow, key=lambda c: (c.held_since or 0.0, c.order)):
        open_ = list(_uncovered(book, chunk, mine, wall))
        count = sum(len(rows) for _, rows in open_)
        if count:
            most = max(floor, math.ceil(count / len(idle)))
            return Draft(_picks(open_, most), idle[0], copy_of=chunk.id)
    return None


def _straggles(chunk: Outstanding, since: float) -> bool:
    return (
        chunk.held_since is not None
        and chunk.held_since < since
        and chunk.unleased_since is None
        and chunk.done is None
        and not chunk.copy_of
        and not chunk.suspected
    )


def _uncovered(
    book: Book, chunk: Outstanding, mine: list[Outstanding], wall: float
) -> Iterator[tuple[Share, Positions]]:
    """Rows of a chunk that are open, may go out, and are in no copy of it."""
    copies = [c for c in mine if c.copy_of == chunk.id]
    for share in chunk.shares:
        progress = book.batches.get(share.batch)
        if progress is None or not progress.dispatchable(wall):
            continue
        rows = progress.rows.open_rows(share.positions)
        for copy in copies:
            for theirs in copy.shares:
                if theirs.batch == share.batch:
                    rows = rows[~np.isin(rows, theirs.positions)]
        if len(rows):
            yield share, rows


def _picks(shares: list[tuple[Share, Positions]], most: int) -> list[Pick]:
    picks: list[Pick] = []
    for share, rows in shares:
        if most > 0:
            picks.append(Pick(share.batch, rows[:most], share.attempt, 0, share.lapses, None, tried=share.tried))
            most -= len(picks[-1].positions)
    return picks
