"""The worker's heartbeat to the coordinator: leases on its chunks, its own announcement, and who was cancelled.

All of it is hints in Redis: an outage costs nothing but the hints, and is logged once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

import redis

from common import logs
from common.live import LiveState, WorkerFacts
from workers.chunk import ChunkRun

#: Seconds between announcements.
ANNOUNCE_S = 5.0
#: Seconds between looks for cancelled batches, at most.
CANCEL_S = 2.0
#: Seconds for which changes gather before others are told of them.
GATHER_S = 0.1

log = logs.get(__name__)


class Leases(threading.Thread):
    """Renews, announces and polls until `close`. `tick` is called as often, for whoever needs a slow clock."""

    def __init__(
        self,
        live: LiveState,
        node: str,
        lease_s: float,
        runs: Mapping[str, ChunkRun],
        facts: Callable[[], WorkerFacts],
        tick: Callable[[], None],
        interval_s: float = ANNOUNCE_S,
        life: str = "",
    ) -> None:
        super().__init__(name="leases", daemon=True)
        self._live = live
        self._node = node
        self._life = life
        self._lease_s = lease_s
        self._runs = runs
        self._facts = facts
        self._tick = tick
        self._interval_s = min(lease_s / 3, interval_s, CANCEL_S)
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._dropped: list[str] = []
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self._announcing = threading.Lock()
        self._announced = 0.0
        self._state = ""
        self._trouble = False

    def wake(self) -> None:
        """Something changed that others should know now."""
        self._wake.set()

    def drop(self, chunk_id: str) -> None:
        """A chunk is no longer ours."""
        with self._lock:
            self._dropped.append(chunk_id)
        self._wake.set()

    def take(self, chunk_id: str) -> str | None:
        """Claim a chunk; why this worker should drop its copy of it unread, if so. None also while nobody knows."""
        if self._trouble:
            return None
        try:
            return self._live.claim(chunk_id, self._node, self._lease_s, self._life)
        except (redis.RedisError, OSError):
            return None

    def announce(self) -> None:
        """Say now how this worker stands: for what others must know before they see what comes of it."""
        if self._trouble:
            return
        with contextlib.suppress(redis.RedisError, OSError):
            self._announce()

    def others(self) -> list[WorkerFacts]:
        """All workers that are known; none while nobody knows."""
        try:
            return self._live.workers()
        except (redis.RedisError, OSError):
            return []

    def give_back(self, chunk_id: str) -> None:
        """Drop a lease before the chunk goes back to its queue, or the next worker would leave it to us."""
        try:
            with self._renewing:
                self._live.drop_leases([chunk_id])
        except (redis.RedisError, OSError):
            # It lapses, and the coordinator sends the requests again.
            return

    def run(self) -> None:
        """See the class."""
        while not self._closed.is_set():
            try:
                self._once()
                self._tick()
            except Exception as exc:
                log.error("the lease thread stumbled", error=type(exc).__name__)
            self._wake.wait(self._interval_s)
            # What changes meanwhile is told together: an engine that is fast begins and ends many chunks a second.
            self._closed.wait(GATHER_S)
            self._wake.clear()

    def close(self) -> None:
        """Give everything back and stop; waits a moment for Redis."""
        if not self.is_alive():
            return
        self._closed.set()
        self._wake.set()
        self.join(timeout=5)
        try:
            self._drop()
            self._live.withdraw(self._node)
        except (redis.RedisError, OSError):
            # They lapse by themselves.
            return

    def _once(self) -> None:
        try:
            self._drop()
            with self._renewing:
                running = dict(self._runs)
                if running:
                    self._live.renew_leases(running, self._node, self._lease_s, self._life)
            if running:
                batches = sorted({batch for run in running.values() for batch in run.batches})
                cancelled = self._live.cancelled(batches)
                for run in running.values() if cancelled else ():
                    run.work.forget(cancelled)
                for chunk_id in self._live.given_up_among(list(running)):
                    # Somebody else has its requests, or has answered them.
                    running[chunk_id].work.forget(running[chunk_id].batches)
            self._announce()
        except (redis.RedisError, OSError) as exc:
            if not self._trouble:
                self._trouble = True
                log.warning("live state is unreachable; work goes on without it", error=logs.why(exc))
        else:
            if self._trouble:
                self._trouble = False
                log.info("live state is back")

    def _announce(self) -> None:
        # Facts and their announcement under one lock, or an older word could be the last one.
        with self._announcing:
            facts = self._facts()
            if facts.state != self._state or time.monotonic() - self._announced >= ANNOUNCE_S:
                self._live.announce(facts)
                self._announced = time.monotonic()
                self._state = facts.state

    def _drop(self) -> None:
        with self._lock:
            dropped, self._dropped = self._dropped, []
        # A copy of one may have been taken up again meanwhile.
        self._live.drop_leases([chunk_id for chunk_id in dropped if chunk_id not in self._runs])
