"""Following a batch from outside: polls what the coordinator writes into the store, and nothing else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from common.changes import Changes
from common.errors import Unreachable
from common.store import Store
from producers.batch import Heartbeat, read_batch, read_status, status_path
from producers.batch_view import HEARTBEAT_S, BatchView, alive, heartbeat, silence, view

#: Seconds between two looks: short at first (small batches end at once), then as often as the coordinator writes.
FIRST_POLL_S = 0.05
LAST_POLL_S = 0.25
#: Seconds a store may fail to answer before following gives up.
PATIENCE_S = 30.0
#: Seconds that rates look back, and those that must have passed before there are any.
RATE_S = 20.0
LEAST_RATE_S = 1.0


@dataclass
class Pulse:
    """Tells whether a coordinator lives by seeing its heartbeat change, so that clocks may differ between machines."""

    seen: Heartbeat | None = None
    changed_at: float = 0.0
    fresh: bool = False

    def feel(self, beat: Heartbeat | None, now: float, wall: float) -> bool:
        """True while it lives. `now` is monotonic; the wall clock only judges the first heartbeat seen."""
        if beat is None:
            self.fresh = False
        elif self.seen is None:
            self.fresh, self.changed_at = alive(beat, wall), now
        elif beat != self.seen:
            self.fresh, self.changed_at = True, now
        elif now - self.changed_at > HEARTBEAT_S:
            self.fresh = False
        self.seen = beat
        return self.fresh


@dataclass(frozen=True)
class Pace:
    """Rates over the last seconds, and the time left at that rate (None: nothing to go by yet)."""

    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    left_s: float | None = None


@dataclass
class Meter:
    """Turns successive views into rates. Pure: the caller gives the time."""

    samples: deque[tuple[float, int, int, float]] = field(default_factory=deque)
    _first: tuple[int, int, float] | None = None

    def add(self, seen: BatchView, now: float) -> Pace:
        """The pace at `now`, with this view as the newest sample."""
        done, tokens, work = seen.answered, generated(seen), seen.work_done
        if self._first is None:
            self._first = (done, tokens, work)
        # The first answers to come are where it begins, and no part of it: nobody saw when their work began (a model
        # may have loaded before), and the time since the look before is far too short for them.
        if (self.samples[-1][1:] if self.samples else self._first) != (done, tokens, work):
            self.samples.append((now, done, tokens, work))
        if not self.samples:
            return Pace()
        while len(self.samples) > 2 and now - self.samples[1][0] > RATE_S:
            self.samples.popleft()
        start, done_then, tokens_then, work_then = self.samples[0]
        span = now - start
        if span < LEAST_RATE_S or len(self.samples) < 2:
            return Pace()
        rate = (done - done_then) / span
        # Long requests go first and take longest: the time left is that of the work, not of so many requests.
        worked = (work - work_then) / span
        if worked > 0:
            left: float | None = (1 - work) / worked
        else:
            left = (seen.request_counts.total - done) / rate if rate > 0 else None
        return Pace(rate, (tokens - tokens_then) / span, left)


def generated(seen: BatchView) -> int:
    """The tokens that speed is told in: those generated, or those read where nothing is generated (embeddings)."""
    return seen.usage.completion_tokens or seen.usage.prompt_tokens


def follow(
    store: Store,
    batch_id: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    pause: Callable[[float], object] | None = None,
) -> Iterator[BatchView]:
    """Views of a batch, one a look, until one is final (that one too). `pause` waits so many seconds between two looks;
    without one, a wait ends when the status changes.

    `UsageError` when there is no such batch, `Unreachable` when the store fails for `PATIENCE_S`.
    """
    batch = read_batch(store, batch_id)
    pause = pause or Changes(store, status_path(batch)).wait
    pulse = Pulse()
    poll = FIRST_POLL_S
    failing_since: float | None = None
    while True:
        try:
            beat = heartbeat(store, batch.shard)
            status = read_status(store, batch)
            failing_since = None
        except (OSError, Unreachable) as exc:
            failing_since = clock() if failing_since is None else failing_since
            if clock() - failing_since > PATIENCE_S:
                raise Unreachable(f"store {store.url} does not answer: {exc}; {batch_id} goes on") from None
            pause(LAST_POLL_S)
            continue
        there = pulse.feel(beat, clock(), wall())
        seen = view(batch, status, None if there else silence(store))
        yield seen
        if seen.final:
            return
        pause(poll)
        poll = min(poll * 1.3, LAST_POLL_S)
