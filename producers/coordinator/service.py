"""The coordinator of one shard: leads, reads its ledger, and runs its threads until it is told to stop.

Threads: results (consume, log, acknowledge), commits (fsync), dispatch (read, publish), live (leases, losses),
finalizer and finalizer-large (assembly), copies (of the ledger into an object store), heartbeat, dead (letters), intake
(`batchmill.submit`), watch (for new batches), and control, which is the calling one.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from common import collector, metrics
from common import registry as registry_module
from common.broker import codecs
from common.errors import StoreFull, Unreachable, UsageError
from common.live import LiveState
from common.logs import get, why
from common.places import expanded, store_url
from common.publisher import Publisher
from common.registry import Registry
from common.settings import Settings
from common.store import LocalStore, Store, open_store
from producers.coordinator.aggregator import Aggregator
from producers.coordinator.book import Book
from producers.coordinator.control import Control
from producers.coordinator.core import Core, Ousted, trouble_of
from producers.coordinator.dead_letters import DeadLetters
from producers.coordinator.dispatcher import Dispatcher
from producers.coordinator.engine_size import EngineSize
from producers.coordinator.finalizer import Finalizer
from producers.coordinator.intake_queue import IntakeQueue
from producers.coordinator.leadership import HEARTBEAT_S, Leadership
from producers.coordinator.ledger import DiskFull, Ledger
from producers.coordinator.live_view import LiveView
from producers.coordinator.log_copies import LogCopies, fetch
from producers.coordinator.recovery import recover
from producers.coordinator.status_files import StatusFiles

log = get(__name__)

#: Seconds to wait for each thread at the end.
_JOIN_S = 15.0
#: Seconds between attempts to begin on a full disk.
_FULL_S = 1.0


def run(settings: Settings, shard: int = 0) -> None:
    """Coordinate a shard until SIGTERM, SIGINT or SIGHUP (then it returns), or until another coordinator takes over.

    Raises `UsageError` for settings that cannot work, `Unreachable` when the store cannot be opened, `Ousted` when
    another one leads, and whatever else a part of it failed with: start it again, and it goes on from its ledger.
    """
    if not 0 <= shard < settings.scheduler.shards:
        raise UsageError(f"shard {shard} does not exist: scheduler.shards is {settings.scheduler.shards}")
    codecs(settings)  # A missing key is a mistake to be told of before anything starts.
    store = open_store(store_url(settings))
    stop = threading.Event()
    collector.settle()
    with _signals(stop):
        Service(settings, store, shard, stop).run()


def ledger_folder(settings: Settings, store: Store, shard: int) -> Path:
    """Where the shard's ledger lies; `UsageError` when the store is not a local folder and no `wal_dir` is set."""
    if settings.store.wal_dir:
        root = expanded(settings.store.wal_dir)
    elif isinstance(store, LocalStore):
        root = store.root
    else:
        raise UsageError(f"store.wal_dir is not set: the ledger of {store.url} needs a folder on a local disk")
    return root.absolute() / "wal" / str(shard)


class Service:
    """One life of a coordinator. `stop` ends it cleanly."""

    def __init__(
        self, settings: Settings, store: Store, shard: int, stop: threading.Event, registry: Registry | None = None
    ) -> None:
        self._settings = settings
        self._store = store
        self._shard = shard
        self._stop = stop
        self._registry = registry if registry is not None else _registry()
        self.core: Core | None = None

    def run(self) -> None:
        """See `run` above."""
        folder = ledger_folder(self._settings, self._store, self._shard)
        leadership = Leadership(self._store, self._shard, folder, self._settings.scheduler.takeover_s)
        try:
            while not self._stop.is_set():
                try:
                    if leadership.acquire(self._stop):
                        self._lead(leadership, folder)
                    return
                except (OSError, DiskFull, StoreFull) as exc:
                    if trouble_of(exc) != "disk_full":
                        raise
                    # It cannot even say so in the store; it goes on when there is space.
                    log.error("disk_full", shard=self._shard)
                    self._stop.wait(_FULL_S)
        finally:
            leadership.close()

    def _lead(self, leadership: Leadership, folder: Path) -> None:
        settings, store = self._settings, self._store
        core = Core(Book(), Ledger(folder, leadership.epoch), self._shard, leadership.epoch)
        self.core = core
        leading = metrics.LEADER.labels(shard=str(self._shard))
        leading.set(leadership.epoch)
        chunks, results = codecs(settings)
        files = StatusFiles(store)
        finalizer = Finalizer(core, store, leadership, files)
        control = Control(core, store, leadership, finalizer, files, settings.scheduler.lease_s)
        aggregator = Aggregator(core, settings, results, Publisher(settings))
        sizes = EngineSize(settings, self._registry)
        dispatcher = Dispatcher(core, store, settings, chunks, Publisher(settings), sizes)
        live = LiveView(core, settings, LiveState(settings))
        submissions = IntakeQueue(core, store, settings, self._registry, Publisher(settings))

        copies = None
        if not isinstance(store, LocalStore):
            copies = LogCopies(core, store, leadership, settings.store.wal_copy_s)
        beating = core.spawn("heartbeat", lambda: _beat(core, leadership))
        leadership.check()
        if copies is not None:
            fetch(store, self._shard, folder)
        control.open_new()
        recover(core.book, core.ledger)
        if copies is not None:
            copies.begin()
        watching = core.spawn("stop", lambda: self._watch_stop(core))
        threads = [
            core.spawn("results", aggregator.run),
            core.spawn("dispatch", dispatcher.run),
            core.spawn("live", live.run),
            core.spawn("finalizer", finalizer.run_small),
            core.spawn("finalizer-large", finalizer.run_large),
            core.spawn("intake", submissions.run),
            core.spawn("dead", DeadLetters(core, settings).run),
            core.spawn("watch", control.news.watch),
        ]
        if copies is not None:
            threads.append(core.spawn("copies", copies.run))
        commits = core.spawn("commits", aggregator.run_commits)
        try:
            control.run()
        except Exception as exc:
            core.fail(exc)
        core.shut()
        finalizer.wake()
        for thread in (*threads, commits, beating, watching):
            thread.join(_JOIN_S)
        leading.set(0)
        self._end(core, control, leadership, copies)

    def _end(self, core: Core, control: Control, leadership: Leadership, copies: LogCopies | None) -> None:
        fatal = core.fatal
        if isinstance(fatal, Ousted):
            log.error("ousted", shard=self._shard, epoch=leadership.epoch)
            raise fatal
        if fatal is not None:
            log.error("coordinator_failed", shard=self._shard, error=type(fatal).__name__, exc_info=fatal)
            raise fatal
        core.ledger.close()
        with contextlib.suppress(OSError, Unreachable, Ousted):
            control.say_all(last=True)
            if copies is not None:
                copies.finish()
        leadership.resign()
        log.info("stopped", shard=self._shard)

    def _watch_stop(self, core: Core) -> None:
        while not core.stop.is_set():
            if self._stop.wait(0.2):
                core.shut()


def _beat(core: Core, leadership: Leadership) -> None:
    while not core.stop.is_set():
        try:
            leadership.check()
            leadership.beat()
        except (OSError, Unreachable) as exc:
            # A store that is away for long costs the lead, as it should.
            log.warning("heartbeat_failed", error=why(exc))
        core.stop.wait(HEARTBEAT_S)


def _registry() -> Registry | None:
    try:
        return registry_module.load()
    except UsageError as exc:
        log.warning("no_registry", reason=str(exc))
        return None


@contextlib.contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP set `stop`, where signals can be handled at all (the main thread)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A hangup that is ignored (nohup) stays so.
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    earlier = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
