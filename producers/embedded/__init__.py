"""The embedded fleet: broker, coordinator and workers on this machine, brought up when no broker is configured.

A daemon in a session of its own runs a real Redis server on a private Unix socket, `producers coordinate` and one
`workers start` a wanted model, restarts what exits, and ends by itself when there has been nothing to do for a while.
One fleet a home folder (`common.places.fleet_dir`), shared by all commands of one user.
"""

from __future__ import annotations

from producers.embedded.fleet import Fleet, down, ensure, make_way, status
from producers.embedded.record import Record, WorkerState

__all__ = ["Fleet", "Record", "WorkerState", "down", "ensure", "make_way", "status"]
