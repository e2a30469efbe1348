"""What the result cache adds to a chunk, well and in trouble: `python -m benchmarks.cache_trouble`.

A chunk of 512 requests is looked up, and its answers are kept, as a worker does it, on real Redis servers: one that is
well, one that is full and takes nothing, one that hangs (SIGSTOP), and a port where nobody listens. Printed in
milliseconds: what the first chunk waits in all, and the median and the most of those after it. The small cache in front
is off. And in microseconds, what it takes to tell the key of a request, which single flight needs too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common.settings import Settings, load
from tests.support.brokers import RedisServer, redis_server
from tests.support.ports import free_port
from workers.cache.key import Space
from workers.cache.result_cache import ResultCache

REQUESTS = 512
ANSWER = b"a" * 600


def _settings(port: int, user: str = "") -> Settings:
    return load(
        env={
            "BATCHMILL_SECURITY_RESULTS_KEY": "ab" * 32,
            "BATCHMILL_CACHE_URL": f"redis://{user}127.0.0.1:{port}/0",
            "BATCHMILL_CACHE_LOCAL_MB": "0",
        }
    )


@contextmanager
def _case(name: str) -> Iterator[ResultCache]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bm-bench-")))
        server: RedisServer | None = None
        if name == "nobody listens":
            settings = _settings(free_port())
        else:
            server = stack.enter_context(redis_server(folder))
            user = ""
            if name == "full":
                # One that may not be configured, and has no room: every write is refused.
                with server.client(0) as client:
                    client.execute_command("ACL", "SETUSER", "managed", "on", ">x", "~*", "&*", "+@all", "-config")
                    client.config_set("maxmemory", 1)
                user = "managed:x@"
            settings = _settings(server.port, user)
        cache = ResultCache(settings, "m@1")
        stack.callback(cache.close)
        cache.check()
        if server is not None and name == "hangs":
            server.pause()
            stack.callback(server.resume)
        yield cache


def _chunk(cache: ResultCache, number: int) -> float:
    keys = [b"%048d" % (number * REQUESTS + n) for n in range(REQUESTS)]
    began = time.perf_counter()
    known = cache.get(keys)
    for key in keys:
        if key not in known:
            cache.put(key, ANSWER)
    return 1000 * (time.perf_counter() - began)


def _key_us(temperature: bytes) -> float:
    """Microseconds for the key of a request of 500 bytes, or for telling that it has none."""
    space = Space("m@1", "f")
    body = b'{"messages":[{"role":"user","content":"%b"}],"max_tokens":16%b}'
    bodies = [body % (b"%09d" % n + b"x" * 430, temperature) for n in range(20_000)]
    began = time.perf_counter()
    for one in bodies:
        space.key("default", 0, one)
    return 1e6 * (time.perf_counter() - began) / len(bodies)


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=40)
    chunks: int = parser.parse_args().chunks
    keyed, none = _key_us(b',"temperature":0'), _key_us(b"")
    print(f"a key: {keyed:.1f} us where there is one, {none:.2f} us where there is none")
    print(f"{'server':<16}{'first':>10}{'median':>10}{'most':>10}   ms for {REQUESTS} requests")
    for name in ("well", "full", "hangs", "nobody listens"):
        with _case(name) as cache:
            times = []
            for number in range(chunks):
                times.append(_chunk(cache, number))
                # As chunks come: the writer's thread has time for its own tries in between.
                time.sleep(0.3)
        rest = times[1:]
        print(f"{name:<16}{times[0]:>10.1f}{statistics.median(rest):>10.1f}{max(rest):>10.1f}")


if __name__ == "__main__":
    main()
