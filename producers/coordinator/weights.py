"""What a batch weighs in the fair queue. Pure.

Tenants share a model version by `scheduler.tenants`; each tenant's share is divided among its batches by priority and
by how near their deadlines are. Neither lets a tenant take from another.
"""

from __future__ import annotations

from common.settings import PRIORITY_WEIGHTS, Scheduler
from producers.coordinator.progress import Progress

#: How many times heavier a batch becomes at most as its deadline nears: two steps of priority.
DEADLINE_MOST = 16.0


class Weights:
    """Weights by the settings of a fleet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._tenants = scheduler.tenants
        self._priorities = PRIORITY_WEIGHTS | scheduler.priority_weights

    def of(self, progress: Progress, now: float) -> tuple[float, float]:
        """The batch's weight and its tenant's, at `now` (Unix seconds)."""
        batch = progress.batch
        # A priority that is not known here was set by another version of this program.
        weight = self._priorities.get(progress.priority, 1.0)
        if batch.expires_at is not None:
            weight *= urgency(batch.created_at, batch.expires_at, now)
        return weight, self._tenants.get(batch.tenant, 1.0)


def urgency(created_at: float, expires_at: float, now: float) -> float:
    """1 at first, 2 when half of the time is over, 10 with a tenth left, `DEADLINE_MOST` from a sixteenth on."""
    whole, left = expires_at - created_at, expires_at - now
    if whole <= 0 or left * DEADLINE_MOST <= whole:
        return DEADLINE_MOST
    return max(1.0, whole / left)
