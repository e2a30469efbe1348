#!/usr/bin/env python3
"""Health of a container's role: `batchmill-health coordinator|worker|flower`; not healthy: exit status 1, one line."""

from __future__ import annotations

import os
import socket
import sys
import time
import urllib.request

import msgspec
import redis

from common import places, settings
from common.errors import BatchmillError
from common.live import LiveState
from common.store import open_store
from producers.batch import Heartbeat

#: The coordinator writes a heartbeat every second or two.
HEARTBEAT_AGE_S = 15.0


def coordinator() -> str | None:
    """None when the coordinator of shard `BATCHMILL_SHARD` (default 0) has given a sign of life lately."""
    store = open_store(places.store_url(settings.load()))
    shard = os.environ.get("BATCHMILL_SHARD", "0")
    try:
        heartbeat = msgspec.json.decode(store.read(f"coordinator/{shard}.json"), type=Heartbeat)
    except FileNotFoundError:
        return "no heartbeat yet"
    age = time.time() - heartbeat.at
    return None if age < HEARTBEAT_AGE_S else f"last heartbeat {age:.0f} s ago"


def worker() -> str | None:
    """None when a worker of this host has announced itself lately (loading counts: weights take minutes)."""
    host = socket.gethostname()
    found = [w for w in LiveState(settings.load()).workers() if w.host == host]
    return None if found else "no worker of this host is known"


def flower() -> str | None:
    """None when Flower answers."""
    port = os.environ.get("FLOWER_PORT", "5555")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthcheck", timeout=5) as answer:
        return None if answer.status == 200 else f"status {answer.status}"


def main() -> int:
    """Run the check named on the command line."""
    checks = {"coordinator": coordinator, "worker": worker, "flower": flower}
    check = checks.get(sys.argv[1] if len(sys.argv) == 2 else "")
    if check is None:
        sys.stderr.write(f"usage: batchmill-health {'|'.join(checks)}\n")
        return 2
    try:
        problem = check()
    except (BatchmillError, redis.RedisError, OSError, msgspec.MsgspecError) as exc:
        problem = str(exc)
    if problem:
        sys.stderr.write(f"unhealthy: {problem}\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
