"""Flower's settings: `python -m common.flower --conf=config/flowerconfig.py` (`make flower`).

Flower has no login of its own here, and its `/metrics` and `/healthcheck` bypass any that is set: so it listens on
loopback. To show it to others, put a proxy with a login in front, or name a file with `user:password` in
FLOWER_BASIC_AUTH_FILE and set FLOWER_ADDRESS, behind TLS.
"""

import os
from pathlib import Path

address = os.environ.get("FLOWER_ADDRESS", "127.0.0.1")
port = int(os.environ.get("FLOWER_PORT", "5555"))

# Values out of files, for secrets: a login, and RabbitMQ's management API (for the Broker page).
if "FLOWER_BASIC_AUTH_FILE" in os.environ:
    basic_auth = [Path(os.environ["FLOWER_BASIC_AUTH_FILE"]).read_text("utf-8").strip()]
if "FLOWER_BROKER_API_FILE" in os.environ:
    broker_api = Path(os.environ["FLOWER_BROKER_API_FILE"]).read_text("utf-8").strip()

# Cancel with `producers cancel`, end a worker with SIGTERM: a task revoked from here would be sent again by the
# coordinator, and a pool does not grow, since its size is the engine's.
read_only = True

# Workers send their events by themselves; Flower need not order them to.
enable_events = False

# Milliseconds. A worker answers between two pieces of work of its main thread, on a busy machine not within one second.
inspect_timeout = 8000.0

# About 5 kB a task.
max_tasks = 20_000
max_workers = 1_000
# Seconds: node names come and go with hosts and processes.
purge_offline_workers = 3600

# Seconds; a chunk runs from a moment to an hour, and the default ends at ten seconds.
task_runtime_metric_buckets = [1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0]

# What a row of the tasks page shows: the chunk's id, and `args` that name number of requests, batch and chunk, never a
# prompt.
tasks_columns = "uuid,args,state,received,started,runtime,worker"


def format_task(task):
    """The number of requests first: the column cuts off what comes last, which is the chunk's id again."""
    words = (task.args or "").split()
    task.args = " ".join(sorted(words, key=lambda word: not word.startswith("requests=")))
    return task
