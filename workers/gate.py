"""Lets a worker stop taking chunks, and take them again, while it stays connected."""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.worker import state as worker_state

from common import logs
from workers.abort import Abort
from workers.credit import Credit
from workers.node import Node

log = logs.get(__name__)


class Gate(bootsteps.StartStopStep):  # type: ignore[misc]
    """Consumers are cancelled and begun on the main thread; `shut`, `open` and `end` may be called from any.

    Not `close`: celery calls a step's method of that name, and `start`, `stop`, `shutdown` and `terminate`, itself.
    """

    requires = (Credit,)

    def __init__(self, c: Any, **options: Any) -> None:
        super().__init__(c, **options)
        self._node: Node = c.app.batchmill_node
        self._consumer = c

    def start(self, c: Any) -> None:
        """With every connection: consumers begin anew, which must not be while the gate is shut."""
        self._consumer = c
        self._node.gate = self
        if not self._node.taking:
            self.shut()

    def shut(self) -> None:
        """Take no more chunks, then give back those that are here."""
        self._consumer.hub.call_soon(self._shut)

    def open(self) -> None:
        """Take chunks again."""
        self._consumer.hub.call_soon(self._open)

    def end(self, status: int) -> None:
        """Let the worker end as after a signal, with this status."""
        worker_state.should_stop = status

    def _shut(self) -> None:
        for name in self._node.queues:
            if self._consumer.task_consumer is not None and self._consumer.task_consumer.consuming_from(name):
                self._consumer.cancel_task_queue(name)
        # Only now, or the broker would hand them to us again.
        self._node.abort_all(Abort.DRAIN)

    def _open(self) -> None:
        queues = self._consumer.app.amqp.queues
        for name in self._node.queues:
            queues.select_add(queues[name])
            self._consumer.add_task_queue(name)
