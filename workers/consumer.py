"""The worker's consumer: Celery's, without the parts we have no use for and with a grave for what it would delete.

Celery acks messages it cannot decode and rejects unknown tasks, logging their bodies: they would be gone, and prompts
would be in the log. Here they go to the queue `dead`, confirmed, before they are acked.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from celery.worker.consumer import Consumer
from vine import promise

from common import logs
from workers.node import Node
from workers.outbox import Abandoned
from workers.request import refusal

log = logs.get(__name__)
_logger = logging.getLogger(__name__)


class Grave(threading.Thread):
    """Publishes refused messages to `dead` off the main thread, and acks each once that is confirmed."""

    def __init__(self, node: Node) -> None:
        super().__init__(name="grave", daemon=True)
        self._node = node
        self._queue: queue.SimpleQueue[tuple[Any, str, Callable[[], None]]] = queue.SimpleQueue()

    def bury(self, message: Any, reason: str, ack: Callable[[], None]) -> None:
        """Take a message; `ack` is called from this thread."""
        self._queue.put((message, reason, ack))

    def run(self) -> None:
        """See the class."""
        while True:
            message, reason, ack = self._queue.get()
            name = str((message.delivery_info or {}).get("routing_key"))
            try:
                self._node.outbox.bury(message.body, reason, name)
            except Abandoned:
                return
            ack()


class ChunkConsumer(Consumer):  # type: ignore[misc]
    """See the module. Its `Blueprint` leaves out delayed delivery (28 queues for ETAs nobody may set)."""

    _grave: Grave | None = None

    class Blueprint(Consumer.Blueprint):  # type: ignore[misc]
        """The steps that remain, ours among them."""

        default_steps = (
            "celery.worker.consumer.connection:Connection",
            "celery.worker.consumer.events:Events",
            "workers.heart:Heart",
            "celery.worker.consumer.control:Control",
            "celery.worker.consumer.tasks:Tasks",
            "workers.visibility:RenewVisibility",
            "workers.credit:Credit",
            "workers.gate:Gate",
            "celery.worker.consumer.consumer:Evloop",
        )

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Throw the broken connection away, however badly that goes.

        kombu closes a Redis channel twice when Redis is gone, and the second time stumbles over what the first has
        cleared; Celery takes that for the end of the worker, which would throw the engine away as well.
        """
        try:
            super().on_connection_error_after_connected(exc)
        except Exception as again:
            log.warning("the broken connection did not close cleanly", error=type(again).__name__)
            self.connection = None

    def create_task_handler(self, promise: Any = promise) -> Callable[[Any], None]:
        """Celery's handler for chunks, the grave for everything else."""
        handle = super().create_task_handler(promise)

        def on_message(message: Any) -> None:
            reason = refusal(message)
            if reason is None:
                handle(message)
            else:
                self._bury(message, reason)

        return on_message

    def on_decode_error(self, message: Any, _exc: Exception) -> None:
        """kombu could not make sense of it (a compression that is none)."""
        self._bury(message, "does not decode")

    def _bury(self, message: Any, reason: str) -> None:
        log.warning("bad message", reason=reason)
        if self._grave is None:
            self._grave = Grave(self.app.batchmill_node)
            self._grave.start()
        self._grave.bury(
            message, reason, lambda: self.call_soon_ack(message.ack_log_error, _logger, self.connection_errors)
        )
