"""`producers coordinate`."""

from __future__ import annotations

from common import logs
from common.errors import UsageError
from producers.cli import surroundings


def coordinate(shard: int) -> int:
    """Run one shard's coordinator until SIGTERM or Ctrl-C."""
    from producers.coordinator import run

    settings = surroundings.load_settings()
    if shard >= settings.scheduler.shards:
        raise UsageError(f"--shard {shard}: scheduler.shards is {settings.scheduler.shards}, they count from 0")
    logs.configure(settings.telemetry, "coordinator")
    run(settings, shard)
    return 0
