"""What the fault suite does to brokers, and what it asks of them afterwards."""

from __future__ import annotations

import contextlib
import json
import shutil
import urllib.error
import urllib.parse
from collections import Counter
from typing import Any

from tests.support.brokers import Broker, Depth, RabbitBroker, RedisBroker

#: Keys that may stay in a fleet's Redis for good, by their beginning: bindings of kombu, what is documented to stay or
#: to lapse by itself (`common.live`).
_STAYING = ("_kombu.binding", "bm:generation", "bm:workers", "bm:cancelled:", "bm:given_up:")


def lose_disk(broker: Broker) -> None:
    """Kill the server, delete its data folder, start it empty; its Redis for live state is emptied too."""
    broker.kill()
    if isinstance(broker, RabbitBroker):
        shutil.rmtree(broker.server.folder / "mnesia")
        broker.start()
        # What an operator's definitions file does when the node boots.
        broker.server.api("PUT", f"vhosts/{broker.vhost}", {})
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        broker.server.api("PUT", f"permissions/{broker.vhost}/guest", everything)
        broker.wipe_state()
    else:
        assert isinstance(broker, RedisBroker)
        for path in broker.server.folder.glob("appendonly*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        broker.start()


def drop_clients(broker: Broker) -> int:
    """Let the broker close every client's connection; how many it were."""
    if isinstance(broker, RedisBroker):
        with contextlib.closing(broker.state) as client:
            done: Any = client.client_kill_filter(_type="normal", skipme=True)
            return int(done)
    assert isinstance(broker, RabbitBroker)
    closed = 0
    for found in broker.server.api("GET", f"vhosts/{broker.vhost}/connections"):
        with contextlib.suppress(urllib.error.HTTPError):  # gone already
            broker.server.api("DELETE", f"connections/{urllib.parse.quote(found['name'], safe='')}")
            closed += 1
    return closed


def messages(broker: Broker) -> dict[str, Depth]:
    """Every queue that holds something, Celery's own, orphans and the dead-letter queue too."""
    found = _rabbit_queues(broker) if isinstance(broker, RabbitBroker) else _redis_lists(broker)
    return {name: depth for name, depth in found.items() if depth != Depth(0, 0)}


def leftovers(broker: Broker) -> list[str]:
    """Keys in the fleet's Redis that should be gone once the fleet is: leases, announcements, kombu's bookkeeping."""
    with contextlib.closing(broker.state) as client:
        keys = [key.decode() for key in client.scan_iter(count=1000)]
    return sorted(key for key in keys if not key.startswith(_STAYING))


def _rabbit_queues(broker: RabbitBroker) -> dict[str, Depth]:
    asked = f"queues/{broker.vhost}?disable_stats=true&enable_queue_totals=true"
    return {
        q["name"]: Depth(q.get("messages_ready", 0), q.get("messages_unacknowledged", 0))
        for q in broker.server.api("GET", asked)
    }


def _redis_lists(broker: Broker) -> dict[str, Depth]:
    with contextlib.closing(broker.state) as client:
        names = list(client.scan_iter(_type="list", count=1000))
        ready = {name.decode(): int(client.llen(name)) for name in names}
        held: Any = client.hvals("unacked")
        indexed: Any = client.zcard("unacked_index")
    unacked = Counter(json.loads(entry)[2] for entry in held)
    found = {name: Depth(ready.get(name, 0), unacked[name]) for name in {*ready, *unacked}}
    if indexed != len(held):
        found["unacked_index"] = Depth(0, indexed)
    return found
