"""Batches that ask for a result cache in a worker that has none: said once a batch, since nothing else would tell."""

from __future__ import annotations

import threading
from collections import OrderedDict

from common import logs
from common.messages import Chunk

#: Batches remembered; one that comes again after so many others is told of again.
_REMEMBERED = 1024

log = logs.get(__name__)


class Uncached:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, None] = OrderedDict()

    def note(self, chunk: Chunk) -> None:
        """A chunk is computed without the cache that it asks for."""
        for part in chunk.slices:
            with self._lock:
                known = part.batch in self._known
                self._known[part.batch] = None
                if len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
            if not known:
                log.warning(
                    "the batch asks for the result cache, but this worker has no cache.url; all of it is computed",
                    batch=part.batch,
                    cache=chunk.cache,
                )
