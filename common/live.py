"""Live state in Redis: who works on what right now. Hints, never the truth: it may be wiped at any moment.

Keys, with a time to live unless noted:

- `bm:lease:<chunk>` = the node that works on it, `#`, and which life of it (any text that no other process has).
- `bm:worker:<node>` = JSON facts; `bm:workers` = the set of nodes (stays; who is gone is taken out by whoever asks).
- `bm:generation` = a random id set by whoever finds none, by which a wipe is noticed (stays).
- `bm:cancelled:<batch>` = 1 for what workers should abort.
- `bm:given_up:<chunk>` = 1 for a chunk that was lost in an engine and whose open requests the coordinator has sent
  again, or will by a supervisor's report: the broker would deliver the old copy over and over, and end one engine after
  the other with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.errors import Unreachable, UsageError
from common.messages import CacheFacts
from common.settings import Settings

WORKER_TTL_S = 30


class WorkerFacts(msgspec.Struct, kw_only=True):
    """What a worker says of itself, renewed every few seconds."""

    node: str
    model: str
    host: str
    pid: int
    device: str
    engine: str
    #: loading, ready, sick (it takes nothing: its requests fail while others' do not), draining
    state: str
    max_num_seqs: int
    chunks_in_flight: int
    running: int = 0
    waiting: int = 0
    started_at: float = 0.0
    #: Requests that it tried lately for the first time, and the share of them that failed.
    tried: int = 0
    failing: float = 0.0
    #: None: it uses no result cache, or has not reached it yet.
    cache: CacheFacts | None = None
    #: Process id of the supervisor that started it; 0: a person did.
    supervisor: int = 0


def at_once() -> Retry:
    """Once more on a new connection, for one that had gone stale; redis-py would wait and try for seconds by itself."""
    return Retry(NoBackoff(), 1)


def state_url(settings: Settings) -> str:
    """The Redis of the live state; `UsageError` when neither `state.url` nor a Redis broker is set."""
    url = settings.state.url or settings.broker.url or ""
    if not url.startswith(("redis", "unix")):
        raise UsageError(
            "state.url is not set: with RabbitMQ as broker, live state needs a Redis (BATCHMILL_STATE_URL)"
        )
    return redis_url(url)


def redis_url(url: str) -> str:
    """A broker's URL as redis-py writes it."""
    # kombu spells a socket `redis+socket://`, redis-py `unix://`; the database is `virtual_host` there and `db` here.
    return url.replace("redis+socket://", "unix://").replace("virtual_host=", "db=")


class LiveState:
    """A thin client; every call may raise `redis.RedisError`, which callers treat as "nothing known"."""

    def __init__(self, settings: Settings) -> None:
        self.url = state_url(settings)
        self._redis = redis.Redis.from_url(
            self.url, socket_timeout=2.0, socket_connect_timeout=2.0, health_check_interval=10, retry=at_once()
        )

    def check(self) -> None:
        """`Unreachable` when Redis does not answer."""
        try:
            self._redis.ping()
        except redis.RedisError as exc:
            raise Unreachable(f"Redis at {self.url} does not answer: {exc}") from None

    def generation(self) -> str:
        """The id of this life of the Redis: another value than last time means that it was wiped."""
        self._redis.set("bm:generation", secrets.token_hex(8), nx=True)
        return cast(bytes, self._redis.get("bm:generation") or b"").decode()

    def renew_leases(self, chunk_ids: Iterable[str], node: str, lease_s: float, life: str = "") -> None:
        """Claim or renew; one round trip."""
        pipe = self._redis.pipeline(transaction=False)
        for chunk_id in chunk_ids:
            pipe.set(f"bm:lease:{chunk_id}", f"{node}#{life}", px=int(lease_s * 1000))
        pipe.execute()

    def drop_leases(self, chunk_ids: Sequence[str]) -> None:
        """Give claims back."""
        if chunk_ids:
            self._redis.delete(*(f"bm:lease:{chunk_id}" for chunk_id in chunk_ids))

    def leases(self, chunk_ids: list[str]) -> list[str | None]:
        """The node that holds each chunk, or None."""
        if not chunk_ids:
            return []
        found = cast(list[bytes | None], self._redis.mget([f"bm:lease:{c}" for c in chunk_ids]))
        return [f.decode().partition("#")[0] if f is not None else None for f in found]

    def announce(self, facts: WorkerFacts) -> None:
        """Say that a worker is here."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.set(f"bm:worker:{facts.node}", msgspec.json.encode(facts), ex=WORKER_TTL_S)
        pipe.sadd("bm:workers", facts.node)
        pipe.execute()

    def withdraw(self, node: str) -> None:
        """Say that a worker is gone."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.delete(f"bm:worker:{node}")
        pipe.srem("bm:workers", node)
        pipe.execute()

    def workers(self) -> list[WorkerFacts]:
        """All workers that announced themselves lately."""
        # Not by scanning: the result cache may share this Redis, with millions of keys.
        nodes = sorted(cast(set[bytes], self._redis.smembers("bm:workers")))
        found = cast(list[Any], self._redis.mget([b"bm:worker:" + n for n in nodes])) if nodes else []
        gone = [n for n, f in zip(nodes, found, strict=True) if not f]
        if gone:
            self._redis.srem("bm:workers", *gone)
        return [msgspec.json.decode(f, type=WorkerFacts) for f in found if f]

    def mark_cancelled(self, batch_id: str, ttl_s: int = 7 * 24 * 3600) -> None:
        """Let workers abort what they run of a batch: it is cancelled, or its deadline has passed."""
        self._redis.set(f"bm:cancelled:{batch_id}", 1, ex=ttl_s)

    def cancelled(self, batch_ids: list[str]) -> set[str]:
        """Which of these batches are cancelled."""
        if not batch_ids:
            return set()
        found = cast(list[Any], self._redis.mget([f"bm:cancelled:{b}" for b in batch_ids]))
        return {b for b, f in zip(batch_ids, found, strict=True) if f}

    def give_up(self, chunk_ids: Iterable[str], ttl_s: int = 7 * 24 * 3600) -> None:
        """Let workers drop chunks unread.

        The coordinator says so once it has logged that it sends them again; a supervisor once the broker has its
        report, by which the coordinator will.
        """
        pipe = self._redis.pipeline(transaction=False)
        for chunk_id in chunk_ids:
            pipe.set(f"bm:given_up:{chunk_id}", 1, ex=ttl_s)
        if len(pipe):
            pipe.execute()

    def given_up(self, chunk_id: str) -> bool:
        """True when the coordinator sends the chunk's requests in other chunks."""
        return bool(self._redis.exists(f"bm:given_up:{chunk_id}"))

    def given_up_among(self, chunk_ids: list[str]) -> set[str]:
        """Those of the chunks that the coordinator has no more use for."""
        if not chunk_ids:
            return set()
        found = cast(list[Any], self._redis.mget([f"bm:given_up:{c}" for c in chunk_ids]))
        return {c for c, f in zip(chunk_ids, found, strict=True) if f}

    def claim(self, chunk_id: str, node: str, lease_s: float, life: str) -> str | None:
        """Take the lease on a chunk; why its copy is not to be run, if so: `given up`, or `held` by another life.

        A holder that is dead makes the chunk lost as its lease lapses: then the coordinator, not the broker, decides
        what becomes of requests that may have ended it.
        """
        mine = f"{node}#{life}"
        pipe = self._redis.pipeline(transaction=False)
        pipe.exists(f"bm:given_up:{chunk_id}")
        pipe.set(f"bm:lease:{chunk_id}", mine, px=int(lease_s * 1000), nx=True)
        pipe.get(f"bm:lease:{chunk_id}")
        given_up, taken, holder = pipe.execute()
        if given_up:
            if taken:
                self.drop_leases([chunk_id])
            return "given up"
        return "held" if holder is not None and holder.decode() != mine else None

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
