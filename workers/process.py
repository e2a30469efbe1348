"""One worker process, in place: the engine, the pool and the consumer, until it is drained or its engine dies."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from types import FrameType
from typing import Any

from celery import platforms, signals
from celery.apps.worker import Worker
from celery.exceptions import Reject, SecurityWarning
from celery.worker import state

from common import collector, logs, metrics
from common.registry import Registry
from common.settings import Settings
from workers.node import Node
from workers.tasks import make_worker_app

#: Seconds that threads of others (the engine's libraries) have to end after us.
LEAVE_S = 10.0
#: A worker's metrics are served at `telemetry.metrics_port` plus this plus its first device.
METRICS_OFFSET = 100

log = logs.get(__name__)


class ChunkWorker(Worker):  # type: ignore[misc]
    """Celery's worker with signals that drain: the first asks, the second skips what is left of the drain."""

    def install_platform_tweaks(self, _worker: Any) -> None:
        """Only what we handle ourselves; Celery's cold shutdown would revoke what a drain gives back."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, self._on_signal)

    def set_process_status(self, _info: str) -> None:
        """What `ps` shows (where setproctitle is installed, as vLLM does)."""
        platforms.set_process_title(f"workers {self.hostname}")

    def setup_logging(self, **_: Any) -> bool:
        """Logging is set up by the command."""
        return True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        again = state.should_stop is not None
        # A flag, nothing else: the main thread may be anywhere.
        state.should_stop = 0
        if (again or number == signal.SIGQUIT) and self.pool is not None:
            self.pool.hurry.set()


def run(settings: Settings, registry: Registry, model: str, name: str) -> int:
    """Serve until told to stop; returns the exit status. `BatchmillError` when the worker cannot start."""
    # Containers run as root; what Celery warns of there is pickle, which nothing here accepts.
    warnings.simplefilter("ignore", SecurityWarning)
    signals.setup_logging.connect(_keep_logging, weak=False)
    signals.worker_ready.connect(_settle, weak=False)
    logging.getLogger("amqp").setLevel(logging.WARNING)
    logging.getLogger("celery.app.trace").addFilter(_plain_rejects)
    metrics.serve(settings.telemetry, METRICS_OFFSET + _first_device())
    node = Node(settings, registry, model, name)
    app = make_worker_app(node)
    worker = ChunkWorker(
        app=app,
        hostname=name,
        pool_cls="workers.pool:EnginePool",
        quiet=True,
        task_events=True,
        without_gossip=True,
        without_mingle=True,
        loglevel=settings.telemetry.log_level.upper(),
    )
    worker.start()
    status = int(worker.exitcode or 0)
    node.close()
    # Nothing of ours runs any more; a library's thread that does must not keep the process.
    leave = threading.Timer(LEAVE_S, os._exit, args=(status,))
    leave.daemon = True
    leave.start()
    if node.failure is not None:
        raise node.failure
    log.info("worker gone", node=name, status=status)
    return status


def _first_device() -> int:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return int(first) if first.isdigit() else 0


def _settle(**_: Any) -> None:
    """The engine is loaded, the consumer connected: what is here by now stays."""
    collector.settle()


def _keep_logging(**_: Any) -> None:
    """Having a receiver is what keeps Celery from setting up logging of its own."""


def _plain_rejects(record: logging.LogRecord) -> bool:
    """A chunk that is given back is no fault: Celery's line about it stays, without a traceback."""
    if record.exc_info and record.exc_info[0] is not None and issubclass(record.exc_info[0], Reject):
        record.exc_info = None
    return True
