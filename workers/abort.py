"""Why work on a chunk is given up. The reasons lead to different endings, so they are never one flag."""

from __future__ import annotations

from enum import Enum


class Abort(Enum):
    """Who wants a chunk to stop, and so what becomes of its message."""

    #: The worker ends: what is done is published, the message goes back to the queue for another worker.
    DRAIN = "drain"
    #: A person revoked the task: what is done is published with a final `terminated`, the message is acknowledged.
    USER = "user"
    #: `not_after` has passed by this clock: what is done is published with a final `too_late`, then acknowledged.
    EXPIRED = "expired"
    #: The engine died: what was answered before is published, the process exits with the message unacknowledged.
    ENGINE = "engine"
