"""Our Celery request: takes nothing from a message but a chunk's id and its blob, and knows when a copy runs already.

Celery obeys what a message says beside its arguments (callbacks, chains, ETA, expiry, time limits, in the headers or in
a JSON body), so a message could make a worker publish tasks. And monitors ask for raw arguments. Neither happens here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

from celery.worker import state
from celery.worker.request import Request

from common import logs, serializer
from common.messages import TASK_INFER

_CHUNK_ID = re.compile(r"^chunk_[0-9a-hjkmnp-tv-z]{26}$")
#: What coordinators write: ids and counts. Anything else is not shown.
_ARGSREPR = re.compile(r"^[\w@.,=: +-]{1,300}$", re.ASCII)

log = logs.get(__name__)


def refusal(message: Any) -> str | None:
    """Why a message cannot be a chunk, or None. Looks at headers only."""
    if message.errors:
        return "does not decode"
    if message.content_type != serializer.CONTENT_TYPE:
        return f"content type {str(message.content_type)[:60]!r} is not accepted"
    headers = message.headers
    if not isinstance(headers, dict) or headers.get("task") != TASK_INFER:
        return "is not a chunk"
    if not isinstance(headers.get("id"), str) or not _CHUNK_ID.match(headers["id"]):
        return "has no chunk id"
    if not isinstance(message.body, (bytes, str, memoryview)):
        return "has no body"
    return None


class Deliveries:
    """The deliveries of each chunk that is here: the one that runs and later copies that joined it."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[ChunkRequest]] = {}
        self._lock = threading.Lock()

    def arrive(self, request: ChunkRequest) -> bool:
        """True when this is the first; else it has joined the copy that runs, if its body is the same."""
        with self._lock:
            running = self._by_id.get(request.id)
            if running is None:
                self._by_id[request.id] = [request]
                return True
            if running[0].body != request.body:
                return True
            running.append(request)
            return False

    def settle(self, request: ChunkRequest) -> list[ChunkRequest]:
        """All deliveries that end with this one, the newest first; later copies count as new."""
        with self._lock:
            running = self._by_id.get(request.id)
            if running is None or running[0] is not request:
                return [request]
            del self._by_id[request.id]
            return running[::-1]

    def owner(self, request: ChunkRequest) -> ChunkRequest:
        """The delivery whose task runs."""
        with self._lock:
            running = self._by_id.get(request.id)
            return running[0] if running is not None and request in running else request


deliveries = Deliveries()


class ChunkRequest(Request):  # type: ignore[misc]
    """A delivery of a chunk. Settling it settles the copies that joined it."""

    def __init__(self, message: Any, headers: dict[str, Any] | None = None, **options: Any) -> None:
        given = message.headers if headers is None else headers
        shown = given.get("argsrepr")
        if not isinstance(shown, str) or not _ARGSREPR.match(shown):
            shown = f"chunk={given['id']}"
        clean = {
            "lang": "py",
            "task": TASK_INFER,
            "id": given["id"],
            "root_id": given["id"],
            "parent_id": None,
            "group": None,
            "argsrepr": shown,
            "kwargsrepr": "{}",
            "origin": "coordinator",
            "ignore_result": True,
        }
        super().__init__(message, headers=clean, **options)

    #: The consumer that received it; set by `strategy`.
    consumer: Any = None

    def info(self, **_: Any) -> dict[str, Any]:
        """What monitors get, whether they ask for safe information or not."""
        found: dict[str, Any] = super().info(safe=True)
        return found

    def execute_using_pool(self, pool: Any, **kwargs: Any) -> Any:
        """Run it, unless a copy runs: then this delivery ends with that one."""
        if not deliveries.arrive(self):
            log.info("a copy of a running chunk joins it", chunk=self.id)
            return None
        try:
            return super().execute_using_pool(pool, **kwargs)
        except BaseException:
            deliveries.settle(self)
            raise

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """A person's revoke, which may name a copy that only joined."""
        owner = deliveries.owner(self)
        if owner is self:
            super().terminate(pool, signal)
        else:
            owner.terminate(pool, signal)

    def acknowledge(self) -> None:
        """Acknowledge every delivery of the chunk whose channel still stands."""
        self._settle(Request.acknowledge)

    def reject(self, requeue: bool = False) -> None:
        """Give every delivery of the chunk back."""
        self._settle(lambda request: Request.reject(request, requeue))

    def _settle(self, how: Callable[[ChunkRequest], None]) -> None:
        if self.acknowledged:
            return
        for request in deliveries.settle(self):
            if _stands(request.message.channel):
                how(request)
            else:
                # Its connection is gone, and with it the delivery: the broker has sent a copy, or will.
                request.acknowledged = True
                if how is Request.acknowledge:
                    request.consumer.call_soon_ack(release_orphan, request.consumer, request.message)
            if request is not self:
                state.task_ready(request)


def _stands(channel: Any) -> bool:
    if hasattr(channel, "is_open"):  # RabbitMQ
        return channel.connection is not None and bool(channel.is_open)
    return not getattr(channel, "closed", False)


def release_orphan(consumer: Any, message: Any) -> None:
    """Redis: forget an unacked message whose connection broke, over the connection of now.

    It keeps its tag through every redelivery, so this spares a second run after the visibility timeout.
    """
    if consumer.connection is None or consumer.connection.transport.driver_type != "redis":
        return
    qos = consumer.task_consumer.channel.qos
    try:
        qos._remove_from_indices(message.delivery_tag).execute()
    except consumer.connection_errors as exc:
        log.debug("an orphan stays until its visibility timeout", error=type(exc).__name__)


def strategy(task: Any, app: Any, consumer: Any, **_: Any) -> Callable[..., None]:
    """What the consumer does with a message of this task (Celery's own strategy decodes bodies and obeys ETAs)."""
    hostname, eventer = consumer.hostname, consumer.event_dispatcher

    def on_message(message: Any, _payload: Any, ack: Any, reject: Any, _callbacks: Any) -> None:
        request = ChunkRequest(
            message,
            on_ack=ack,
            on_reject=reject,
            app=app,
            hostname=hostname,
            eventer=eventer,
            task=task,
            connection_errors=consumer.connection_errors,
        )
        request.consumer = consumer
        if request.revoked():
            return
        request.send_event(
            "task-received", name=request.name, args=request.argsrepr, kwargs=request.kwargsrepr, root_id=request.id
        )
        state.task_reserved(request)
        consumer.on_task_request(request)

    return on_message
