"""The result cache against real Redis servers: bounded, never in the way, true to what was cleared."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import redis

from common import metrics
from common.errors import UsageError
from common.settings import Settings, load
from tests.support.brokers import RedisServer, redis_server
from tests.support.ports import wait_until
from workers.cache import result_cache
from workers.cache.result_cache import ResultCache
from workers.cache.server import CacheServer

Make = Callable[..., Settings]

KEY = {"BATCHMILL_SECURITY_RESULTS_KEY": "ab" * 32}


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("cache-redis")) as server:
        yield server


@pytest.fixture
def cache_server(module_server: RedisServer) -> Iterator[RedisServer]:
    """A Redis server as it is when nobody has used it yet."""
    yield module_server
    if module_server.alive:
        module_server.resume()
    else:
        module_server.start()
    with module_server.client(0) as client:
        client.replicaof("NO", "ONE")
        client.flushall()
        client.config_resetstat()
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
        client.acl_deluser("managed")


@pytest.fixture
def make(cache_server: RedisServer) -> Make:
    """Settings with the cache on that server; `user`: logs in as; the rest as `BATCHMILL_CACHE_…`."""

    def settings(user: str = "", database: int = 0, **more: Any) -> Settings:
        login = f"{user}:x@" if user else ""
        url = f"redis://{login}127.0.0.1:{cache_server.port}/{database}"
        # Nothing here is about how long Redis takes, so a busy machine may.
        fixed = KEY | {"BATCHMILL_CACHE_URL": url, "BATCHMILL_CACHE_TIMEOUT_MS": "5000"}
        return load(env=fixed | {f"BATCHMILL_CACHE_{k.upper()}": str(v) for k, v in more.items()})

    return settings


@pytest.fixture
def managed(cache_server: RedisServer) -> str:
    """A user that may not configure the server, as with managed ones."""
    with cache_server.client(0) as client:
        client.execute_command("ACL", "SETUSER", "managed", "on", ">x", "~*", "&*", "+@all", "-config")
    return "managed"


@pytest.fixture
def opened() -> Iterator[Callable[[Settings], ResultCache]]:
    """Makes caches that are closed in the end."""
    made: list[ResultCache] = []

    def cache(settings: Settings) -> ResultCache:
        made.append(ResultCache(settings, "m@1"))
        return made[-1]

    yield cache
    for one in made:
        one.close()


Opened = Callable[[Settings], ResultCache]


def key(number: int) -> bytes:
    return b"%048d" % number


def rows(count: int, size: int) -> list[tuple[bytes, bytes]]:
    return [(key(n), random.randbytes(size)) for n in range(count)]


def put_all(server: CacheServer, entries: list[tuple[bytes, bytes]]) -> None:
    for at in range(0, len(entries), 64):
        server.put(entries[at : at + 64])


def test_a_server_of_its_own_gets_the_capacity_and_keeps_to_it(
    make: Make, opened: Opened, cache_server: RedisServer
) -> None:
    cache = opened(make(capacity_gb=0.02))
    cache.check()
    for number, (name, body) in enumerate(rows(2000, 20_000)):
        cache.put(name, body)
        if number % 500 == 499:
            wait_until(lambda: not cache._pending, 30, "written")
    cache.close()
    with cache_server.client(0) as client:

        def keeps_to_it() -> bool:
            memory: Any = client.info("memory")
            return bool(int(memory["used_memory"]) <= 1.2 * int(memory["maxmemory"]))

        # What it has read for a client counts until it is taken in, and evicting is done a little at a time.
        wait_until(keeps_to_it, 30, lambda: f"within its capacity: {client.info('memory')}")
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        # Its clock of uses ticks once a second, so of those written in the last one any may be gone.
        assert client.exists(*(b"bm:cache:" + key(number) for number in range(1500, 2000)))
    facts = CacheServer(make(capacity_gb=0.02), 5).configure()
    assert facts.evicted > 0
    assert facts.capacity == int(0.02 * (1 << 30))


def test_a_server_that_comes_back_gets_its_capacity_again(
    make: Make, opened: Opened, cache_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_cache, "LOOK_S", 0.1)
    cache = opened(make(capacity_gb=0.02))
    cache.check()
    cache_server.kill()
    cache_server.start()
    with cache_server.client(0) as client:
        wait_until(lambda: client.config_get("maxmemory") != {"maxmemory": "0"}, 20, "the capacity is set")
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}


@pytest.mark.parametrize("shared", [False, True])
def test_where_the_server_is_not_ours_the_cache_counts(
    make: Make, managed: str, cache_server: RedisServer, shared: bool
) -> None:
    """Least recently used first, by our own count, and what others keep there stays."""
    if shared:
        with cache_server.client(0) as client:
            client.set("somebody's", "own")
    settings = make(database=1, capacity_gb=0.01) if shared else make(user=managed, capacity_gb=0.01)
    server = CacheServer(settings, 5)
    assert server.configure().policy == "counts"
    entries = rows(100, 53_000)
    put_all(server, entries)
    server.touch([key(0), key(1)])
    put_all(server, [(key(1000 + n), random.randbytes(53_000)) for n in range(150)])
    facts = server.facts()
    assert facts.bytes <= facts.capacity
    assert facts.bytes > 0.9 * facts.capacity
    assert facts.entries + facts.evicted == 250
    _, found = server.get([key(0), key(1), key(2), key(50), key(1149)])
    assert [value is not None for value in found] == [True, True, False, False, True]
    with cache_server.client(1 if shared else 0) as client:
        stored = list(client.scan_iter(match="bm:cache:*", count=1000))
        assert len(stored) == facts.entries
        assert sum(len(client.get(name) or b"") for name in stored) <= facts.bytes
    assert server.drop([key(0), key(2)]) == 1
    for at in server.scan():
        server.drop(at)
    emptied = server.facts()
    assert (emptied.entries, emptied.bytes) == (0, 0)
    if shared:
        with cache_server.client(0) as client:
            assert client.get("somebody's") == b"own"
            assert client.config_get("maxmemory") == {"maxmemory": "0"}
    server.close()


def test_what_a_worker_has_in_its_own_memory_is_in_use_on_the_server_too(
    make: Make, opened: Opened, cache_server: RedisServer
) -> None:
    """Or the server would push out first what its workers give most."""
    cache = opened(make(sync_interval_ms=600_000))
    cache.check()
    cache.put(key(1), b"answer")
    cache.put(key(2), b"another")
    cache._flush()
    names = [b"bm:cache:" + key(number) for number in (1, 2)]
    with cache_server.client(0) as client:
        for name in names:
            client.restore(name, 0, client.dump(name), replace=True, idletime=5000)
        assert cache.get([key(1)]) == {key(1): b"answer"}
        assert [client.object("idletime", name) >= 5000 for name in names] == [True, True], "told behind, as all is"
        cache._flush()
        assert [client.object("idletime", name) >= 5000 for name in names] == [False, True]


def test_writing_an_answer_again_is_counted_once(make: Make, managed: str) -> None:
    server = CacheServer(make(user=managed), 5)
    server.configure()
    server.put([(key(1), b"x" * 100)])
    once = server.facts().bytes
    server.put([(key(1), b"x" * 100), (key(1), b"y" * 100)])
    assert server.facts().bytes == once
    server.put([(key(1), b"x" * 90)])
    assert server.facts().bytes == once - 10
    server.close()


def test_a_full_server_that_evicts_nothing_is_lived_with(
    make: Make, managed: str, opened: Opened, cache_server: RedisServer
) -> None:
    with cache_server.client(0) as client:
        used: Any = client.info("memory")
        client.config_set("maxmemory", int(used["used_memory"]) + (3 << 20))
    cache = opened(make(user=managed, capacity_gb=0.05, local_mb=0))
    cache.check()
    for name, body in rows(600, 10_000):
        cache.put(name, body)
    wait_until(lambda: not cache._pending, 30, "written")
    cache.close()
    server = CacheServer(make(user=managed, capacity_gb=0.05), 5)
    server.configure()
    facts = server.facts()
    assert facts.entries > 50
    assert facts.evicted > 0
    server.close()


def test_a_full_server_without_anything_of_ours_takes_nothing_and_breaks_nothing(
    make: Make, managed: str, opened: Opened, cache_server: RedisServer
) -> None:
    with cache_server.client(0) as client:
        client.config_set("maxmemory", 1)
    cache = opened(make(user=managed))
    cache.check()
    cache.put(key(1), b"answer")
    wait_until(lambda: cache._full, 20, "it was found full")
    assert cache.get([key(1), key(2)]) == {key(1): b"answer"}
    cache._flush()
    assert cache._breaker.closed, "what it holds is still asked for, though not even figures can be written"


@pytest.mark.parametrize(("user", "how"), [("", "a replica"), ("managed", "a replica"), ("managed", "full")])
def test_a_server_that_takes_nothing_is_asked_for_what_it_holds(
    make: Make, managed: str, opened: Opened, cache_server: RedisServer, user: str, how: str
) -> None:
    """Whatever its reason: full, on a full disk, demoted. Neither answers nor their uses nor figures can be told."""
    cache = opened(make(user=user, local_mb=0, sync_interval_ms=600_000))
    cache.check()
    cache.put(key(1), b"answer")
    cache._flush()
    with cache_server.client(0) as client:
        if how == "full":
            client.config_set("maxmemory", 1)
        else:
            # Of nobody: it keeps what it has and refuses whatever is written.
            client.replicaof("127.0.0.1", "1")
    assert cache.get([key(1)]) == {key(1): b"answer"}
    cache.count(hits=1, misses=0)
    if how != "full":
        # A cache that counts makes room for a new one, and so lets the other go.
        cache.put(key(2), b"another")
    cache._flush()
    assert cache.get([key(1)]) == {key(1): b"answer"}
    assert cache._breaker.closed
    assert cache._full is (how != "full")
    cache._look(configure=True)
    with cache_server.client(0) as client:
        client.replicaof("NO", "ONE")
        client.config_set("maxmemory", 0)
    cache.put(key(3), b"once more")
    cache.close()
    assert cache._server.counts()["m@1"] == {"hits": 1, "written": 2}


@pytest.mark.parametrize("user", ["", "managed"])
def test_entries_end_with_their_time(make: Make, managed: str, user: str) -> None:
    server = CacheServer(make(user=user, ttl_s=4), 5)
    server.configure()
    server.put([(key(1), b"x")])
    assert server.get([key(1)])[1] == [b"x"]
    wait_until(lambda: server.get([key(1)])[1] == [None], 10, "it is gone")
    server.put([(key(2), b"x")])
    assert server.get([key(2)])[1] == [b"x"]
    if user:
        assert server.facts().entries == 1
    server.close()


def test_answers_are_written_behind_and_the_rest_of_them_at_the_end(
    make: Make, opened: Opened, cache_server: RedisServer
) -> None:
    cache = opened(make(sync_interval_ms=600_000, local_mb=0))
    cache.check()
    cache.put(key(1), b"answer")
    with cache_server.client(0) as client:
        assert not client.exists(b"bm:cache:" + key(1)), "nobody waits for the server"
        assert cache.get([key(1)]) == {key(1): b"answer"}
        cache.close()
        assert client.exists(b"bm:cache:" + key(1))


def test_each_worker_writes_in_its_own_interval(make: Make, opened: Opened, cache_server: RedisServer) -> None:
    seldom, often = opened(make(sync_interval_ms=600_000)), opened(make(sync_interval_ms=50))
    seldom.put(key(0), b"answer")
    with cache_server.client(0) as client:
        for number in range(1, 31):
            often.put(key(number), b"answer")
            name = b"bm:cache:" + key(number)
            wait_until(functools.partial(client.exists, name), 30, "it is written", 0.005)
        # Thirty of the short intervals, and several of the default, have passed.
        assert not client.exists(b"bm:cache:" + key(0))


def test_no_answer_of_the_server_takes_longer_than_its_time(make: Make) -> None:
    """Neither does connecting; the client's own default is seconds."""
    server = CacheServer(make(timeout_ms=120), 0.12)
    said = server._redis.connection_pool.connection_kwargs
    assert (said["socket_timeout"], said["socket_connect_timeout"]) == (0.12, 0.12)
    server.close()


@pytest.mark.parametrize("role", ["BROKER", "STATE"])
def test_beside_the_broker_it_needs_at_least_another_database(cache_server: RedisServer, role: str) -> None:
    """There it counts for itself, since a broker's server must push nothing out."""
    url = f"redis://127.0.0.1:{cache_server.port}"
    env = KEY | {f"BATCHMILL_{role}_URL": f"{url}/0"}
    server = CacheServer(load(env=env | {"BATCHMILL_CACHE_URL": f"{url}/0"}), 5)
    with pytest.raises(UsageError, match=r"cache\.url"):
        server.configure()
    server.close()
    server = CacheServer(load(env=env | {"BATCHMILL_CACHE_URL": f"{url}/1"}), 5)
    assert server.configure().policy == "counts"
    server.close()


def test_more_capacity_than_the_machine_has_is_refused_even_when_the_server_is_away(
    make: Make, opened: Opened, cache_server: RedisServer
) -> None:
    cache = opened(make(capacity_gb=100_000))
    with pytest.raises(UsageError, match=r"cache\.capacity_gb"):
        cache.check()
    cache_server.kill()
    with pytest.raises(UsageError, match=r"cache\.capacity_gb"):
        cache.check()


@pytest.mark.parametrize("how", ["hangs", "is dead"])
def test_a_server_that_fails_costs_its_time_once(
    make: Make, opened: Opened, cache_server: RedisServer, how: str
) -> None:
    cache = opened(make(timeout_ms=300))
    cache.put(key(1), b"answer")
    if how == "hangs":
        cache_server.pause()
    else:
        cache_server.kill()
    began = time.monotonic()
    assert cache.get([key(1), key(2)]) == {key(1): b"answer"}
    assert time.monotonic() - began < 20
    began = time.monotonic()
    for _ in range(100):
        assert cache.get([key(2)]) == {}
        cache.put(key(3), b"answer")
    # Each of them would have taken 0.3 s.
    assert time.monotonic() - began < 20
    began = time.monotonic()
    cache.close()
    assert time.monotonic() - began < 20


def test_a_slow_server_costs_a_lookup_twice_its_time_at_most(
    make: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many round trips a chunk needs: each is in time, all of them together are not."""
    cache = opened(make(local_mb=0, sync_interval_ms=600_000))
    monkeypatch.setattr(cache, "_timeout_s", 0.2)
    put_all(cache._server, [(name, cache._values.pack(name, body)) for name, body in rows(6400, 10)])
    get, asked = cache._server.get_timed, 0

    def slow(keys: Sequence[bytes]) -> Any:
        nonlocal asked
        asked += 1
        time.sleep(0.1)
        return get(keys)

    monkeypatch.setattr(cache._server, "get_timed", slow)
    found = cache.get([key(number) for number in range(6400)])
    assert asked <= 4
    assert len(found) == 64 * asked > 0, "what was known by then is used"


def test_it_is_used_again_once_it_is_back(
    make: Make, opened: Opened, cache_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(make(timeout_ms=300, local_mb=0))
    cache._breaker._rest_s = 0.2
    cache_server.pause()
    cache.get([key(1)])
    assert not cache._breaker.closed
    cache_server.resume()
    wait_until(lambda: cache._breaker.closed, 30, "it is trusted again")
    with cache_server.client(0) as client:

        def written() -> bool:
            # Again and again: on a busy machine it may be found slow once more.
            cache.put(key(1), b"answer")
            return bool(client.exists(b"bm:cache:" + key(1)))

        wait_until(written, 30, "it is written")


def test_what_was_answered_while_the_server_was_away_is_written_later(
    make: Make, opened: Opened, cache_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(make(sync_interval_ms=600_000, local_mb=0))
    cache.check()
    cache_server.kill()
    cache.put(key(1), b"met it")
    cache._flush()
    assert not cache._breaker.closed
    cache.put(key(2), b"meanwhile")
    with monkeypatch.context() as resting:
        # Nobody may ask before it is found well again.
        resting.setattr(cache._server, "put", None)
        cache._flush()
    cache_server.start()
    cache._try_again()
    cache._flush()
    with cache_server.client(0) as client:
        assert client.exists(*(b"bm:cache:" + key(number) for number in (1, 2))) == 2
    assert cache._pending_bytes == 0
    assert cache._server.counts()["m@1"] == {"written": 2}


def test_what_waits_for_the_server_does_not_outlive_its_time(
    make: Make, opened: Opened, cache_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(make(sync_interval_ms=600_000, local_mb=0, ttl_s=1000))
    cache.check()
    cache.put(key(1), b"old")
    now = time.monotonic()

    def at(seconds: float) -> None:
        clock = SimpleNamespace(monotonic=lambda: now + seconds)
        monkeypatch.setattr("workers.cache.result_cache.time", clock)

    at(999)
    cache.put(key(2), b"new")
    assert len(cache.get([key(1), key(2)])) == 2
    at(1001)
    assert cache.get([key(1), key(2)]) == {key(2): b"new"}
    cache._flush()
    with cache_server.client(0) as client:
        assert [client.exists(b"bm:cache:" + key(number)) for number in (1, 2)] == [0, 1]


def test_what_was_cleared_is_forgotten_by_every_worker_at_once(make: Make, opened: Opened) -> None:
    settings = make()
    cache, server = opened(settings), CacheServer(settings, 5)
    cache.check()
    cache.put(key(1), b"answer")
    assert cache.get([key(1)]) == {key(1): b"answer"}
    wait_until(lambda: server.get([key(1)])[1] != [None], 20, "it is written")
    server.drop([key(1)])
    server.turn_epoch()
    assert cache.get([key(1)]) == {}
    cache.put(key(1), b"another")
    assert cache.get([key(1)]) == {key(1): b"another"}
    server.close()


def test_what_another_thread_saw_cleared_does_not_count(
    make: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between what this thread finds here and its word with the server, another one hears of the clearing."""
    settings = make(sync_interval_ms=600_000)
    cache, server = opened(settings), CacheServer(settings, 5)
    cache.check()
    cache.put(key(1), b"answer")
    here = cache._here

    def interrupted(keys: list[bytes]) -> dict[bytes, bytes]:
        found = here(keys)
        if key(1) in keys:
            server.turn_epoch()
            assert cache.get([key(2)]) == {}
        return found

    monkeypatch.setattr(cache, "_here", interrupted)
    assert cache.get([key(1)]) == {}
    server.close()


def test_what_waited_to_be_written_when_all_was_cleared_is_not(make: Make, opened: Opened) -> None:
    settings = make(sync_interval_ms=600_000)
    cache, server = opened(settings), CacheServer(settings, 5)
    cache.check()
    cache.put(key(1), b"answer")
    server.turn_epoch()
    cache.close()
    assert server.get([key(1)])[1] == [None]
    server.close()


def test_an_answer_from_the_server_ends_with_it(make: Make, opened: Opened, cache_server: RedisServer) -> None:
    settings = make(ttl_s=1000)
    writer, reader = opened(settings), opened(settings)
    writer.put(key(1), b"answer")
    writer.put(key(2), b"answer")
    assert {end is not None for _, end in writer._local._entries.values()} == {True}, "its own come to an end as well"
    writer.close()
    with cache_server.client(0) as client:
        client.pexpire(b"bm:cache:" + key(1), 1500)
        assert len(reader.get([key(1), key(2)])) == 2
        wait_until(lambda: reader.get([key(1), key(2)]) == {key(2): b"answer"}, 20, "it is forgotten here too")


def test_every_answer_is_counted_as_written_or_dropped(
    make: Make, opened: Opened, cache_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(make(sync_interval_ms=600_000))
    cache.check()
    counters = metrics.CACHE_WRITTEN, metrics.CACHE_DROPPED
    before = [counter._value.get() for counter in counters]
    for name, body in rows(200, 100):
        cache.put(name, body)
    put, parts = cache._server.put, 0

    def put_until_it_dies(entries: list[tuple[bytes, bytes]]) -> None:
        nonlocal parts
        parts += 1
        if parts == 3:
            cache_server.kill()
        put(entries)

    monkeypatch.setattr(cache._server, "put", put_until_it_dies)
    cache._flush()
    cache.put(key(1000), b"answer")
    cache._flush()
    # The rest waits for the server to come back, and now no longer.
    assert [counter._value.get() - was for counter, was in zip(counters, before, strict=True)] == [128, 0]
    cache.close()
    assert [counter._value.get() - was for counter, was in zip(counters, before, strict=True)] == [128, 73]


def test_what_waits_to_be_written_is_bounded(make: Make, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may be faster than the server."""
    monkeypatch.setattr(result_cache, "PENDING_BYTES", 1000)
    cache = opened(make(local_mb=0, sync_interval_ms=600_000))
    cache.check()
    for name, body in rows(5, 400):
        cache.put(name, body)
    assert len(cache.get([key(number) for number in range(5)])) == 2
    cache._flush()
    cache.put(key(9), bytes(900))
    assert cache.get([key(9)]) == {key(9): bytes(900)}, "what was written makes room"


def test_metrics_tell_what_the_cache_holds_gives_and_lacks(
    make: Make, opened: Opened, cache_server: RedisServer
) -> None:
    names = ("HITS", "MISSES", "WRITTEN", "DROPPED", "FAILURES")

    def counted() -> list[float]:
        return [getattr(metrics, f"CACHE_{name}")._value.get() for name in names]

    gauges = metrics.CACHE_ENTRIES, metrics.CACHE_BYTES, metrics.CACHE_CAPACITY, metrics.CACHE_EVICTED
    before = counted()
    cache = opened(make(capacity_gb=0.01, sync_interval_ms=600_000))
    cache.check()
    for part in range(0, 1500, 500):
        for name, body in rows(part + 500, 10_000)[part:]:
            cache.put(name, body)
        cache._flush()
    cache.put(key(0), bytes((4 << 20) + 1))
    cache.count(hits=3, misses=2)
    cache._look()
    assert [now - was for now, was in zip(counted(), before, strict=True)] == [3, 2, 1500, 1, 0]
    # As this look found it: a server that is full goes on pushing out for a moment.
    assert cache.facts is not None
    assert [gauge._value.get() for gauge in gauges] == list(msgspec.structs.astuple(cache.facts))
    assert 0 < cache.facts.entries < 1500
    assert 0 < cache.facts.evicted < 1500
    assert cache.facts.capacity_bytes == int(0.01 * (1 << 30))
    cache_server.kill()
    assert cache.get([b"n" * 48]) == {}
    assert (counted()[-1] - before[-1], metrics.CACHE_RESTING._value.get()) == (1, 1)
    cache_server.start()
    cache._try_again()
    assert metrics.CACHE_RESTING._value.get() == 0


def test_what_is_no_value_hinders_nobody(make: Make, managed: str, opened: Opened, cache_server: RedisServer) -> None:
    """Where the cache counts, its scripts meet it."""
    cache = opened(make(user=managed, local_mb=0))
    cache.check()
    with cache_server.client(0) as client:
        client.lpush(b"bm:cache:" + key(1), "not even a string")
        assert cache.get([key(1)]) == {}
        cache.put(key(1), b"answer")
        cache.close()
        assert client.type(b"bm:cache:" + key(1)) == b"string"


def test_a_value_that_somebody_else_wrote_is_no_answer(make: Make, opened: Opened, cache_server: RedisServer) -> None:
    cache = opened(make())
    cache.check()
    with cache_server.client(0) as client:
        client.set(b"bm:cache:" + key(1), b"\x01" + bytes(16) + b"not ours")
        client.lpush(b"bm:cache:" + key(2), "not even a string")
    assert cache.get([key(1), key(2)]) == {}


def test_workers_keep_their_figures_together(make: Make, opened: Opened) -> None:
    settings = make()
    server = CacheServer(settings, 5)
    for _ in range(2):
        cache = opened(settings)
        cache.put(key(1), b"answer")
        cache.count(hits=2, misses=1)
        cache.close()
    assert server.counts()["m@1"] == {"hits": 4, "misses": 2, "written": 2}
    with pytest.raises(redis.ConnectionError):
        CacheServer(load(env={"BATCHMILL_CACHE_URL": "redis://127.0.0.1:1/0"}), 0.5).ping()
    server.close()
