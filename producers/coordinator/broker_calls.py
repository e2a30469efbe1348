"""Tells apart what a transport raises when the broker is away from failures of our own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import amqp
import kombu.exceptions
import redis
from kombu import Connection

from common.errors import Unreachable
from common.logs import get, why

log = get(__name__)

#: `KeyError`: kombu's Redis poller lets one escape after a restart of the server (kombu issue 2582).
_KINDS = (redis.RedisError, amqp.AMQPError, kombu.exceptions.KombuError, Unreachable, OSError, KeyError)


class BrokerTrouble(Exception):
    """The broker went away; `kind` names the error, `reason` is what a log may say of it."""

    def __init__(self, exc: Exception) -> None:
        self.kind = type(exc).__name__
        self.reason = why(exc)
        super().__init__(self.reason)


def answers(kind: str) -> bool:
    """True for an error by which a Redis says that its memory is used up: that is no broker that is away.

    The live view sees and names it; named `broker_unreachable` it would send a person looking in the wrong place.
    """
    return kind == redis.exceptions.OutOfMemoryError.__name__


@contextlib.contextmanager
def broker_calls() -> Iterator[None]:
    """Around calls of the transport, and nothing else: its errors become `BrokerTrouble`; a timeout passes as it is."""
    try:
        yield
    except TimeoutError:
        raise
    except _KINDS as exc:
        raise BrokerTrouble(exc) from None


def let_go(connection: Connection | None) -> None:
    """Close a connection, whatever state it is in; what it held comes again."""
    if connection is None:
        return
    try:
        if connection.transport.driver_type == "amqp":
            # No handshake: a queue that does not answer would hold it up for a minute.
            connection.collect(socket_timeout=1)
        else:
            connection.release()
    except Exception as exc:
        log.debug("release_failed", error=type(exc).__name__)
