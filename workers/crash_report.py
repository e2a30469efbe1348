"""What a supervisor says of a worker that ended abnormally: which chunks it held, and what was inside its engine.

The report goes the way of results, signed and confirmed, so it is logged as they are. It stands as a file until the
broker has it: a supervisor that is ended itself leaves it to the next one of its name.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from pathlib import Path

import numpy as np
import redis
from tenacity import RetryError, Retrying, sleep_using_event, stop_when_event_set, wait_exponential_jitter

from common import logs
from common.broker import codecs
from common.live import LiveState
from common.messages import VERSION, Crash, Inside, Results, encode
from common.publisher import Publisher
from common.settings import Settings
from workers import breadcrumb
from workers.breadcrumb import Crumb

#: Longest wait between two tries, seconds.
LONGEST_WAIT_S = 5.0
#: Seconds that reports have to get out when the supervisor ends; the next one takes what is left.
LAST_S = 5.0
#: Suffixes of reports that are not out: the requests inside are suspects, or not.
_CRASH, _KILLED = ".crash", ".killed"

log = logs.get(__name__)


def reports(crumb: Crumb, reason: str, *, charge: bool) -> list[tuple[str, Results]]:
    """One message for each chunk that was held, with the queue it goes to.

    Without `charge` no request is named: the supervisor ended the worker itself.
    """
    found = []
    for chunk in crumb.chunks:
        inside = [
            Inside(batch, np.array(sorted(set(positions)), dtype="<u4").tobytes())
            for batch, positions in chunk.inside.items()
            if charge
        ]
        crash = Crash(crumb.life, reason, inside)
        results = Results(VERSION, chunk.id, crumb.model, crumb.node, 0, False, [], crash=crash)
        found.append((chunk.reply_to, results))
    return found


class Reporter:
    """Publishes reports from a thread of its own, so that supervision never waits for a broker."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._codec = codecs(settings)[1]
        self._queue: queue.SimpleQueue[tuple[Path, str, bool] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, path: Path, reason: str, *, charge: bool) -> bool:
        """A worker has ended, and its breadcrumb would lie here; returns whether one does: it had been ready.

        The file is moved at once, so that the next life of the worker may make its own.
        """
        crumb = breadcrumb.read(path)
        try:
            if crumb is None:
                path.unlink(missing_ok=True)
                return False
            moved = path.replace(path.with_suffix(f".{crumb.life}{_CRASH if charge else _KILLED}"))
        except OSError as exc:
            # Its lease will lapse instead.
            log.warning("a breadcrumb cannot be kept", error=str(exc))
            return crumb is not None
        self._put(moved, reason, charge)
        return True

    def take_left(self, path: Path) -> None:
        """Before the first life of a worker under this supervisor: what earlier ones left."""
        for suffix in (_CRASH, _KILLED):
            for left in sorted(path.parent.glob(f"{path.stem}.*{suffix}")):
                self._put(left, "reported late", suffix == _CRASH)
        self.take(path, "its supervisor ended too", charge=True)

    def close(self) -> None:
        """Give reports that are on their way a moment, then leave them to the next supervisor."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(LAST_S)
            self._closing.set()

    def _put(self, path: Path, reason: str, charge: bool) -> None:
        self._queue.put((path, reason, charge))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="crash reports", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._report(*item)

    def _report(self, path: Path, reason: str, charge: bool) -> None:
        crumb = breadcrumb.read(path)
        if crumb is not None and crumb.chunks:
            messages = reports(crumb, reason, charge=charge)
            if not self._insist(list(messages)):
                return
            self._give_up([chunk.id for chunk in crumb.chunks])
            suspects = sum(len(p) for chunk in crumb.chunks for p in chunk.inside.values()) if charge else 0
            log.warning("crash reported", node=crumb.node, chunks=len(messages), suspects=suspects)
        with contextlib.suppress(OSError):
            path.unlink()

    def _insist(self, messages: list[tuple[str, Results]]) -> bool:
        """Publish all, over and over until the broker has them; False when the supervisor ends first."""
        publisher = Publisher(self._settings)

        def publish() -> None:
            while messages:
                name, results = messages[0]
                publisher.publish(name, self._codec.seal(name, encode(results)))
                del messages[0]

        retrying = Retrying(
            wait=wait_exponential_jitter(initial=0.1, max=LONGEST_WAIT_S, jitter=0.2),
            stop=stop_when_event_set(self._closing),
            sleep=sleep_using_event(self._closing),
        )
        try:
            retrying(publish)
        except RetryError:
            return False
        finally:
            publisher.close()
        return True

    def _give_up(self, chunk_ids: list[str]) -> None:
        """Nobody needs to run the old copies: the broker would hand them to one worker after the other."""
        live = LiveState(self._settings)
        try:
            live.give_up(chunk_ids)
        except (redis.RedisError, OSError):
            # The coordinator says so too, when it has the report.
            return
        finally:
            live.close()
