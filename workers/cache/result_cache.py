"""The result cache in Redis: looked up before a chunk enters the engine, written behind, never in anybody's way.

It has a Redis server of its own: a cache must push old entries out when it is full, and a broker that did so would lose
messages. A server that is slow, full or gone costs a few hundred milliseconds once, then nothing for a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, cast

import redis
import zstandard

from common import logs, metrics
from common.errors import UsageError
from common.live import at_once, state_url
from common.settings import Settings

#: Seconds that a look-up or a write may take.
TIMEOUT_S = 0.25
#: Seconds without another try after a failure.
REST_S = 5.0
#: Bytes waiting to be written, at most; what does not fit is not cached.
PENDING_BYTES = 64 << 20
#: Share of the machine's memory that a cache may be given.
MEMORY_SHARE = 0.7

_PREFIX = b"bm:cache:"

log = logs.get(__name__)


class ResultCache:
    """Thread-safe. `check` may raise; nothing else does."""

    def __init__(self, settings: Settings) -> None:
        assert settings.cache.url is not None
        self._settings = settings
        self._redis = redis.Redis.from_url(
            settings.cache.url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=at_once()
        )
        self._pending: dict[bytes, bytes] = {}
        self._bytes = 0
        self._lock = threading.Lock()
        self._rest_until = 0.0
        self._trouble = False
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write, name="cache", daemon=True)
        self._writer.start()

    def check(self) -> None:
        """Give the server its capacity; `UsageError` when it is the broker's, or the capacity is too large for it."""
        try:
            server: Any = self._redis.info("server")
            memory: Any = self._redis.info("memory")
        except (redis.RedisError, OSError) as exc:
            self._failed(exc)
            return
        for what, url in (("broker", self._settings.broker.url or ""), ("live state", state_url(self._settings))):
            if _run_id(url) == server["run_id"]:
                raise UsageError(
                    f"cache.url: is the Redis server of the {what}, which must not push anything out; "
                    "give the cache a server of its own"
                )
        capacity = int(self._settings.cache.capacity_gb * (1 << 30))
        total = int(memory.get("total_system_memory", 0))
        if total and capacity > MEMORY_SHARE * total:
            raise UsageError(
                f"cache.capacity_gb: {self._settings.cache.capacity_gb:g} is more than {MEMORY_SHARE:.0%} of the "
                f"{total / (1 << 30):.1f} GB of the machine that the cache's Redis is on"
            )
        try:
            self._redis.config_set("maxmemory", capacity)
            self._redis.config_set("maxmemory-policy", "allkeys-lru")
        except (redis.RedisError, OSError):
            # Managed servers do not let themselves be told.
            log.warning("the cache's server keeps its own capacity and eviction policy")

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Bodies by key; none while the server rests or fails."""
        if not keys or time.monotonic() < self._rest_until:
            return {}
        with self._lock:
            found = {key: self._pending[key] for key in keys if key in self._pending}
        missing = list({key for key in keys if key not in found})
        try:
            values = cast(list[bytes | None], self._redis.mget([_PREFIX + key for key in missing])) if missing else []
        except (redis.RedisError, OSError) as exc:
            self._failed(exc)
            return found
        self._worked()
        for key, value in zip(missing, values, strict=True):
            if value is not None:
                try:
                    found[key] = zstandard.decompress(value)
                except zstandard.ZstdError:
                    continue
        hits = sum(key in found for key in keys)
        metrics.CACHE_HITS.inc(hits)
        metrics.CACHE_MISSES.inc(len(keys) - hits)
        return found

    def put(self, key: bytes, body: bytes) -> None:
        """Keep an answer; it is written within `cache.sync_interval_ms`."""
        with self._lock:
            if key in self._pending or self._bytes + len(body) > PENDING_BYTES:
                return
            self._pending[key] = body
            self._bytes += len(body)

    def close(self) -> None:
        """Write what waits, once, and stop."""
        self._closing.set()
        self._writer.join(timeout=2)
        self._redis.close()

    def _write(self) -> None:
        while not self._closing.wait(self._settings.cache.sync_interval_ms / 1000):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            batch = dict(self._pending)
        if not batch:
            return
        if time.monotonic() >= self._rest_until:
            try:
                pipe = self._redis.pipeline(transaction=False)
                for key, body in batch.items():
                    pipe.set(_PREFIX + key, zstandard.compress(body, 1), ex=self._settings.cache.ttl_s)
                pipe.execute()
                self._worked()
            except (redis.RedisError, OSError) as exc:
                self._failed(exc)
        # Written or not: what a cache cannot take is not kept for it.
        with self._lock:
            for key, body in batch.items():
                del self._pending[key]
                self._bytes -= len(body)

    def _failed(self, exc: BaseException) -> None:
        self._rest_until = time.monotonic() + REST_S
        metrics.CACHE_FAILURES.inc()
        if not self._trouble:
            self._trouble = True
            log.warning("the result cache does not answer; work goes on without it", error=type(exc).__name__)

    def _worked(self) -> None:
        if self._trouble:
            self._trouble = False
            log.info("the result cache is back")


def _run_id(url: str) -> str | None:
    """The identity of the Redis server at a URL; None where there is none to ask."""
    if not url.startswith(("redis", "unix")):
        return None
    url = url.replace("redis+socket://", "unix://").replace("virtual_host=", "db=")
    try:
        with redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S) as client:
            server: Any = client.info("server")
            return str(server["run_id"])
    except (redis.RedisError, OSError):
        return None
