"""Tells apart what a transport raises when the broker is away from failures of our own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import amqp
import kombu.exceptions
import redis

from common.errors import Unreachable

#: `KeyError`: kombu's Redis poller lets one escape after a restart of the server (kombu issue 2582).
_KINDS = (redis.RedisError, amqp.AMQPError, kombu.exceptions.KombuError, Unreachable, OSError, KeyError)


class BrokerTrouble(Exception):
    """The broker went away; `kind` names the error, without its text."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@contextlib.contextmanager
def broker_calls() -> Iterator[None]:
    """Around calls of the transport, and nothing else: its errors become `BrokerTrouble`; a timeout passes as it is."""
    try:
        yield
    except TimeoutError:
        raise
    except _KINDS as exc:
        raise BrokerTrouble(type(exc).__name__) from None
