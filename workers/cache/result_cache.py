"""The result cache of a worker: looked up before a chunk enters the engine, written behind, never in anybody's way.

A lookup goes to the answers of this process first, then to Redis, and has a fixed time for both. Whatever goes wrong
with Redis is found once, by whoever meets it, within that time; from then on nobody asks until the writer's thread,
which nobody waits for, has found Redis well again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

import redis
from prometheus_client import Counter
from redis.exceptions import ResponseError

from common import logs, metrics
from common.errors import UsageError
from common.messages import CacheFacts
from common.settings import Settings
from workers.cache.breaker import Breaker
from workers.cache.local import LocalCache
from workers.cache.server import KEYS_AT_ONCE, CacheServer, refusal
from workers.cache.value import MAX_BODY, values

#: A chunk's lookup may take so many times `cache.timeout_ms`, however many round trips it needs.
LOOKUP_TIMEOUTS = 2
#: Bytes waiting to be written, at most; what does not fit is not cached.
PENDING_BYTES = 64 << 20
#: Uses not told to the server yet, at most: that only keeps its order of use true.
PENDING_TOUCHES = 16_384
#: Seconds between two looks at the server's figures, and at whether it is still the one that we configured.
LOOK_S = 10.0
#: The same while it is used: a batch tells of what was seen last.
LOOK_USED_S = 1.0
#: Seconds that writing the rest may take when a worker ends.
CLOSE_S = 2.0

log = logs.get(__name__)


class ResultCache:
    """Thread-safe. `check` may raise; nothing else does. `model`: the version whose figures it counts."""

    def __init__(self, settings: Settings, model: str = "") -> None:
        self._model = model
        self._settings = settings.cache
        self._timeout_s = settings.cache.timeout_ms / 1000
        self._values = values(settings)
        self._server = CacheServer(settings, self._timeout_s)
        self._local = LocalCache(settings.cache.local_mb << 20, settings.cache.ttl_s)
        self._breaker = Breaker()
        self._lock = threading.Lock()
        #: Answers that wait to be written, and when they are too old for it.
        self._pending: dict[bytes, tuple[bytes, float]] = {}
        self._pending_bytes = 0
        self._touched: dict[bytes, None] = {}
        #: Figures that the server was not told yet.
        self._untold = {"hits": 0, "misses": 0, "written": 0}
        #: The server as it was at the last look.
        self.facts: CacheFacts | None = None
        self._epoch: bytes | None = None
        self._run_id = ""
        self._looked_at = time.monotonic()
        #: It took nothing the last time, while it answers.
        self._full = False
        #: Since the last look.
        self._used = False
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write, name="cache", daemon=True)
        self._writer.start()

    def check(self) -> None:
        """Configure the server; `UsageError` when it must not be used, or not with this capacity."""
        try:
            self._look(configure=True)
        except (redis.RedisError, OSError) as exc:
            self._failed(exc)
            self._server.check_capacity()

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Answers by key, within a bounded time; what Redis did not say by then is missing."""
        if not keys:
            return {}
        asked = list(dict.fromkeys(keys))
        self._used = True
        # Before anything is found: what is cleared from now on does not count, whoever sees it first.
        generation = self._local.generation
        found = self._here(asked)
        if self._breaker.closed:
            try:
                self._there(asked, found, generation)
            except (redis.RedisError, OSError) as exc:
                self._failed(exc)
        with self._lock:
            if len(self._touched) < PENDING_TOUCHES:
                self._touched.update(dict.fromkeys(found))
        return found

    def count(self, hits: int, misses: int) -> None:
        """What came of a lookup, request by request: only who asked knows whether an answer was of use."""
        metrics.CACHE_HITS.inc(hits)
        metrics.CACHE_MISSES.inc(misses)
        with self._lock:
            self._untold["hits"] += hits
            self._untold["misses"] += misses

    def reject(self, key: bytes) -> None:
        """What `get` gave for it is no answer: forget it here; the next one replaces it on the server."""
        self._local.drop(key)

    def put(self, key: bytes, body: bytes) -> None:
        """Keep an answer; it is written within `cache.sync_interval_ms`."""
        if len(body) > MAX_BODY:
            metrics.CACHE_DROPPED.inc()
            return
        self._local.put(key, body)
        self._used = True
        with self._lock:
            if key in self._pending:
                return
            if self._pending_bytes + len(body) > PENDING_BYTES:
                metrics.CACHE_DROPPED.inc()
                return
            self._pending[key] = body, time.monotonic() + (self._settings.ttl_s or math.inf)
            self._pending_bytes += len(body)

    def close(self) -> None:
        """Write what waits, once, and stop."""
        self._closing.set()
        self._writer.join(timeout=CLOSE_S)
        self._server.close()

    def _here(self, keys: list[bytes]) -> dict[bytes, bytes]:
        """What this process has."""
        found, now = {}, time.monotonic()
        for key in keys:
            body = self._local.get(key)
            if body is None:
                # What is too large for the one may still wait in the other.
                waiting, end = self._pending.get(key, (None, 0.0))
                body = waiting if now < end else None
            if body is not None:
                found[key] = body
        return found

    def _there(self, asked: list[bytes], found: dict[bytes, bytes], generation: int) -> None:
        """Fill `found` with what Redis has, as far as it answers in time. `generation`: that of what it holds."""
        until = time.monotonic() + LOOKUP_TIMEOUTS * self._timeout_s
        missing = [key for key in asked if key not in found]
        at = 0
        # Asked even when nothing is missing: the epoch says whether what was found here still counts.
        while (at == 0 or at < len(missing)) and time.monotonic() < until:
            part = missing[at : at + KEYS_AT_ONCE]
            epoch, values, left = self._server.get_timed(part)
            self._note(epoch)
            if self._local.generation != generation:
                # By this thread or by another one: what it had found is from before.
                generation = self._local.generation
                found.clear()
                missing, at = asked, 0
                continue
            for key, value, left_s in zip(part, values, left, strict=True):
                body = self._values.unpack(key, value) if value is not None else None
                if body is not None:
                    found[key] = body
                    self._local.put(key, body, left_s, generation)
            at += KEYS_AT_ONCE

    def _note(self, epoch: bytes) -> None:
        """Forget all that is held here when something was cleared since the last time."""
        with self._lock:
            before, self._epoch = self._epoch, epoch
            if before is None or before == epoch:
                return
            self._forget(list(self._pending), metrics.CACHE_DROPPED)
            self._local.clear()

    def _write(self) -> None:
        while not self._closing.wait(self._settings.sync_interval_ms / 1000):
            if self._breaker.due():
                self._try_again()
            self._flush()
            if self._breaker.closed and time.monotonic() - self._looked_at > (LOOK_USED_S if self._used else LOOK_S):
                self._used = False
                self._guarded(self._look)
        self._flush()
        with self._lock:
            self._forget(list(self._pending), metrics.CACHE_DROPPED)

    def _try_again(self) -> None:
        try:
            # Whole, because a server that was gone may have come back without its capacity.
            self._look(configure=True)
        except (UsageError, redis.RedisError, OSError):
            return
        else:
            self._breaker.close()
            metrics.CACHE_RESTING.set(0)
            log.info("the result cache is back")

    def _look(self, configure: bool = False) -> None:
        """Read the server's figures; configure it when it is another one than last time."""
        self._looked_at = time.monotonic()
        facts = self._server.configure() if configure else self._server.facts()
        if not configure and facts.run_id != self._run_id:
            facts = self._server.configure()
        self._run_id = facts.run_id
        self._note(self._server.get([])[0])
        self.facts = CacheFacts(
            entries=facts.entries, bytes=facts.bytes, capacity_bytes=facts.capacity, evicted=facts.evicted
        )
        metrics.CACHE_ENTRIES.set(facts.entries)
        metrics.CACHE_BYTES.set(facts.bytes)
        metrics.CACHE_CAPACITY.set(facts.capacity)
        metrics.CACHE_EVICTED.set(facts.evicted)

    def _flush(self) -> None:
        """Write what waits; what a server that is away could not take waits on, as far as there is room for it."""
        if self._pending and self._breaker.closed:
            # What was cleared while it waited here must not come back.
            self._guarded(lambda: self._note(self._server.get([])[0]))
        if not self._breaker.closed:
            return
        with self._lock:
            now = time.monotonic()
            old = [key for key, (_, end) in self._pending.items() if end <= now]
            self._forget(old, metrics.CACHE_DROPPED)
            waiting = [(key, body) for key, (body, _) in self._pending.items()]
            touched, self._touched = list(self._touched), {}
        self._guarded(lambda: self._flush_to_server(waiting, touched))

    def _flush_to_server(self, entries: list[tuple[bytes, bytes]], touched: list[bytes]) -> None:
        for at in range(0, len(entries), KEYS_AT_ONCE):
            self._put_part(entries[at : at + KEYS_AT_ONCE])
        with self._lock:
            figures = dict(self._untold)
        try:
            for at in range(0, len(touched), 1024):
                self._server.touch(touched[at : at + 1024])
            self._server.count(self._model, figures)
        except ResponseError:
            # A server that takes nothing is still asked for what it holds; figures are told once it does again.
            return
        with self._lock:
            for name, number in figures.items():
                self._untold[name] -= number

    def _put_part(self, part: list[tuple[bytes, bytes]]) -> None:
        """Write entries, which then wait no longer; each is counted once, as written or as dropped."""
        try:
            self._server.put([(key, self._values.pack(key, body)) for key, body in part])
        except ResponseError as exc:
            # Full, on a full disk, a replica: it answers, so lookups go on.
            if not self._full:
                log.warning("the result cache takes nothing more; new answers are not kept", reason=refusal(exc))
            self._full = True
        else:
            self._full = False
        with self._lock:
            # Not what was cleared meanwhile, nor what came after it.
            written = [key for key, body in part if key in self._pending and self._pending[key][0] is body]
            self._forget(written, metrics.CACHE_DROPPED if self._full else metrics.CACHE_WRITTEN)
            if not self._full:
                self._untold["written"] += len(written)

    def _forget(self, keys: Sequence[bytes], counter: Counter) -> None:
        """Let answers wait no longer; under the lock."""
        for key in keys:
            self._pending_bytes -= len(self._pending.pop(key)[0])
        counter.inc(len(keys))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (UsageError, redis.RedisError, OSError) as exc:
            self._failed(exc)

    def _failed(self, exc: BaseException) -> None:
        metrics.CACHE_FAILURES.inc()
        if self._breaker.open():
            metrics.CACHE_RESTING.set(1)
            reason = str(exc) if isinstance(exc, UsageError) else type(exc).__name__
            log.warning("the result cache is not to be had; work goes on without it", reason=reason)
