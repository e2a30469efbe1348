"""Whether a fleet can be expected to run a batch, asked before one is enqueued."""

from __future__ import annotations

import time
from collections.abc import Callable

from common.registry import Registry
from common.settings import Settings
from common.store import Store
from producers.batch_view import alive, heartbeat


def check_fleet(
    settings: Settings,
    store: Store,
    registry: Callable[[], Registry],
    say: Callable[[str], None] = lambda _line: None,
) -> bool:
    """True when a coordinator has been seen lately; `Unreachable` when there is none and no broker either.

    For the embedded fleet, which comes when it is needed: `UsageError` when it could not. One that runs with other
    settings than these ends if it has nothing to do (`say` tells of it); `Unreachable` when it has, in another
    store. `registry` is only asked for where one runs.
    """
    if settings.broker.url is None:
        from producers import embedded
        from producers.embedded.linger import linger

        linger()
        embedded.make_way(settings, registry, say=say)
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
