"""What goes into the next chunk of a model version. Pure: data in, data out.

A chunk is a unit of transport: large enough that K of them fill the engine, filled from several batches where they are
small, and smaller only at the very end, where equal shares for all workers matter more than few messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.live import WorkerFacts
from common.settings import Scheduler
from producers.batch import Batch
from producers.coordinator.book import Book
from producers.coordinator.lanes import Lane, Retry
from producers.coordinator.records import Exhausted, pack_positions
from producers.coordinator.row_states import Positions

#: Losses from which rows go out with no other rows of that kind beside them, one chunk a worker.
SUSPECT_LOSSES = 2
#: A row that was alone in this many lost chunks, and was in at least `CONVICT_LOSSES`, is held to end engines.
CONVICT_ALONE = 2
CONVICT_LOSSES = 3


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the workers of a model version can take."""

    #: Requests a full chunk carries.
    target: int
    #: Requests sent and not settled, at most.
    window: int
    workers: int
    #: Chunks in engines at a time, all workers together.
    slots: int
    #: Requests of the smallest chunk at the end of the work.
    floor: int

    def chunk_size(self, remaining: int) -> int:
        """Requests of the next chunk when `remaining` are still to be sent (guided self-scheduling)."""
        if self.workers < 2 or remaining >= self.slots * self.target:
            return self.target
        return min(self.target, max(self.floor, math.ceil(remaining / self.slots)))


def capacity(
    scheduler: Scheduler, workers: Sequence[WorkerFacts], model: str, max_num_seqs: int, chunks_in_flight: int
) -> Capacity:
    """The capacity of the live workers of `model`; the last two stand in while there is none."""
    live = [w for w in workers if w.model == model and w.state != "draining"]
    seqs = max((w.max_num_seqs for w in live), default=0) or max_num_seqs  # 0: the engine still loads.
    k = max((w.chunks_in_flight for w in live), default=chunks_in_flight)
    least = math.ceil(1.1 * seqs / max(1, k - 1))
    target = min(max(scheduler.chunk_requests, least), scheduler.queue_size)
    slots = sum(w.chunks_in_flight for w in live) or k
    # What runs, and two chunks a worker that wait: it never stands idle while an answer is being logged.
    window = min(scheduler.queue_size, (slots + 2 * max(1, len(live))) * target)
    return Capacity(target, window, len(live), slots, floor=min(target, max(1, seqs // (2 * k))))


class Pick(NamedTuple):
    """Rows of one batch that go into a chunk."""

    batch: str
    positions: Positions
    attempt: int
    losses: int
    alone: int
    #: Where they come from when they were sent before.
    retry: Retry | None


class Draft(NamedTuple):
    """The next chunk."""

    picks: list[Pick]
    #: The worker it goes to by its own queue; empty: the queue of the model version.
    node: str = ""


class Wait(NamedTuple):
    """Nothing to send; look again at this time (monotonic seconds) or when something changed."""

    until: float


def exhausted(lane: Lane, max_attempts: int) -> list[Exhausted]:
    """Decisions on rows that get no further attempt."""
    found = []
    for retry in lane.retries:
        if retry.attempt > max_attempts:
            use_line = not retry.code
            code = retry.code or "attempts_exhausted"
            message = retry.message or "every attempt failed"
            attempts = retry.attempt - 1
        elif retry.alone >= CONVICT_ALONE and retry.losses >= CONVICT_LOSSES:
            use_line, code, attempts = False, "engine_crash", retry.losses
            message = f"the engine ended {retry.losses} times with this request in it"
        else:
            continue
        found.append(Exhausted(retry.batch, pack_positions(retry.positions), use_line, code, message, attempts))
    return found


def draft(book: Book, lane: Lane, room: Capacity, now: float, wait_s: float) -> Draft | Wait:
    """The next chunk of a lane, or how long there is none. Changes nothing but the lane's waiting mark."""
    due = [r for r in lane.retries if r.not_before <= now]
    until = min((r.not_before for r in lane.retries if r.not_before > now), default=now + 3600.0)
    lost = _lost(book, lane, due, room.workers)
    if lost is not None:
        return Draft([Pick(lost.batch, lost.positions, lost.attempt, lost.losses, lost.alone, lost)])
    again = [r for r in due if not r.losses]
    ready = sum(len(r.positions) for r in again)
    unsent = 0
    for batch_id in lane.turn:
        progress = book.batches[batch_id]
        if progress.unsent:
            # Rows that an earlier leader had answered already.
            progress.next_pos = progress.rows.settled.full_until(progress.next_pos)
            unsent += progress.unsent
    used = book.window_used(lane)
    fresh = max(0, min(unsent, room.window - used))
    if not ready and not fresh:
        lane.partial_since = None
        return Wait(until)
    size = min(room.chunk_size(ready + unsent), room.window)
    if ready + fresh < size:
        out = any(c.model == lane.model for c in book.out.values())
        if fresh < unsent and out:
            return Wait(until)  # The window is full: what comes back makes room for a whole chunk.
        if lane.partial_since is None:
            lane.partial_since = now
        if now < lane.partial_since + wait_s:
            return Wait(min(until, lane.partial_since + wait_s))
    lane.partial_since = None
    return Draft(_pack(book, lane, again, size, fresh))


def _lost(book: Book, lane: Lane, due: list[Retry], workers: int) -> Retry | None:
    """Rows of a lost chunk; they travel alone, and those lost more than once one chunk a worker."""
    suspects = sum(1 for c in book.out.values() if c.model == lane.model and c.losses >= SUSPECT_LOSSES)
    for retry in due:
        if retry.losses and (retry.losses < SUSPECT_LOSSES or suspects < max(1, workers)):
            return retry
    return None


def _pack(book: Book, lane: Lane, again: list[Retry], size: int, fresh: int) -> list[Pick]:
    picks: list[Pick] = []
    taken = 0
    kind: tuple[float, str] | None = None
    for retry in again:
        mine = _kind(book.batches[retry.batch].batch)
        if taken < size and kind in (None, mine):
            kind = mine
            rows = retry.positions[: size - taken]
            picks.append(Pick(retry.batch, rows, retry.attempt, 0, retry.alone, retry))
            taken += len(rows)
    for batch_id in lane.turn:
        progress = book.batches[batch_id]
        mine = _kind(progress.batch)
        if taken >= size or fresh <= 0 or not progress.unsent or kind not in (None, mine):
            continue
        kind = mine
        start = progress.next_pos
        end = min(progress.batch.planned, start + min(size - taken, fresh))
        rows = (start + np.flatnonzero(~progress.rows.settled.span(start, end))).astype(np.uint32)
        picks.append(Pick(batch_id, rows, 1, 0, 0, None))
        taken += len(rows)
        fresh -= len(rows)
    return picks


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


def pass_turn(lane: Lane, picks: list[Pick]) -> None:
    """Let the batches that come after the last one served be next."""
    fresh = [pick.batch for pick in picks if pick.retry is None]
    if fresh and fresh[-1] in lane.turn:
        lane.turn.rotate(-(lane.turn.index(fresh[-1]) + 1))
