"""How many chunks a worker holds: K, and more while those it holds cannot keep the engine full.

A chunk keeps its place until its slowest request is answered. With K places alone, a few long answers in each of K
chunks would leave the engine nearly empty while work is queued. So a worker whose engine runs low takes another chunk,
and gives the place back once there is enough again. It never holds a chunk that it does not run. What was sent to it
alone has a place at once: that was lost with another worker, failed there, or is awaited at the end of the work.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.worker.consumer.tasks import Tasks
from kombu import Consumer

from common import logs
from workers.node import Node

#: Chunks a worker holds, at most.
MOST = 32
#: Seconds between looks, besides those that the engine running low asks for.
LOOK_S = 0.5

log = logs.get(__name__)


def grown(allowed: int, held: int, outstanding: int, enough: int, own: int = 0) -> int:
    """Places for chunks after a look, when every one is taken: one more when the engine runs low, else one for each of
    the `own` chunks that wait for this worker alone.
    """
    if held < allowed:
        return allowed
    if outstanding < enough:
        return min(MOST, allowed + 1)
    # What it holds beyond its places (by a queue that has its own) is no reason for more of them.
    return min(MOST, max(allowed, held + own)) if own else allowed


def shrunk(allowed: int, base: int, outstanding: int, enough: int) -> int:
    """Places after a chunk has ended: one less, but never under `base`, while the others are enough."""
    return max(base, allowed - 1) if outstanding >= enough else allowed


class Credit(bootsteps.StartStopStep):  # type: ignore[misc]
    """Adjusts the consumer's prefetch. On the main thread.

    Redis counts in our own process, so there it is one number. RabbitMQ fixes the prefetch of a consumer when it
    starts, so each further place is a consumer of its own with a prefetch of one; one that is cancelled while it holds
    a chunk takes no more after it. The worker's own queue has a consumer with places of its own there.
    """

    requires = (Tasks,)

    def __init__(self, c: Any, **options: Any) -> None:
        super().__init__(c, **options)
        self._node: Node = c.app.batchmill_node
        self._base: int = c.pool.limit
        self._allowed = self._base
        self._ended = 0
        self._extra: list[Consumer] = []
        self._live = False

    def start(self, c: Any) -> None:
        """With every connection: the chunks that run are about to be delivered again, and each needs a place."""
        self._extra = []
        self._live = True
        self._allowed = self._base
        self._ended = self._node.ended
        c.hub.timer.call_repeatedly(LOOK_S, self.look, (c,))
        self._node.on_low = lambda: c.hub.call_soon(self.look, c)
        c.hub.call_soon(self._set, c, max(self._base, min(c.pool.held, MOST)))

    def stop(self, _c: Any) -> None:
        """No more chunks: the consumer is being cancelled, and so are ours."""
        self._live = False
        self._node.on_low = None
        extra, self._extra = self._extra, []
        for consumer in extra:
            _cancel(consumer)

    def look(self, c: Any) -> None:
        """Adjust to how things stand."""
        if not self._live or not self._node.counts_outstanding:
            return
        if not self._node.taking:
            self._set(c, self._base)
            return
        outstanding, enough = self._node.outstanding, self._node.enough
        allowed = self._allowed
        while self._ended < self._node.ended:
            self._ended += 1
            allowed = shrunk(allowed, self._base, outstanding, enough)
        held = c.pool.held
        own = 0
        if self._redis(c) and allowed <= held < 2 * self._base:
            # As many beyond the ordinary ones as RabbitMQ gives the consumer of that queue.
            waiting = _waiting(c.task_consumer.channel, self._node.queues[1])
            own = min(waiting, 2 * self._base - held)
        self._set(c, grown(allowed, held, outstanding, enough, own))

    def _set(self, c: Any, allowed: int) -> None:
        if not self._live or allowed == self._allowed:
            return
        channel = c.task_consumer.channel
        if self._redis(c):
            channel.qos.prefetch_count = allowed
        else:
            while len(self._extra) < allowed - self._base:
                channel.basic_qos(0, 1, False)
                queue = c.app.amqp.queues[self._node.queues[0]]
                consumer = Consumer(channel, queues=[queue], on_message=c.task_consumer.on_message, auto_declare=False)
                consumer.consume()
                self._extra.append(consumer)
            while len(self._extra) > allowed - self._base:
                _cancel(self._extra.pop())
        self._allowed = allowed

    @staticmethod
    def _redis(c: Any) -> bool:
        return bool(c.connection.transport.driver_type == "redis")


def _waiting(channel: Any, queue: str) -> int:
    try:
        with channel.conn_or_acquire() as client:
            return int(client.llen(queue))
    except channel.connection_errors as exc:
        # The consumer notices a lost connection by itself.
        log.debug("could not look into the own queue", error=type(exc).__name__)
        return 0


def _cancel(consumer: Consumer) -> None:
    try:
        consumer.cancel()
    except Exception as exc:
        # The consumer notices a lost connection by itself, and its deliveries are gone with it.
        log.debug("could not cancel a consumer", error=type(exc).__name__)
