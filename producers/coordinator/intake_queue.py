"""Queue `intake`: other services submit batches with a plain Celery task and get the batch's id as its result.

A task is acknowledged once its batch is in the store and its reply is sent; one that is delivered again finds its batch
by its idempotency key. What is no submission goes to the dead-letter queue.
"""

from __future__ import annotations

from typing import Any

import amqp
from kombu import Connection, Producer

from common import metrics
from common.broker import queue
from common.errors import BatchmillError, UsageError
from common.logs import get
from common.messages import QUEUE_DEAD, QUEUE_INTAKE
from common.publisher import Publisher
from common.registry import Registry
from common.settings import Settings
from common.store import Store
from producers import intake
from producers.batch import Batch
from producers.coordinator import submission
from producers.coordinator.broker_calls import BrokerTrouble, broker_calls
from producers.coordinator.core import Core
from producers.coordinator.queue_reader import QueueReader, bytes_of

log = get(__name__)


class IntakeQueue(QueueReader):
    """One thread: `run` until the core stops."""

    def __init__(
        self, core: Core, store: Store, settings: Settings, registry: Registry | None, publisher: Publisher
    ) -> None:
        super().__init__(core, settings, QUEUE_INTAKE)
        self._store = store
        self._registry = registry
        self._publisher = publisher

    def close(self) -> None:
        """Close the connection for what is refused."""
        self._publisher.close()

    def subscribe(self, connection: Connection) -> None:
        """Declare the queue, unless a sender was here first, and consume from it."""
        channel = connection.channel()
        try:
            queue(self._settings, QUEUE_INTAKE).bind(channel).declare()
        except amqp.PreconditionFailed:
            # A sender was here first and declared it its own way: any durable queue of that name will do.
            log.warning("intake_queue_declared_elsewhere", queue=QUEUE_INTAKE)
            channel = connection.channel()
        self.consume(channel, declare=False)

    def take(self, message: Any, connection: Connection) -> None:
        """Submit what it asks for, and answer."""
        task_id = submission.task_id_of(message.headers or {})
        if task_id is None:
            self._refuse(message)
            return
        try:
            batch = self._submit(bytes_of(message), task_id, connection)
        except BatchmillError as exc:
            # Its reason may quote the request, so it goes to the sender and not into the log.
            log.info("submission_refused", task=task_id, error=type(exc).__name__)
            reply = submission.failure(task_id, exc)
        except BrokerTrouble:
            raise
        except Exception as exc:
            # One task must not end the coordinator, however odd it is.
            log.error("submission_failed", task=task_id, exc_info=exc)
            reply = submission.failure(task_id, RuntimeError(f"the coordinator failed on it ({type(exc).__name__})"))
        else:
            log.info("submitted", task=task_id, batch=batch.id, requests=batch.requests, model=batch.model)
            reply = submission.success(task_id, batch.id)
        self._answer(message, reply, connection)

    def _submit(self, body: bytes, task_id: str, connection: Connection) -> Batch:
        if self._registry is None:
            raise UsageError("the coordinator has no models.yaml")
        wish = submission.read(body, self._settings.security.intake_urls)
        options = wish.options(task_id)
        if wish.url is None:
            return intake.submit_bytes(
                wish.lines(), self._store, self._settings, self._registry, options, name=f"task {task_id}"
            )

        def keep_alive(_bytes: int, _lines: int) -> None:
            self.keep_alive(connection)

        return intake.submit(wish.url, self._store, self._settings, self._registry, options, keep_alive)

    def _answer(self, message: Any, reply: dict[str, Any], connection: Connection) -> None:
        reply_to = message.properties.get("reply_to")
        with broker_calls():
            if reply_to:
                channel = connection.channel()
                try:
                    # Not declared: it is the sender's own queue. Nobody waits any more where it is gone.
                    Producer(channel, auto_declare=False).publish(
                        reply,
                        exchange="",
                        routing_key=reply_to,
                        correlation_id=message.properties.get("correlation_id") or reply["task_id"],
                        serializer="json",
                        delivery_mode=1,
                    )
                finally:
                    channel.close()
            message.ack()

    def _refuse(self, message: Any) -> None:
        body = bytes_of(message)
        reason = "not a batchmill.submit task"
        metrics.MESSAGES_REFUSED.labels(direction="intake").inc()
        log.error("bad_message", queue=QUEUE_INTAKE, reason=reason, bytes=len(body))
        with broker_calls():
            self._publisher.publish(QUEUE_DEAD, body, headers={"x-reason": reason, "x-queue": QUEUE_INTAKE})
            message.ack()
