"""How large chunks and windows are: from the workers that live, or, while there is none, from the registry."""

from __future__ import annotations

from common.engine_arguments import argument
from common.errors import UsageError
from common.live import WorkerFacts
from common.logs import get
from common.registry import ModelVersion, Registry
from common.settings import Settings
from producers.coordinator.capacity import Capacity, capacity
from producers.coordinator.chunk_times import ChunkTimes

log = get(__name__)

#: vLLM's own default for offline use.
DEFAULT_MAX_NUM_SEQS = 256


class EngineSize:
    """Capacities by model version."""

    def __init__(self, settings: Settings, registry: Registry | None) -> None:
        self._settings = settings
        self._registry = registry
        self._last: list[WorkerFacts] = []
        self._warned: set[str] = set()

    def capacity(self, model: str, workers: list[WorkerFacts] | None, times: ChunkTimes | None = None) -> Capacity:
        """What the workers of `model` can take; while nobody knows of any (None), what was last known.

        `times`: how long workers have a chunk, as measured.
        """
        if workers is not None:
            self._last = workers
        room = capacity(
            self._settings.scheduler,
            self._last,
            model,
            self._max_num_seqs(model),
            self._settings.inference.chunks_in_flight,
            times,
            self._max_concurrency(model),
        )
        if room.wanted > room.queue_size and model not in self._warned:
            self._warned.add(model)
            log.warning(
                "window_small", model=model, queue_size=room.queue_size, wanted=room.wanted, workers=room.workers
            )
        return room

    def _max_num_seqs(self, model: str) -> int:
        if self._settings.inference.batch_size:
            return self._settings.inference.batch_size
        entry = self._entry(model)
        try:
            return int(argument(entry.engine, "max_num_seqs")) if entry is not None else DEFAULT_MAX_NUM_SEQS
        except (TypeError, ValueError):
            return DEFAULT_MAX_NUM_SEQS

    def _max_concurrency(self, model: str) -> int | None:
        entry = self._entry(model)
        if entry is None or entry.max_concurrency is None:
            return None
        # Every shard sends to the same workers.
        return max(1, entry.max_concurrency // self._settings.scheduler.shards)

    def _entry(self, model: str) -> ModelVersion | None:
        try:
            return self._registry.get(model) if self._registry is not None else None
        except UsageError:
            return None  # Not in the registry of this machine: the workers that serve it will tell.
