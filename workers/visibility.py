"""Renews what a Redis broker holds as unacked, so that work that still runs is not delivered again.

kombu puts a message back after `visibility_timeout` seconds without asking whether its worker lives. Setting the time
of each message we hold to now, several times within that timeout, leaves it to dead workers only.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.worker.consumer.tasks import Tasks

from common import logs, redis_clock

#: Renewals within one visibility timeout.
TIMES = 4

log = logs.get(__name__)


class RenewVisibility(bootsteps.StartStopStep):  # type: ignore[misc]
    """A timer on the hub, so that it also fires while the pool drains. Nothing to do on RabbitMQ."""

    requires = (Tasks,)

    def start(self, c: Any) -> None:
        """Begin anew with each connection; the consumer cancels the timer when its connection fails."""
        if c.connection.transport.driver_type != "redis" or c.hub is None:
            return
        channel = c.task_consumer.channel
        # Before the first message is taken, which kombu notes the time of.
        with channel.conn_or_acquire() as client:
            redis_clock.follow(client)
        c.hub.timer.call_repeatedly(channel.visibility_timeout / TIMES, renew, (channel,))


def renew(channel: Any) -> int:
    """Set the time of every unacked message of a channel to now, by the server's clock; returns how many are held."""
    qos = channel.qos
    tags = [tag for tag in list(qos._delivered) if tag not in qos._dirty]
    if not tags or channel.closed:
        return 0
    try:
        with channel.conn_or_acquire() as client:
            redis_clock.follow(client)
            now = redis_clock.now()
            # XX: a message that was acked meanwhile must not come back into the index.
            client.zadd(channel.unacked_index_key, dict.fromkeys(tags, now), xx=True)
    except channel.connection_errors as exc:
        # The consumer notices a lost connection by itself.
        log.warning("could not renew unacked messages", error=type(exc).__name__)
    return len(tags)
