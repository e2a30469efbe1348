"""One redis-py client for each channel of kombu's Redis transport.

kombu makes a new one for every command it sends beside the blocking read, up to four a message, and what a client sets
up when it is made (a table of two hundred callbacks) took a fifth of the CPU time that a message costs. A client holds
no connection, it takes one from the channel's pool for each command: so one will do, for as long as the pool is the
same.

A command whose connection was lost on its way goes once more on a new one. Else an ack would be lost while the blocking
read, which has a connection for itself, goes on: the message would stay unacked for as long as its worker lives, and
hold one of its places. All that is sent this way may come twice: acks, and messages, which count once each.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import redis as transport
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as Lost
from redis.retry import Retry

_create = transport.Channel._create_client


def _client(channel: Any, asynchronous: bool = False) -> Any:
    if asynchronous:
        # The blocking read has a connection for itself, which its client keeps.
        return _create(channel, asynchronous=True)
    known = channel.__dict__.get("_batchmill_client")
    if known is None or known[0] is not channel.pool:
        client = _create(channel)
        # Not after a timeout: the caller has waited long enough.
        client.set_retry(Retry(NoBackoff(), 1, (Lost,)))
        known = channel._batchmill_client = channel.pool, client
    return known[1]


def install() -> None:
    """Let kombu's Redis transport keep its clients; may be called again."""
    transport.Channel._create_client = _client
