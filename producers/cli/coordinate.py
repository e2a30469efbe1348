"""`producers coordinate`."""

from __future__ import annotations

from common import exits, logs, say
from common.errors import UsageError
from producers.cli import surroundings


def coordinate(shard: int) -> int:
    """Run one shard's coordinator until SIGTERM or Ctrl-C, or until another one has taken over."""
    from common import metrics
    from producers.coordinator import run
    from producers.coordinator.core import Ousted

    settings = surroundings.load_settings()
    if shard >= settings.scheduler.shards:
        raise UsageError(f"--shard {shard}: scheduler.shards is {settings.scheduler.shards}, they count from 0")
    logs.configure(settings.telemetry, "coordinator")
    metrics.serve(settings.telemetry, shard)
    try:
        run(settings, shard)
    except Ousted:
        say.err(f"producers: another coordinator has taken over shard {shard}; started again, this one stands by")
        return exits.OUSTED
    return exits.ANSWERED
