"""Watches live state and queues, and calls what is lost. Redis may be away or wiped: then nobody is convicted."""

from __future__ import annotations

import functools
import time

import redis
from kombu import Connection

from common.broker import broker_url, connect, delete_queue, is_amqp, queue
from common.live import LiveState
from common.logs import get, why
from common.messages import results_queue
from common.settings import Settings
from producers.coordinator import losses
from producers.coordinator.broker_calls import let_go
from producers.coordinator.core import Core

log = get(__name__)

#: Seconds between looks, and while a lease is missing: what was lost waits for the verdict.
PERIOD_S = 0.5
SUSPICIOUS_S = 0.2
#: Share of a Redis broker's memory (`maxmemory`, or what its machine has) in use from which nothing more is sent.
MEMORY_SHARE = 0.6
#: Leases asked for in one round trip.
_AT_ONCE = 1000


class LiveView:
    """One thread: `run` until the core stops."""

    def __init__(self, core: Core, settings: Settings, live: LiveState) -> None:
        self._core = core
        self._settings = settings
        self._live = live
        self._generation: str | None = None
        #: Chunks of which Redis says that they are given up.
        self._told: set[str] = set()
        self._connection: Connection | None = None
        #: True while somebody's lease is missing and it is not known yet why.
        self._suspicious = False

    def run(self) -> None:
        """Look every now and then until the core stops."""
        core = self._core
        lease_s = self._settings.scheduler.lease_s
        core.hold(lease_s + losses.GRACE_S)  # A restarted coordinator knows of no lease yet.
        try:
            while not core.stop.is_set():
                core.look.clear()
                if self._look():
                    self._judge()
                self._watch_memory()
                core.look.wait(min(SUSPICIOUS_S if self._suspicious else PERIOD_S, lease_s / 4))
        finally:
            self._disconnect()
            self._live.close()

    def _look(self) -> bool:
        """Ask Redis who is there and who holds what; False when it does not say."""
        core = self._core
        with core.lock:
            chunk_ids = [c.id for c in core.book.out.values() if c.published]
            cancelled = set(core.cancelled)
            given_up = list(core.book.given_up)
        began = time.monotonic()
        try:
            for batch_id in cancelled:
                self._live.mark_cancelled(batch_id)
            generation = self._live.generation()
            told = self._told if generation == self._generation else set()
            self._live.give_up(c for c in given_up if c not in told)
            workers = self._live.workers()
            nodes: dict[str, str | None] = {}
            for start in range(0, len(chunk_ids), _AT_ONCE):
                some = chunk_ids[start : start + _AT_ONCE]
                nodes.update(zip(some, self._live.leases(some), strict=True))
        except (redis.RedisError, OSError) as exc:
            if self._generation is not None:
                log.warning("live_state_unreachable", error=why(exc))
            self._generation = None
            core.trouble("state_unreachable", "live", True)
            with core.lock:
                core.workers = None
            return False
        if generation != self._generation:
            # Back after an outage, or wiped: leases come back as workers renew them.
            self._generation = generation
            core.hold(self._settings.scheduler.lease_s + losses.GRACE_S)
        self._told = set(given_up)
        core.trouble("state_unreachable", "live", False)
        with core.lock:
            if workers != core.workers:
                served = {(w.model, w.state) for w in workers} ^ {(w.model, w.state) for w in core.workers or []}
                core.workers = workers
                if served or workers == []:
                    core.dirty.update(core.book.batches)
                core.dispatch.set()
            now = time.monotonic()
            losses.see_leases(core.book, nodes, now)
            losses.see_workers(core.book, {w.node for w in workers if w.state in ("ready", "loading")}, now)
            # Marked anew each time until the batch has ended, since Redis may be wiped.
            core.cancelled &= set(core.book.batches)
            core.looked_at = began
        core.control.set()
        return True

    def _judge(self) -> None:
        core, scheduler = self._core, self._settings.scheduler
        with core.lock:
            out = core.book.out.values()
            unheld = {c.queue for c in out if c.published and c.leased_at is None}
            self._suspicious = any(c.unleased_since is not None for c in out)
            # Batches that are cut wait for the last results as well.
            ending = bool(core.cancelled) or self._suspicious or any(c.done is not None for c in out)
        waiting = {name: self._waiting(name) for name in unheld}
        if ending:
            asked_at = time.monotonic()
            results = self._waiting(results_queue(core.shard))
            if results is not None:
                core.results_seen.asked(asked_at, results)
        with core.lock:
            now = time.monotonic()
            losses.see_queues(core.book, waiting, now)
            lost = losses.judge(
                core.book, now, core.hold_until, core.results_seen.at, scheduler.lease_s, scheduler.unclaimed_s
            )
        if "disk_full" in core.troubles:
            return  # Results wait for the disk; what looks lost may be among them.
        for verdict in lost:
            with core.lock:
                chunk = core.book.out.get(verdict.chunk)
                node = (chunk.node or chunk.target or None) if chunk is not None else None
                orphaned = chunk.queue if chunk is not None and chunk.target_gone_since is not None else None
            log.warning("chunk_lost", chunk=verdict.chunk, had_lease=verdict.leased, node=node)
            if not core.while_disk_full(functools.partial(core.lose, verdict)):
                return
            if orphaned is not None:
                self._drop(orphaned)
        if lost:
            core.look.set()

    def _watch_memory(self) -> None:
        """Stop sending well before the broker is full: a full Redis loses messages that it has handed out."""
        if is_amqp(broker_url(self._settings)):
            return  # RabbitMQ blocks who publishes, and loses nothing; the dispatcher notices.
        try:
            if self._connection is None:
                self._connection = connect(self._settings)
            facts = self._connection.default_channel.client.info("memory")
        except Exception as exc:
            self._disconnect()
            log.debug("broker_memory_unknown", error=why(exc))
            return
        most = int(facts.get("maxmemory", 0)) or int(facts.get("total_system_memory", 0))
        full = bool(most) and int(facts.get("used_memory", 0)) > MEMORY_SHARE * most
        self._core.trouble("broker_memory", "live", full)

    def _waiting(self, name: str) -> int | None:
        """Messages that wait in a queue; None when the broker does not say."""
        try:
            if self._connection is None:
                self._connection = connect(self._settings)
            channel = self._connection.channel()
            try:
                declared = queue(self._settings, name).bind(channel).queue_declare(passive=True)
                return int(declared.message_count if hasattr(declared, "message_count") else declared[1])
            finally:
                channel.close()
        except Exception as exc:
            if str(getattr(exc, "reply_code", "")) == "404":
                return 0  # No such queue: RabbitMQ lost it; on Redis, an empty one does not exist.
            self._disconnect()
            log.debug("queue_length_unknown", queue=name, error=why(exc))
            return None

    def _drop(self, name: str) -> None:
        """Delete the queue of a worker that is gone, with what waits in it; it declares it anew if it comes back.

        Should this fail, or a message come back to the queue later: the queue ends an hour after its last use.
        """
        try:
            if self._connection is None:
                self._connection = connect(self._settings)
            delete_queue(self._settings, self._connection, name)
        except Exception as exc:
            self._disconnect()
            log.info("queue_not_deleted", queue=name, error=why(exc))

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        let_go(connection)
