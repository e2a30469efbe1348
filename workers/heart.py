"""The worker's heartbeat for monitors. Celery's holds the main thread for as long as the broker is away.

It is sent by a timer of the event loop, and published over and over until the broker takes it: a broker that goes away
right before leaves the main thread in there. No signal is seen then, so no drain begins, and what is done meanwhile is
not acknowledged. One more attempt on a new connection is enough; where that fails too, the loop notices by itself.
"""

from __future__ import annotations

import functools
from typing import Any

from celery.worker.consumer import heart

#: For `kombu.Connection.ensure`: once more, at once.
ONCE_MORE = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}


class Heart(heart.Heart):  # type: ignore[misc]
    """Celery's step, with an end to its attempts; so have all events that are tried again."""

    def start(self, c: Any) -> None:
        """Each connection has a dispatcher of its own."""
        c.event_dispatcher.send = functools.partial(c.event_dispatcher.send, retry_policy=ONCE_MORE)
        super().start(c)
