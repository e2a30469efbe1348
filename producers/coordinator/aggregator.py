"""Takes in results: verify, log, and acknowledge once the log is durable.

The consumer's thread appends; a second thread makes durable whatever was appended meanwhile (one fsync for many
messages). Acknowledgements go out on the consumer's thread, which alone may use the connection.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from kombu import Connection, Consumer

from common import metrics
from common.broker import connect, queue
from common.codec import Codec
from common.errors import BadMessage
from common.logs import get
from common.messages import QUEUE_DEAD, Crash, Kind, Results, decode_results, kinds, lengths, results_queue
from common.publisher import Publisher
from common.settings import Settings
from producers.coordinator.backoff import Reconnect
from producers.coordinator.broker_calls import BrokerTrouble, answers, broker_calls, let_go
from producers.coordinator.core import RESULTS_PREFETCH, Core
from producers.coordinator.lanes import Outcome
from producers.coordinator.losses import GRACE_S
from producers.coordinator.queue_reader import bytes_of
from producers.coordinator.records import Type

log = get(__name__)

_IDLE_S = 0.5
_BUSY_S = 0.01


class _Unacked(NamedTuple):
    durable_at: int
    message: Any


class Aggregator:
    """Two threads: `run` consumes, `run_commits` makes durable."""

    def __init__(self, core: Core, settings: Settings, codec: Codec, publisher: Publisher) -> None:
        self._core = core
        self._settings = settings
        self._codec = codec
        self._publisher = publisher
        self._queue = results_queue(core.shard)
        self._arrived: deque[Any] = deque()
        self._unacked: deque[_Unacked] = deque()
        self._reconnect = Reconnect()
        self._heartbeat_at = 0.0
        #: Results of batches that are ended or unknown, dropped.
        self.dropped = 0
        #: Messages refused.
        self.refused = 0

    # -- durability ------------------------------------------------------------------------------------------------

    def run_commits(self) -> None:
        """Group commit until the core stops; an error ends the coordinator, which then reads what the disk has."""
        core = self._core
        while True:
            more = core.ledger.wait_for_more(core.durable, 0.5)
            if more:
                before = core.durable
                with metrics.LEDGER_SYNC_SECONDS.time():
                    written = core.ledger.sync()
                core.made_durable(written)
                metrics.LEDGER_BYTES.inc(max(0, written - before))
            elif core.stop.is_set():
                return

    # -- consuming -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Consume until the core stops, over and over when the broker goes away."""
        core = self._core
        first = True
        while not core.stop.is_set():
            try:
                self._consume(first)
            except BrokerTrouble as exc:
                delay = self._reconnect.failed()
                log.warning("results_consumer_lost", error=exc.reason, again_in_s=delay)
                core.trouble("broker_unreachable", "aggregator", not answers(exc.kind))
                core.stop.wait(delay)
            first = False
        self._publisher.close()

    def _consume(self, first: bool) -> None:
        core = self._core
        connection: Connection | None = None
        self._arrived.clear()
        self._unacked.clear()  # They were given back with their connection and come again.
        core.results_seen.again()
        try:
            with broker_calls():
                connection = connect(self._settings)
                consumer = Consumer(
                    connection.channel(),
                    [queue(self._settings, self._queue)],
                    on_message=self._arrive,
                    accept=None,
                    prefetch_count=RESULTS_PREFETCH,
                )
                consumer.consume()
            if not first:
                core.hold(self._settings.scheduler.lease_s + GRACE_S)
            core.trouble("broker_unreachable", "aggregator", False)
            while not core.stop.is_set():
                self._step(connection)
            self._finish()
        finally:
            let_go(connection)

    def _step(self, connection: Connection) -> None:
        try:
            with broker_calls():
                connection.drain_events(timeout=_BUSY_S if self._unacked else _IDLE_S)
                self._reconnect.worked()
        except TimeoutError:
            if not self._unacked:
                self._core.results_seen.idle(time.monotonic())
        # Not in a callback of the transport: there, a failure of ours would pass for one of the broker's.
        while self._arrived:
            self._on_message(self._arrived.popleft(), connection)
            self._core.results_seen.took()
        with broker_calls():
            self._acknowledge()
            self._heartbeat(connection)

    def _acknowledge(self) -> None:
        durable = self._core.durable
        while self._unacked and self._unacked[0].durable_at <= durable:
            self._unacked.popleft().message.ack()

    def _finish(self) -> None:
        """Acknowledge what is durable by now; the rest comes again."""
        if self._unacked and self._core.fatal is None:
            self._core.made_durable(self._core.ledger.sync())
            with broker_calls():
                self._acknowledge()

    def _heartbeat(self, connection: Connection) -> None:
        now = time.monotonic()
        if connection.heartbeat and now - self._heartbeat_at >= self._settings.broker.heartbeat_s / 4:
            self._heartbeat_at = now
            connection.heartbeat_check()

    def _arrive(self, message: Any) -> None:
        self._arrived.append(message)
        self._core.results_seen.arrived()

    def _on_message(self, message: Any, connection: Connection) -> None:
        blob = bytes_of(message)
        try:
            results, payload = self._verified(blob)
        except BadMessage as bad:
            self._refuse(message, blob, bad.reason)
            return

        def keep_alive() -> None:
            with broker_calls():
                self._heartbeat(connection)

        self._core.while_disk_full(lambda: self._take_in(results, payload, message), keep_alive)

    def _verified(self, blob: bytes) -> tuple[Results, bytes]:
        payload = self._codec.open(self._queue, blob)
        results = decode_results(payload)
        for part in results.parts:
            ends = np.cumsum(lengths(part), dtype=np.int64) - 1
            if len(ends) and not (np.frombuffer(part.lines, np.uint8)[ends] == 0x0A).all():
                raise BadMessage("a result line does not end where it should")
        if results.seq < 0:
            raise BadMessage("a negative sequence number")
        return results, payload

    def _take_in(self, results: Results, payload: bytes, message: Any) -> None:
        core = self._core
        with core.lock:
            book = core.book
            needing = book.needing(results)
            if not needing:
                late = sum(len(part.kind) for part in results.parts)
                self.dropped += late
                metrics.RESULTS_REPEATED.inc(late)
                if late:
                    log.info("results_dropped", chunk=results.chunk, node=results.node, results=late)
                # Nothing to log, so nothing to wait for.
                self._unacked.append(_Unacked(0, message))
                return
            place = core.ledger.append(Type.RESULTS, payload, needing)
            outcome = book.results(results, place, time.monotonic())
            ticket = core.ledger.written
            if results.crash is not None:
                self._note_crash(results, results.crash)
            for progress in outcome.touched:
                core.dirty.add(progress.id)
                if progress.complete:
                    core.ending.add(progress.id)
                    core.control.set()
        self.dropped += outcome.unknown
        self._count(results, outcome)
        core.dispatch.set()
        self._unacked.append(_Unacked(ticket, message))

    @staticmethod
    def _note_crash(results: Results, crash: Crash) -> None:
        metrics.CRASHES.labels(model=results.model).inc()
        suspects = sum(len(inside.pos) // 4 for inside in crash.inside)
        log.warning("worker_crashed", node=results.node, chunk=results.chunk, reason=crash.reason, suspects=suspects)

    @staticmethod
    def _count(results: Results, outcome: Outcome) -> None:
        for part in results.parts:
            tally = np.bincount(kinds(part), minlength=4)
            for kind in Kind:
                if tally[kind]:
                    metrics.RESULTS_LOGGED.labels(kind=kind.name.lower()).inc(int(tally[kind]))
        metrics.RESULTS_REPEATED.inc(outcome.duplicates + outcome.unknown)

    def _refuse(self, message: Any, blob: bytes, reason: str) -> None:
        """Put a bad message where evidence is taken of it, and be done with it."""
        self.refused += 1
        metrics.MESSAGES_REFUSED.labels(direction="results").inc()
        with broker_calls():
            self._publisher.publish(QUEUE_DEAD, blob, headers={"x-reason": reason, "x-queue": self._queue})
        # Confirmed, so nothing is to wait for.
        self._unacked.append(_Unacked(0, message))
