"""What goes into the next chunk of a model version. Pure: data in, data out.

A chunk is a unit of transport: large enough that K of them fill the engine, filled from several batches where they are
small, and smaller only at the very end, where equal shares for all workers matter more than few messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from producers.batch import Batch
from producers.coordinator import suspicion
from producers.coordinator.book import Book
from producers.coordinator.capacity import Capacity
from producers.coordinator.lanes import Lane, Outstanding, Retry
from producers.coordinator.progress import Progress
from producers.coordinator.records import Exhausted, pack_positions
from producers.coordinator.row_states import Positions
from producers.coordinator.weights import Weights

#: Chunks that may wait in a worker's own queue, or run from it, when what was lost with another goes there.
AHEAD = 2
#: Seconds between two weighings of all batches: deadlines near.
WEIGH_S = 1.0


class Pick(NamedTuple):
    """Rows of one batch that go into a chunk."""

    batch: str
    positions: Positions
    attempt: int
    charges: int
    lapses: int
    #: Where they come from when they were sent before.
    retry: Retry | None
    #: Estimated, in tokens.
    cost: int = 0
    tried: str = ""


class Draft(NamedTuple):
    """The next chunk."""

    picks: list[Pick]
    #: The worker it goes to by its own queue; empty: the queue of the model version.
    node: str = ""
    #: The chunk that some of its rows are in already; empty: none.
    copy_of: str = ""
    #: Suspects: how many of them may be in the engine at a time, with nothing else there. 0: no suspects.
    isolated: int = 0


class Wait(NamedTuple):
    """Nothing to send; look again at this time (monotonic seconds) or when something changed."""

    until: float
    #: True when nothing at all is left that could be sent now, whatever room there were.
    idle: bool = False


def exhausted(lane: Lane, max_attempts: int, nodes: Sequence[str] = ()) -> list[Exhausted]:
    """Decisions on rows that get no further attempt. `nodes`: workers that one might be made on."""
    found = []
    for retry in lane.retries:
        more = suspicion.untried(retry.tried, nodes)
        if not len(retry.positions):
            continue
        if retry.attempt > max_attempts + more:
            use_line = not retry.code
            code = retry.code or "attempts_exhausted"
            message = retry.message or "every attempt failed"
            attempts = retry.attempt - 1
        elif retry.charges >= suspicion.CONVICTED + more:
            use_line, code, attempts = False, "engine_crash", retry.charges
            message = f"the engine ended {retry.charges} times with this request in it, at last with nothing else in it"
        else:
            continue
        found.append(Exhausted(retry.batch, pack_positions(retry.positions), use_line, code, message, attempts))
    return found


def draft(
    book: Book, lane: Lane, room: Capacity, now: float, wall: float, wait_s: float, weights: Weights
) -> Draft | Wait:
    """The next chunk of a lane, or how long there is none. Changes nothing but the lane's marks.

    `now` is in monotonic, `wall` in Unix seconds.
    """
    _wake(book, lane, wall)
    _weigh(book, lane, now, wall, weights)
    due, until, held = _due(book, lane, now, wall)
    lost = [r for r in due if room.nodes and _lost(r)]
    apart = _isolated(book, lane, due, room) or _elsewhere(book, lane, due, room) or _ahead(book, lane, lost, room)
    if apart is not None:
        return apart if apart.picks else _answered(lane, now)
    again: dict[str, list[Retry]] = {}
    for retry in due:
        # What was lost waits for room in a worker's own queue, rather than behind all that waits in the shared one.
        if retry.charges < suspicion.SUSPECT and not (room.nodes and _lost(retry)):
            again.setdefault(retry.batch, []).append(retry)
    for batch_id in again:
        lane.fair.activate(batch_id, book.batches[batch_id].batch.tenant)
    ready = sum(len(r.positions) for mine in again.values() for r in mine)
    left = room.window - book.window_used(lane) + held
    # As many as fill a chunk and as make the end of the work are counted, no more: there may be many batches.
    unsent = _unsent(book, lane, wall, max(2, room.slots) * room.target + 1)
    fresh = max(0, min(unsent, left))
    if not ready and not fresh:
        lane.partial_since = None
        return Wait(min(until, now + _sleep_s(lane, wall)), idle=not unsent and not lost)
    size = min(room.chunk_size(ready + unsent), room.window)
    if ready + fresh < size:
        out = any(c.model == lane.model for c in book.out.values())
        if fresh < unsent and out:
            return Wait(until)  # The window is full: what comes back makes room for a whole chunk.
        if lane.partial_since is None:
            lane.partial_since = now
        # Where nothing is out, workers wait, and that costs more than a chunk that is not full.
        if out and now < lane.partial_since + wait_s:
            return Wait(min(until, lane.partial_since + wait_s))
    lane.partial_since = None
    picks = _pack(book, lane, again, size, fresh, wall)
    return Draft(picks) if picks else _answered(lane, now)


def _answered(lane: Lane, now: float) -> Wait:
    """What was to be sent again is answered meanwhile."""
    lane.retries = [r for r in lane.retries if len(r.positions)]
    return Wait(now)


def _wake(book: Book, lane: Lane, wall: float) -> None:
    """Let batches whose time has come compete again."""
    for batch_id in [b for b, at in lane.asleep.items() if at <= wall]:
        del lane.asleep[batch_id]
        lane.fresh[batch_id] = None
        lane.fair.activate(batch_id, book.batches[batch_id].batch.tenant)


def _sleep_s(lane: Lane, wall: float) -> float:
    return min(3600.0, min(lane.asleep.values(), default=math.inf) - wall)


def _weigh(book: Book, lane: Lane, now: float, wall: float, weights: Weights) -> None:
    every = now - lane.weighed_at >= WEIGH_S
    for batch_id in lane.fair.active if every else list(lane.unweighed):
        lane.fair.weigh(batch_id, *weights.of(book.batches[batch_id], wall))
    lane.unweighed.clear()
    if every:
        lane.weighed_at = now


def _due(book: Book, lane: Lane, now: float, wall: float) -> tuple[list[Retry], float, int]:
    """Retries whose time has come, when others' will (monotonic seconds), and rows of batches that may not go out."""
    due, until, held = [], now + 3600.0, 0
    for retry in lane.retries:
        progress = book.batches[retry.batch]
        if not progress.dispatchable(wall):
            held += len(retry.positions)
            if not progress.paused:
                until = min(until, now + progress.opens(wall) - wall)
        elif retry.not_before <= now:
            due.append(retry)
        else:
            until = min(until, retry.not_before)
    return due, until, held


def _unsent(book: Book, lane: Lane, wall: float, enough: int) -> int:
    """Rows that were never sent and may go out; counts no further than `enough`."""
    total = 0
    for batch_id in list(lane.fresh):
        if total >= enough:
            break
        progress = book.batches[batch_id]
        if not _retire(lane, progress, wall):
            total += progress.unsent
    return total


def _retire(lane: Lane, progress: Progress, wall: float) -> bool:
    """True when a batch has nothing fresh that may go out; it is put aside then."""
    if progress.unsent and progress.pass_answered():
        lane.changed.add(progress.id)
    if progress.unsent and progress.dispatchable(wall):
        return False
    lane.fresh.pop(progress.id, None)
    if progress.unsent:
        lane.asleep[progress.id] = math.inf if progress.paused else progress.opens(wall)
    return True


def _isolated(book: Book, lane: Lane, due: list[Retry], room: Capacity) -> Draft | None:
    """Suspects, for one worker that runs nothing else; on another than they were tried on where there is one."""
    suspects = [r for r in due if r.charges >= suspicion.SUSPECT]
    out = [c for c in book.out.values() if c.model == lane.model]
    if not suspects or not suspicion.room_for_isolated(out, room.workers):
        return None
    first = suspects[0]
    at_once = suspicion.isolated_at_once(first.charges)
    like = [r for r in suspects if r.lapses == first.lapses and suspicion.isolated_at_once(r.charges) == at_once]
    busy = {c.target for c in out if c.isolated}
    nodes = [n for n in room.nodes if n not in busy]
    node = next((n for n in nodes if n != first.tried), nodes[0] if nodes else "")
    return Draft(_alike(book, like, suspicion.isolated_size(first.lapses)), node, isolated=at_once)


def _elsewhere(book: Book, lane: Lane, due: list[Retry], room: Capacity) -> Draft | None:
    """Requests that one worker failed at, for another one, where there is one."""
    sent = Counter(c.target for c in book.out.values() if c.model == lane.model)
    nodes = sorted(room.nodes, key=lambda node: sent[node])
    for retry in due:
        if _failed(retry) and suspicion.untried(retry.tried, nodes):
            node = next(n for n in nodes if n != retry.tried)
            like = [r for r in due if _failed(r) and r.tried == retry.tried]
            return Draft(_alike(book, like, room.target), node)
    return None


def _ahead(book: Book, lane: Lane, lost: list[Retry], room: Capacity) -> Draft | None:
    """A part of what was lost with a worker, for the own queue of another, the one that has the least of it.

    It has waited once, and goes before what waits now.
    """
    if not lost:
        return None
    sent = Counter(c.target for c in book.out.values() if c.model == lane.model and c.ahead)
    node = min(room.nodes, key=lambda node: sent[node])
    if sent[node] >= AHEAD:
        return None
    each = math.ceil(sum(len(r.positions) for r in lost) / len(room.nodes))
    return Draft(_alike(book, lost, min(room.target, max(room.floor, each))), node)


def _lost(retry: Retry) -> bool:
    return bool(retry.lapses or retry.charges) and retry.charges < suspicion.SUSPECT


def _failed(retry: Retry) -> bool:
    return retry.attempt > 1 and retry.charges < suspicion.SUSPECT


def _alike(book: Book, retries: list[Retry], size: int) -> list[Pick]:
    """Up to `size` rows of these retries that may share a chunk."""
    picks: list[Pick] = []
    left = size
    kind = _kind(book.batches[retries[0].batch].batch)
    for retry in retries:
        if left and _kind(book.batches[retry.batch].batch) == kind and _still_open(book, retry):
            picks.append(_again(retry, retry.positions[:left]))
            left -= len(picks[-1].positions)
    return picks


def _still_open(book: Book, retry: Retry) -> bool:
    """False when all its rows were answered after all: by a worker that was thought lost, or a second copy."""
    retry.positions = book.batches[retry.batch].rows.open_rows(retry.positions)
    return len(retry.positions) > 0


def _again(retry: Retry, rows: Positions) -> Pick:
    return Pick(retry.batch, rows, retry.attempt, retry.charges, retry.lapses, retry, tried=retry.tried)


def _pack(book: Book, lane: Lane, again: dict[str, list[Retry]], size: int, fresh: int, wall: float) -> list[Pick]:
    """Rows of the batches whose turn it is, what must be sent again first."""
    picks: list[Pick] = []
    taken = 0
    kind: tuple[float, str] | None = None
    idle = []
    order = lane.fair.round()
    while taken < size and (batch_id := order.next()) is not None:
        progress = book.batches[batch_id]
        retries = again.get(batch_id, [])
        if _retire(lane, progress, wall) and not retries:
            idle.append(batch_id)
            continue
        if kind not in (None, _kind(progress.batch)) or not (retries or fresh > 0):
            continue
        kind = _kind(progress.batch)
        before = taken
        for retry in retries:
            if taken < size and _still_open(book, retry):
                rows = retry.positions[: size - taken]
                picks.append(_again(retry, rows))
                taken += len(rows)
        if taken < size and fresh > 0 and batch_id in lane.fresh:
            rows = progress.following(min(size - taken, fresh))
            picks.append(Pick(batch_id, rows, 1, 0, 0, None))
            taken += len(rows)
            fresh -= len(rows)
        order.took((taken - before) * progress.row_cost * _factor(lane, progress))
    for batch_id in idle:
        lane.fair.deactivate(batch_id)
    return picks


def _factor(lane: Lane, progress: Progress) -> float:
    """How many times what the plan estimates the requests of a batch cost, as far as that is known."""
    return progress.costs.factor(lane.costs.factor())


def _kind(batch: Batch) -> tuple[float, str]:
    """What all rows of a chunk have in common."""
    return batch.timeout_s, batch.cache


def trim(picks: list[Pick], sizes: list[npt.NDArray[np.int64]], most: int) -> list[Pick]:
    """The picks up to `most` bytes of rows (`sizes`: bytes of each row of each pick); the first row always goes."""
    kept: list[Pick] = []
    left = most
    for pick, size in zip(picks, sizes, strict=True):
        ends = np.cumsum(size)
        count = int(np.searchsorted(ends, left, side="right"))
        if not kept:
            count = max(1, count)
        if count:
            kept.append(pick._replace(positions=pick.positions[:count]))
        if count < len(size):
            break
        left -= int(ends[-1])
    return kept


def charge(book: Book, lane: Lane, picks: list[Pick], chunk: Outstanding) -> None:
    """The picks were sent as `chunk`: whose turn it is next follows from their cost, as far as that is known."""
    factors = {b: _factor(lane, book.batches[b]) for b in {p.batch for p in picks} if b in book.batches}
    for share in chunk.shares:
        share.charged = share.cost * factors.get(share.batch, 1.0)
    for pick in picks:
        progress = book.batches.get(pick.batch)
        lane.fair.charge(pick.batch, pick.cost * factors.get(pick.batch, 1.0))
        if progress is not None and not progress.unsent:
            lane.fresh.pop(pick.batch, None)
            lane.fair.deactivate(pick.batch)  # What it has to send again brings it back.
