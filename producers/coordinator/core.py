"""What the coordinator's threads share: the book and the ledger under one lock, and signals between the threads."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

from prometheus_client import Counter

from common import metrics
from common.errors import StoreFull
from common.live import WorkerFacts
from common.logs import get
from producers.coordinator.book import Book
from producers.coordinator.ledger import DiskFull, Ledger
from producers.coordinator.progress import Progress
from producers.coordinator.records import Decision, Lost, Type, encode
from producers.coordinator.results_seen import ResultsSeen

log = get(__name__)

#: Result messages that may be here and not durable: two commits and more.
RESULTS_PREFETCH = 32


def trouble_of(exc: Exception) -> str:
    """The name of the trouble that an error of store or ledger means."""
    full = isinstance(exc, DiskFull | StoreFull) or getattr(exc, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    return "disk_full" if full else "store_unreachable"


class Ousted(Exception):
    """Another coordinator has taken over the shard: this one must stop writing at once."""


class Core:
    """Shared state. `lock` guards the book; records are appended while it is held, so that log order is book order."""

    def __init__(self, book: Book, ledger: Ledger, shard: int, epoch: int) -> None:
        self.book = book
        self.ledger = ledger
        self.shard = shard
        self.epoch = epoch
        self.lock = threading.RLock()
        self.stop = threading.Event()
        #: Set when the dispatcher has reason to look again.
        self.dispatch = threading.Event()
        #: Set when the control loop has: a batch may be complete, or its status has changed at once.
        self.control = threading.Event()
        #: Set when the live state should be looked at before its time.
        self.look = threading.Event()
        #: Monotonic seconds of the last successful look at the live state.
        self.looked_at = 0.0
        #: Batches that workers must be told are cancelled.
        self.cancelled: set[str] = set()
        #: Batches whose status file is out of date.
        self.dirty: set[str] = set()
        #: What keeps work from going on, for the status files (`disk_full`, `broker_unreachable`, …), and who says so.
        self.troubles: dict[str, set[str]] = {}
        #: Batches that may have come to their end since `control` looked last.
        self.ending: set[str] = set()
        #: Live workers; None while nobody knows.
        self.workers: list[WorkerFacts] | None = None
        #: Monotonic seconds before which no chunk counts as lost.
        self.hold_until = 0.0
        #: Up to when results are taken in.
        self.results_seen = ResultsSeen(RESULTS_PREFETCH)
        #: Bytes of the ledger that are durable.
        self.durable = 0
        self._durable_changed = threading.Condition()
        self._fatal: BaseException | None = None

    # -- deciding --------------------------------------------------------------------------------------------------

    def decide(self, decision: Decision) -> Progress | None:
        """Log a decision and fold it in. `DiskFull` when it cannot be logged."""
        with self.lock:
            if decision.batch not in self.book.batches:
                return None
            place = self.ledger.append(Type.DECISION, encode(decision), (decision.batch,))
            progress = self.book.decided(decision, place)
            self.dirty.add(decision.batch)
            self.ending.add(decision.batch)
        self.dispatch.set()
        self.control.set()
        return progress

    def lose(self, lost: Lost, counter: Counter = metrics.CHUNKS_LOST) -> None:
        """Log that a chunk is given up, fold it in, and count it."""
        with self.lock:
            chunk = self.book.out.get(lost.chunk)
            if chunk is None:
                return
            self.ledger.append(Type.LOST, encode(lost), {share.batch for share in chunk.shares})
            self.book.lost(lost, time.monotonic())
            counter.labels(model=chunk.model).inc()
        self.dispatch.set()

    def hold(self, seconds: float) -> None:
        """After an outage: nothing is lost until every lease had the time to come back."""
        with self.lock:
            now = time.monotonic()
            self.hold_until = max(self.hold_until, now + seconds)
            for chunk in self.book.out.values():
                chunk.leased_at = chunk.unleased_since = chunk.missing_since = chunk.target_gone_since = None
                chunk.node = None
                chunk.sent_at = now

    # -- troubles --------------------------------------------------------------------------------------------------

    def trouble(self, name: str, whose: str, present: bool) -> None:
        """Note that something keeps work from going on, or that it does not any more, as `whose` part sees it."""
        with self.lock:
            parts = self.troubles.get(name, set())
            if (whose in parts) == present:
                return
            parts = parts | {whose} if present else parts - {whose}
            if parts:
                self.troubles[name] = parts
            else:
                del self.troubles[name]
            self.dirty.update(self.book.batches)
        (log.warning if present else log.info)("trouble", what=name, part=whose, over=not present)
        self.control.set()
        self.dispatch.set()

    def while_disk_full(self, action: Callable[[], object], between: Callable[[], None] | None = None) -> bool:
        """Run `action`, again and again while the disk is full; False when the coordinator stops meanwhile."""
        while True:
            try:
                action()
            except DiskFull:
                self.trouble("disk_full", "ledger", True)
                if self.stop.wait(0.5):
                    return False
                if between is not None:
                    between()
                continue
            if "disk_full" in self.troubles:
                self.trouble("disk_full", "ledger", False)
            return True

    # -- durability ------------------------------------------------------------------------------------------------

    def made_durable(self, written: int) -> None:
        """The first `written` bytes of the ledger are on the disk."""
        with self._durable_changed:
            self.durable = max(self.durable, written)
            self._durable_changed.notify_all()

    def wait_durable(self, written: int) -> bool:
        """Wait until the first `written` bytes are on the disk; False when the coordinator stops meanwhile."""
        with self._durable_changed:
            while self.durable < written:
                if self.stop.is_set():
                    return False
                self._durable_changed.wait(0.5)
        return True

    # -- threads ---------------------------------------------------------------------------------------------------

    def spawn(self, name: str, target: Callable[[], None]) -> threading.Thread:
        """Start a thread whose failure ends the coordinator: it starts again and reads the ledger."""

        def body() -> None:
            try:
                target()
            except BaseException as exc:
                self.fail(exc)

        thread = threading.Thread(target=body, name=f"coordinator-{name}", daemon=True)
        thread.start()
        return thread

    def fail(self, exc: BaseException) -> None:
        """Stop all threads because of `exc`; the first one counts."""
        with self.lock:
            if self._fatal is None:
                self._fatal = exc
        self.shut()

    def shut(self) -> None:
        """Let all threads end."""
        self.stop.set()
        self.dispatch.set()
        self.control.set()
        self.look.set()

    @property
    def fatal(self) -> BaseException | None:
        """What stopped the coordinator, if it was a failure."""
        return self._fatal
