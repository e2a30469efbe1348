"""How much the workers of a model version can take: the size of chunks and of the window. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.live import WorkerFacts
from common.settings import Scheduler
from producers.coordinator.chunk_times import ChunkTimes

#: Seconds of a worker's work that a message is worth; it costs all roles together some 2 ms.
CHUNK_S = 1.0
#: Requests of the window for each sequence that live workers run at a time, where no `queue_size` is set; and least and
#: most of them: what waits in a broker takes its memory.
PER_SEQUENCE = 4
QUEUE_SIZES = (16_384, 262_144)
#: Seconds from the end of a chunk to a new one in the queue, at most, on a slow network with a busy coordinator.
REFILL_S = 2.0


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
    #: Workers that take chunks, the one with the least to do first.
    nodes: tuple[str, ...] = ()
    #: Requests out that keep every engine full.
    wanted: int = 0
    #: Bound of the window, by the settings or by the workers there are.
    queue_size: int = 0
    #: Requests that one engine runs at a time.
    seqs: int = 0

    def chunk_size(self, remaining: int) -> int:
        """Requests of the next chunk when `remaining` are still to be sent (guided self-scheduling)."""
        if self.workers < 2 or remaining >= self.slots * self.target:
            return self.target
        return min(self.target, max(self.floor, math.ceil(remaining / self.slots)))


def capacity(
    scheduler: Scheduler,
    workers: Sequence[WorkerFacts],
    model: str,
    max_num_seqs: int,
    chunks_in_flight: int,
    times: ChunkTimes | None = None,
    max_concurrency: int | None = None,
) -> Capacity:
    """The capacity of the live workers of `model`; `max_num_seqs` and `chunks_in_flight` stand in while there is none.

    `times`: how long workers have a chunk, as measured.
    """
    live = [w for w in workers if w.model == model and w.state in ("ready", "loading")]
    seqs = max((w.max_num_seqs for w in live), default=0) or max_num_seqs  # 0: the engine still loads.
    k = max((w.chunks_in_flight for w in live), default=chunks_in_flight)
    least = math.ceil(1.1 * seqs / max(1, k - 1))
    slots = sum(w.chunks_in_flight for w in live) or k
    count = max(1, len(live))
    sequences = sum(w.max_num_seqs or seqs for w in live)
    queue_size = scheduler.queue_size or min(max(PER_SEQUENCE * sequences, QUEUE_SIZES[0]), QUEUE_SIZES[1])
    most = min(queue_size, max_concurrency or queue_size)
    # Where that is few, smaller chunks: a window of fewer than every worker needs would be a barrier for some.
    target = min(_worthwhile(scheduler, least, k, times), max(1, most // (slots + count)))
    # What runs, and what workers take up while the coordinator hears of an ended chunk and sends the next.
    chunk_s = times.median if times is not None else None
    waiting = 2 * count if not chunk_s else max(count, math.ceil(REFILL_S * slots / chunk_s))
    window = min(most, (slots + waiting) * target)
    taking = sorted((w for w in live if w.state == "ready"), key=lambda w: w.running + w.waiting)
    floor = min(target, max(1, seqs // (2 * k)))
    nodes = tuple(w.node for w in taking)
    wanted = (slots + count) * least
    return Capacity(target, window, len(live), slots, floor, nodes, wanted, queue_size, seqs)


def _worthwhile(scheduler: Scheduler, least: int, k: int, times: ChunkTimes | None) -> int:
    """Requests of a full chunk: as many as keep the cost of a message low, and no more, since others wait behind it."""
    rate = times.rate if times is not None else None
    if rate is None:
        return max(scheduler.chunk_requests, least)
    return max(least, min(scheduler.chunk_requests, math.ceil(CHUNK_S * k * rate)))
