"""Whether a fleet can be expected to run a batch, asked before one is enqueued."""

from __future__ import annotations

import time

from common.settings import Settings
from common.store import Store
from producers.batch_view import alive, heartbeat


def check_fleet(settings: Settings, store: Store) -> bool:
    """True when a coordinator has been seen lately; `Unreachable` when there is none and no broker either.

    For the embedded fleet, which comes when it is needed: `UsageError` when it could not.
    """
    if settings.broker.url is None:
        from producers.embedded.linger import linger

        linger()
        return False
    return _check_configured(settings, store)


def _check_configured(settings: Settings, store: Store) -> bool:
    """As `check_fleet`, with a broker configured.

    A batch only needs the store to be enqueued, and a machine that submits need not reach the broker. But where neither
    a coordinator nor a broker is to be found, the settings are more likely wrong than the fleet asleep.
    """
    now = time.time()
    if any(alive(heartbeat(store, shard), now) for shard in range(settings.scheduler.shards)):
        return True
    from common.broker import connect

    connect(settings).release()
    return False
