"""Queue `dead`: messages that somebody refused. Each leaves evidence in the ledger and the log, and is put away.

Workers and the coordinator put there what they cannot verify, and RabbitMQ what it delivered too often. None of it is
published again: what its requests lack is sent anew from the store. It holds prompts and answers, so it is not kept.
"""

from __future__ import annotations

import time
from typing import Any

from blake3 import blake3
from kombu import Connection

from common import metrics
from common.logs import get
from common.messages import QUEUE_DEAD
from common.settings import Settings
from producers.coordinator.broker_calls import broker_calls
from producers.coordinator.core import Core
from producers.coordinator.queue_reader import QueueReader, bytes_of
from producers.coordinator.records import Evidence, Type, encode

log = get(__name__)


class DeadLetters(QueueReader):
    """One thread: `run` until the core stops."""

    def __init__(self, core: Core, settings: Settings) -> None:
        super().__init__(core, settings, QUEUE_DEAD)

    def take(self, message: Any, connection: Connection) -> None:
        """Log that it was there, and acknowledge it once that is durable."""
        core, blob = self._core, bytes_of(message)
        origin, reason = _why(message.headers or {})
        found = Evidence(origin, reason, len(blob), blake3(blob).hexdigest(), time.time())
        log.error("dead_letter", queue=origin, reason=reason, bytes=found.bytes, digest=found.digest)
        metrics.DEAD_LETTERS.inc()
        record = encode(found)

        def keep_alive() -> None:
            self.keep_alive(connection)

        if not core.while_disk_full(lambda: core.ledger.append(Type.EVIDENCE, record), keep_alive):
            return
        if core.wait_durable(core.ledger.written):
            with broker_calls():
                message.ack()


def _why(headers: dict[str, Any]) -> tuple[str, str]:
    """The queue it was first in, and why it is here no more, both short and of printable ASCII."""
    origin = headers.get("x-queue") or headers.get("x-first-death-queue") or ""
    reason = headers.get("x-reason") or headers.get("x-first-death-reason") or "no reason given"
    return _plain(origin, 80), _plain(reason, 200)


def _plain(text: object, most: int) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in str(text)[:most])
