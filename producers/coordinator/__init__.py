"""The coordinator: the only writer of a batch's state. `run(settings, shard)` is all that others need."""

from __future__ import annotations

from common.settings import Settings


def run(settings: Settings, shard: int = 0) -> None:
    """Coordinate a shard until SIGTERM or SIGINT; see `producers.coordinator.service.run`."""
    # Late, because the commands that only read the store must start without kombu.
    from producers.coordinator.service import run as run_service

    run_service(settings, shard)
