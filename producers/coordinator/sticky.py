"""Where a chunk begins and ends in the plan, and which worker it is for, by the prefixes its rows share. Pure.

Chunks are cut where neighbours have least in common. A group of rows that share a long prefix and that is larger than
a chunk stays with one worker, whose KV cache has the prefix then: each worker goes through groups of its own, by its
own queue, while the dispatcher always serves the one that comes to another chunk soonest. So work stays even by itself,
and a worker that is slow, or dies, gets nothing further; what of its groups was not sent goes to the others once they
have nothing else, and so does what waits untaken in its own queue (`steal`).

So a plan is not sent in its order: what goes on with a prefix that another worker has is skipped, and left to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from producers.coordinator.book import Book
from producers.coordinator.capacity import Capacity
from producers.coordinator.lanes import Lane, Outstanding
from producers.coordinator.packing import Draft
from producers.coordinator.progress import Progress, Stretch

#: Bytes in common from which on rows belong to one group (some 256 tokens): less is computed again as fast as sent.
WORTH = 1024
#: A chunk may be smaller than others by this share of it, for the sake of where it ends.
SLACK = 0.25
#: Rows from the plan's front among which the end of a group is looked for.
LOOK_AHEAD = 4096
#: Seconds that a chunk is in a worker's own queue at least before it is taken from there: who holds what is looked at
#: once a second.
UNTAKEN_S = 1.0

#: Of positions `[start, end)` of the plan, what each row has in common with the one before it, in bytes.
Shared = Callable[[int, int], npt.NDArray[np.int64]]


class View(NamedTuple):
    """What is known of a batch when a chunk is drafted whose last rows go out for the first time."""

    progress: Progress
    ahead: Stretch
    skipped: list[Stretch]
    #: Workers that take chunks, the one that comes to another soonest first; empty: any will do.
    nodes: list[str]
    #: Rows that the draft has of it.
    size: int


def view(book: Book, lane: Lane, drafted: Draft, room: Capacity, sticks: bool) -> View | None:
    """What `route` needs, taken while nothing changes; None when the draft goes as it is.

    `sticks`: False where it is not wanted that groups stay with a worker.
    """
    last = drafted.picks[-1]
    if drafted.node or drafted.copy_of or last.retry is not None:
        return None
    progress = book.batches[last.batch]
    size = len(last.positions)
    # Chunks are smaller at the end of the work: whoever has nothing to do takes them then, whatever it has seen.
    sticks = sticks and len(room.nodes) > 1 and len(drafted.picks) == 1 and size >= room.target
    soonest = _soonest_first(book, lane, room) if sticks else []
    return View(progress, progress.ahead, list(progress.skipped), soonest, size)


def route(drafted: Draft, seen: View, shared: Shared) -> Draft:
    """The draft with the rows that suit best at its end, and the worker it is for."""
    stretch, start = _begin(seen, shared)
    end = min(stretch.end, start + seen.size)
    if end <= start:
        return drafted
    common = shared(start, min(end + 1, seen.progress.batch.planned))
    # Where a stretch ends, another group begins, or nothing is left.
    after = np.append(common[1 : end - start], -1) if end == stretch.end else common[1:]
    count = cut(after)
    rows = seen.progress.open_rows(start, start + count)
    if not len(rows):
        return drafted
    whole = max(int(common[0]), int(after[count - 1])) < WORTH
    node = "" if whole or not seen.nodes else seen.nodes[0]
    return drafted._replace(picks=[*drafted.picks[:-1], drafted.picks[-1]._replace(positions=rows)], node=node)


def cut(after: npt.NDArray[np.int64]) -> int:
    """How many of these rows a chunk gets; `after[n]`: what row n has in common with the one after it."""
    size = len(after)
    least = max(1, size - int(size * SLACK))
    common = after[least - 1 :]
    # As many as can be, of the places where least is shared.
    return int(least + np.flatnonzero(common == common.min())[-1])


def _begin(seen: View, shared: Shared) -> tuple[Stretch, int]:
    """What the next rows are taken from, and at which position they begin."""
    ahead, skipped, nodes = seen.ahead, seen.skipped, seen.nodes
    left = ahead.end > ahead.start
    if not nodes:
        first = ahead if left or not skipped else skipped[0]
        return first, first.start
    mine = [s for s in skipped if s.home == nodes[0]] or [s for s in skipped if s.home not in nodes]
    if mine:
        return mine[0], mine[0].start
    if not left:
        longest = max(skipped, key=lambda s: s.end - s.start, default=ahead)
        return longest, longest.start
    if ahead.home in nodes[1:] and len(skipped) < len(nodes):
        common = shared(ahead.start, min(ahead.end, ahead.start + LOOK_AHEAD))
        ends = np.flatnonzero(common < WORTH)
        if len(ends):
            return ahead, ahead.start + int(ends[0])
    return ahead, ahead.start


def _soonest_first(book: Book, lane: Lane, room: Capacity) -> list[str]:
    held = _held(c for c in book.out.values() if c.model == lane.model)

    def wait(node: str) -> tuple[float, int]:
        # Workers take chunks until they have twice what their engine runs. Beyond that nothing waits for one that is
        # slow while others could run it first.
        return max(0, held[node] - 2 * room.seqs) * lane.times.of(node), held[node]

    return sorted(room.nodes, key=wait)


def _held(chunks: Iterable[Outstanding]) -> Counter[str]:
    """Rows without an answer, by the worker that has them or will have them."""
    held: Counter[str] = Counter()
    for chunk in chunks:
        held[chunk.target or chunk.node or ""] += chunk.open
    return held


def steal(book: Book, lane: Lane, room: Capacity, idle: Sequence[str], looked_at: float) -> str | None:
    """A chunk that waits in one worker's own queue while another has nothing to do; None when there is none.

    To be asked while nothing else is left to send. `idle`: workers that other shards leave idle; `looked_at`: when it
    was last looked who holds what (monotonic seconds).
    """
    mine = [c for c in book.out.values() if c.model == lane.model]
    if any(c.leased_at is None and not c.target for c in mine):
        return None  # Whoever is idle takes that.
    held = _held(mine)
    waiting = [c for c in mine if _waits(c, looked_at) and held[c.target] > room.seqs]
    if not waiting or not any(held[node] < room.seqs for node in idle):
        return None
    # The newest of the longest queue: the last that its worker would come to.
    return max(waiting, key=lambda c: (held[c.target], c.order)).id


def _waits(chunk: Outstanding, looked_at: float) -> bool:
    first = all(s.attempt == 1 and not s.charges and not s.lapses for s in chunk.shares)
    untaken = chunk.leased_at is None and not chunk.seen
    settled = chunk.published and chunk.sent_at + UNTAKEN_S < looked_at
    return bool(chunk.target) and first and untaken and settled and not chunk.copy_of
