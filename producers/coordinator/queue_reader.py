"""Reads one queue message by message, over and over when the broker goes away: what `intake` and `dead` share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from kombu import Connection, Consumer

from common.broker import connect, queue
from common.logs import get
from common.settings import Settings
from producers.coordinator.backoff import Reconnect
from producers.coordinator.broker_calls import BrokerTrouble, broker_calls, let_go
from producers.coordinator.core import Core

log = get(__name__)

_IDLE_S = 0.5


class QueueReader(ABC):
    """One thread: `run` until the core stops. A subclass says in `take` what becomes of a message."""

    def __init__(self, core: Core, settings: Settings, name: str) -> None:
        self._core = core
        self._settings = settings
        self._name = name
        self._arrived: deque[Any] = deque()
        self._reconnect = Reconnect()
        self._heartbeat_at = 0.0

    def run(self) -> None:
        """Consume until the core stops."""
        while not self._core.stop.is_set():
            try:
                self._consume()
            except BrokerTrouble as exc:
                delay = self._reconnect.failed()
                log.warning("consumer_lost", queue=self._name, error=exc.reason, again_in_s=delay)
                self._core.stop.wait(delay)
        self.close()

    def close(self) -> None:  # noqa: B027
        """Let go of what the reader holds besides its connection; nothing, unless a subclass says otherwise."""

    @abstractmethod
    def take(self, message: Any, connection: Connection) -> None:
        """Deal with a message and acknowledge it. What it raises ends the coordinator, but for `BrokerTrouble`."""

    def subscribe(self, connection: Connection) -> None:
        """Declare the queue and consume from it, a message at a time."""
        self.consume(connection.channel())

    def consume(self, channel: Any, *, declare: bool = True) -> None:
        """Consume over a channel."""
        wanted = queue(self._settings, self._name)
        wanted.no_declare = not declare
        consumer = Consumer(channel, [wanted], on_message=self._arrived.append, accept=None, prefetch_count=1)
        consumer.consume()

    def keep_alive(self, connection: Connection) -> None:
        """Send a heartbeat when one is due."""
        now = time.monotonic()
        if connection.heartbeat and now - self._heartbeat_at >= self._settings.broker.heartbeat_s / 4:
            self._heartbeat_at = now
            with broker_calls():
                connection.heartbeat_check()

    def _consume(self) -> None:
        connection: Connection | None = None
        self._arrived.clear()
        try:
            with broker_calls():
                connection = connect(self._settings)
                self.subscribe(connection)
            while not self._core.stop.is_set():
                try:
                    with broker_calls():
                        connection.drain_events(timeout=_IDLE_S)
                        self._reconnect.worked()
                except TimeoutError:
                    pass
                while self._arrived:
                    self.take(self._arrived.popleft(), connection)
                self.keep_alive(connection)
        finally:
            let_go(connection)


def bytes_of(message: Any) -> bytes:
    """The body of a message as it came."""
    body = message.body
    return body.encode("utf-8", "surrogateescape") if isinstance(body, str) else bytes(body)
