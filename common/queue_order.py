"""In which order a consumer of several queues on Redis looks into them.

kombu goes round, so what was sent to one worker alone would wait for half of what all workers share. RabbitMQ needs no
order: each queue has a consumer of its own there, with places of its own.
"""

from __future__ import annotations

from kombu.utils.scheduling import priority_cycle


class OwnFirst(priority_cycle):  # type: ignore[misc]
    """A worker's own queue before the one that it is named after (`infer.<model>.<version>.<node>`)."""

    def consume(self, n: int) -> list[str]:
        """The queues to look into, the first one first."""
        return sorted(self.items[:n], key=lambda name: (-len(name), name))


#: kombu's name for it (transport option `queue_order_strategy`).
NAME = f"{__name__}:{OwnFirst.__name__}"
