"""The Redis server of the result cache: a thin client. Everything here may raise `redis.RedisError` or `OSError`.

Who pushes old entries out depends on whose server it is:

- one that is the cache's alone gets its capacity as `maxmemory` with `allkeys-lru`, and does it itself (`evicts`);
- on one that we may not configure, or that others use too (another database of the broker's), the cache counts its own
  bytes: a sorted set of keys by last use and a sum, kept by scripts that the server runs whole (`counts`).

Keys: `bm:cache:<key>` = a value of `workers.cache.value`; `bm:cache/epoch` changes when something is cleared;
`bm:cache/counts` = hits, misses and writes of all workers; `bm:cache/lru`, `…/bytes`, `…/evicted`, `…/capacity` where
the cache counts. Whatever of these is lost costs misses or figures, never a wrong answer.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError
from redis.retry import Retry

from common.errors import UsageError
from common.live import redis_url
from common.machine import physical_memory
from common.settings import Settings
from workers.cache import scripts
from workers.cache.key import tag

#: Share of the machine's memory that a cache may be given.
MEMORY_SHARE = 0.7
#: Keys of one round trip.
KEYS_AT_ONCE = 64
#: Seconds that a person's command waits, where a worker would have gone on long ago.
PATIENT_S = 10.0

PREFIX = b"bm:cache:"
EPOCH = b"bm:cache/epoch"
COUNTS = b"bm:cache/counts"
LRU = b"bm:cache/lru"
BYTES = b"bm:cache/bytes"
EVICTED = b"bm:cache/evicted"
CAPACITY = b"bm:cache/capacity"

Policy = Literal["evicts", "counts"]


@dataclass(frozen=True)
class ServerFacts:
    """What the server holds. Bytes are its whole memory where it evicts by itself, else what the cache counted."""

    policy: Policy
    entries: int
    bytes: int
    #: The bound that holds: the cache's own, or the server's `maxmemory` where that is less.
    capacity: int
    evicted: int
    #: Memory of the whole server, whoever uses it, and its `maxmemory` (0: none).
    server_bytes: int
    server_limit: int
    #: Changes when the server starts anew.
    run_id: str


class CacheServer:
    """Thread-safe. `timeout_s`: what any single answer of the server may take."""

    def __init__(self, settings: Settings, timeout_s: float) -> None:
        assert settings.cache.url is not None
        self._settings = settings
        self._timeout_s = timeout_s
        self.capacity = int(settings.cache.capacity_gb * (1 << 30))
        self.policy: Policy = "evicts"
        #: What of the capacity a smaller server was found to have room for.
        self._room = sys.maxsize
        self._redis = redis.Redis.from_url(
            settings.cache.url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # Once more on a connection that had gone stale, but not after a timeout: that would double it.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        )
        self._get = self._redis.register_script(scripts.GET)
        self._put = self._redis.register_script(scripts.PUT)
        self._evict = self._redis.register_script(scripts.EVICT)
        self._touch = self._redis.register_script(scripts.TOUCH)
        self._drop = self._redis.register_script(scripts.DROP)

    def configure(self) -> ServerFacts:
        """Give the server its capacity, or find that the cache must count for itself.

        `UsageError` when it is the broker's very database, or when the capacity is too large for its machine.
        """
        info: Any = self._redis.info()
        self.check_capacity(int(info.get("total_system_memory", 0)))
        shared = self._shared(info)
        self.policy = "counts" if shared or not self._take_over(info) else "evicts"
        if self.policy == "counts":
            # One that takes nothing now is still asked for what it holds.
            with contextlib.suppress(redis.ResponseError):
                self._redis.set(CAPACITY, self.capacity)
        return self.facts()

    def follow(self) -> ServerFacts:
        """Take the server as the workers configured it; configure it only when none has.

        For people's commands: the capacity in the settings of whoever types one is not the fleet's.
        """
        info: Any = self._redis.info("memory")
        used, said = cast(Any, self._redis.exists(LRU)), cast(Any, self._redis.get(CAPACITY))
        if used and said:
            self.policy, self.capacity = "counts", _number(said) or self.capacity
        elif str(info.get("maxmemory_policy", "")).startswith("allkeys-") and int(info.get("maxmemory", 0)):
            self.policy, self.capacity = "evicts", int(info["maxmemory"])
        else:
            return self.configure()
        return self.facts()

    def facts(self) -> ServerFacts:
        """Figures of the moment."""
        info: Any = self._redis.info()
        whole, limit = int(info["used_memory"]), int(info.get("maxmemory", 0))
        capacity = self.capacity
        if self.policy == "evicts":
            entries = int(cast(Any, self._redis.dbsize())) - int(
                cast(Any, self._redis.exists(EPOCH, COUNTS, LRU, BYTES, EVICTED, CAPACITY))
            )
            used, evicted = whole, int(info.get("evicted_keys", 0))
            capacity = limit or capacity
        else:
            entries = int(cast(Any, self._redis.zcard(LRU)))
            found = cast(list[bytes | None], self._redis.mget([BYTES, EVICTED]))
            used, evicted = (_number(n) for n in found)
            capacity = min(capacity, limit or capacity)
        return ServerFacts(self.policy, entries, used, capacity, evicted, whole, limit, str(info["run_id"]))

    def get(self, keys: Sequence[bytes]) -> tuple[bytes, list[bytes | None]]:
        """The epoch, and the values of keys, None where there is none."""
        found = cast(list[bytes | None], self._redis.mget([EPOCH, *(PREFIX + key for key in keys)]))
        return found[0] or b"", found[1:]

    def get_timed(self, keys: Sequence[bytes]) -> tuple[bytes, list[bytes | None], list[float | None]]:
        """As `get`, in one round trip with the seconds that each value has left; None where nothing ends it."""
        if self._settings.cache.ttl_s is None or not keys:
            return *self.get(keys), [None] * len(keys)
        epoch, found, left = cast(Any, self._get(keys=[EPOCH], args=[PREFIX, *keys]))
        # -1: it has no end.
        return epoch or b"", found, [None if ms == -1 else ms / 1000 for ms in left]

    def present(self, keys: Sequence[bytes]) -> int:
        """How many of these keys have an entry; does not count as use."""
        return int(cast(Any, self._redis.exists(*(PREFIX + key for key in keys)))) if keys else 0

    def put(self, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Write `(key, value)`s; `redis.ResponseError` when the server takes nothing more (`refusal` says why)."""
        ttl = self._settings.cache.ttl_s
        if self.policy == "evicts":
            pipe = self._redis.pipeline(transaction=False)
            for key, value in entries:
                pipe.set(PREFIX + key, value, ex=ttl)
            # Raised here, since redis-py would quote the command, and so the answer, in the error's text.
            for done in pipe.execute(raise_on_error=False):
                if isinstance(done, Exception):
                    raise done
            return
        flat = [part for entry in entries for part in entry]
        arguments: list[bytes | float] = [time.time(), ttl or 0, PREFIX, *flat]
        try:
            self._put(keys=[LRU, BYTES, EVICTED], args=[min(self._room, self.capacity), *arguments])
        except OutOfMemoryError:
            # A server that is smaller than the capacity said: live with what it has.
            used = _number(cast(Any, self._redis.get(BYTES)))
            # On a very small one a tenth is less than what comes, which the server holds a second time as a command.
            coming = sum(len(value) + scripts.OVERHEAD for _, value in entries)
            self._room = max(1, used - max(used // 10, 2 * coming))
            self._evict(keys=[LRU, BYTES, EVICTED], args=[self._room, PREFIX])
            self._put(keys=[LRU, BYTES, EVICTED], args=[self._room, *arguments])

    def touch(self, keys: Sequence[bytes]) -> None:
        """Keys have been used just now, whether or not by asking this server."""
        if not keys:
            return
        if self.policy == "evicts":
            self._redis.touch(*(PREFIX + key for key in keys))
        else:
            self._touch(keys=[LRU], args=[time.time(), PREFIX, *keys])

    def count(self, model: str, figures: Mapping[str, int]) -> None:
        """Add to the figures that all workers of a model version keep together."""
        pipe = self._redis.pipeline(transaction=False)
        for name, number in figures.items():
            if number:
                pipe.hincrby(COUNTS, f"{model}:{name}", number)
        if len(pipe):
            pipe.execute()

    def counts(self) -> dict[str, dict[str, int]]:
        """The figures that all workers keep together: model version → name → number."""
        found: dict[str, dict[str, int]] = {}
        for field, number in cast(dict[bytes, bytes], self._redis.hgetall(COUNTS)).items():
            model, _, name = field.decode("utf-8", "replace").rpartition(":")
            if model:
                found.setdefault(model, {})[name] = _number(number)
        return found

    def ping(self) -> None:
        """Raises when the server does not answer."""
        self._redis.ping()

    def scan(self, model: str | None = None) -> Iterator[list[bytes]]:
        """The keys of all entries, or of a model version's, some at a time; one may come twice."""
        match = PREFIX + (tag(model) if model is not None else b"") + b"*"
        cursor = 0
        while True:
            cursor, found = cast(Any, self._redis.scan(cursor, match=match, count=1000))
            for at in range(0, len(found), KEYS_AT_ONCE):
                yield [name[len(PREFIX) :] for name in found[at : at + KEYS_AT_ONCE]]
            if cursor == 0:
                return

    def leave_no_trace(self) -> None:
        """Let reading everything not count as use, where the server can (7.2): its order of use is worth keeping."""
        with contextlib.suppress(redis.ResponseError):
            cast(Any, self._redis).execute_command("CLIENT", "NO-TOUCH", "ON")

    def drop(self, keys: Sequence[bytes]) -> int:
        """Remove entries; how many there were."""
        if not keys:
            return 0
        if self.policy == "evicts":
            return int(cast(Any, self._redis.unlink(*(PREFIX + key for key in keys))))
        return int(cast(Any, self._drop(keys=[LRU, BYTES], args=[PREFIX, *keys])))

    def turn_epoch(self) -> None:
        """Let all workers forget what they hold in front of this server."""
        self._redis.set(EPOCH, secrets.token_hex(8))

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def check_capacity(self, total: int = 0) -> None:
        """`UsageError` when the capacity is too large for a machine of `total` bytes (0: this one, or unknown)."""
        if total == 0 and self._is_local():
            total = physical_memory()
        if total and self.capacity > MEMORY_SHARE * total:
            raise UsageError(
                f"cache.capacity_gb: {self._settings.cache.capacity_gb:g} is more than {MEMORY_SHARE:.0%} of the "
                f"{total / (1 << 30):.1f} GB of the machine that the cache's Redis is on"
            )

    def _is_local(self) -> bool:
        options = self._redis.connection_pool.connection_kwargs
        return "path" in options or options.get("host", "localhost") in ("localhost", "127.0.0.1", "::1")

    def _shared(self, info: dict[str, Any]) -> bool:
        """True when others keep their data on the server too: then nothing on it may be pushed out but by us."""
        database = int(self._redis.connection_pool.connection_kwargs.get("db", 0))
        for what, url in (
            ("broker", self._settings.broker.url or ""),
            ("live state", self._settings.state.url or ""),
        ):
            found = _identity(url, self._timeout_s)
            if found is None or found[0] != info["run_id"]:
                continue
            if found[1] == database:
                raise UsageError(
                    f"cache.url: is the Redis database of the {what}; give the cache a server of its own, or at least "
                    "another database (…/1)"
                )
            return True
        if any(name.startswith("db") and name != f"db{database}" for name in info):
            return True
        # Somebody else's keys in our own database: a look at some of them tells.
        looks = (cast(bytes | None, self._redis.randomkey()) for _ in range(8))
        return any(name is not None and not name.startswith(b"bm:cache") for name in looks)

    def _take_over(self, info: dict[str, Any]) -> bool:
        """True when the server pushes old entries out by itself from now on."""
        try:
            self._redis.config_set("maxmemory", self.capacity)
            self._redis.config_set("maxmemory-policy", "allkeys-lru")
        except redis.ResponseError:
            # Managed servers do not let themselves be told; some are set up as caches already.
            own = int(info.get("maxmemory", 0))
            return str(info.get("maxmemory_policy", "")).startswith("allkeys-") and 0 < own <= self.capacity
        return True


def refusal(exc: redis.ResponseError) -> str:
    """Why a server refuses, in a word of Redis's (`MISCONF`): the text after it may quote what it was sent."""
    code = str(exc).partition(" ")[0]
    return code if re.fullmatch("[A-Z]+", code) and code != "ERR" else type(exc).__name__


def _number(text: bytes | None) -> int:
    """A figure that the server keeps; 0 where it has none, or somebody put something else there."""
    return int(text) if text is not None and re.fullmatch(rb"-?\d{1,18}", text) else 0


def _identity(url: str, timeout_s: float) -> tuple[str, int] | None:
    """The run id and database of the Redis server at a URL; None where there is none to ask."""
    if not url.startswith(("redis", "unix")):
        return None
    try:
        with redis.Redis.from_url(
            redis_url(url), socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        ) as client:
            server: Any = client.info("server")
            return str(server["run_id"]), int(client.connection_pool.connection_kwargs.get("db", 0))
    except (redis.RedisError, OSError):
        return None
