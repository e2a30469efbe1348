"""Confirmed publishing that outlives a broker outage: what was computed is held and sent again, never dropped."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

from tenacity import RetryCallState, Retrying, sleep_using_event, stop_when_event_set, wait_exponential_jitter

from common import logs, metrics
from common.messages import QUEUE_DEAD
from common.publisher import Publisher
from common.settings import Settings

#: Longest wait between two tries, seconds.
LONGEST_WAIT_S = 5.0
#: A connection unused for this long is closed, seconds.
IDLE_S = 60.0

log = logs.get(__name__)


class Abandoned(Exception):
    """The worker ends while the broker does not take the message; whatever it was for is delivered again."""


class Outbox:
    """Publishes from any thread. Each publish has a connection for itself; idle ones are kept for the next."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._idle: list[tuple[Publisher, float]] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._trouble = False

    def publish(self, queue: str, blob: bytes, headers: dict[str, Any] | None = None) -> None:
        """Return once the broker confirmed; tries until then. `Abandoned` after `close`."""
        publisher = self._take()
        try:
            publisher.publish(queue, blob, headers=headers)
        except Exception as exc:
            self._complain(queue, exc)
            self._insist(publisher, queue, blob, headers)
        self._put(publisher)

    def bury(self, body: Any, reason: str, queue: str) -> None:
        """Publish a message that cannot be accepted, as it came, to the queue `dead`, with its reason."""
        metrics.MESSAGES_REFUSED.labels(direction="chunk").inc()
        raw = body if isinstance(body, bytes) else str(body).encode("utf-8", "surrogateescape")
        self.publish(QUEUE_DEAD, raw, {"x-reason": _plain(reason), "x-queue": _plain(queue)})

    def tick(self) -> None:
        """Keep idle connections alive; call it at least twice in every heartbeat interval."""
        with self._lock:
            idle, self._idle = self._idle, []
        for publisher, since in idle:
            if time.monotonic() - since > IDLE_S:
                publisher.close()
                continue
            try:
                publisher.heartbeat()
            except Exception:
                # It has closed itself and opens again at the next publish.
                continue
            with self._lock:
                self._idle.append((publisher, since))

    def close(self) -> None:
        """End the tries of those who still wait for a broker."""
        self._closing.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for publisher, _ in idle:
            publisher.close()

    def _take(self) -> Publisher:
        with self._lock:
            if self._idle:
                return self._idle.pop()[0]
        return Publisher(self._settings)

    def _put(self, publisher: Publisher) -> None:
        if self._trouble:
            self._trouble = False
            log.info("the broker takes results again")
        with self._lock:
            if not self._closing.is_set():
                self._idle.append((publisher, time.monotonic()))
                return
        publisher.close()

    def _insist(self, publisher: Publisher, queue: str, blob: bytes, headers: dict[str, Any] | None) -> None:
        def abandon(_state: RetryCallState) -> None:
            raise Abandoned(f"the broker did not take a message for {queue} before the worker had to end")

        retrying = Retrying(
            wait=wait_exponential_jitter(initial=0.1, max=LONGEST_WAIT_S, jitter=0.2),
            stop=stop_when_event_set(self._closing),
            sleep=sleep_using_event(self._closing),
            retry_error_callback=abandon,
        )
        retrying(publisher.publish, queue, blob, headers=headers)

    def _complain(self, queue: str, exc: Exception) -> None:
        if not self._trouble:
            self._trouble = True
            log.warning("the broker does not take a message; trying until it does", queue=queue, error=_short(exc))


def _short(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"[:200]


def _plain(text: str) -> str:
    """Header values stay printable, whatever was in the message."""
    return re.sub(r"[^\x20-\x7e]+", "?", text)[:500]
