"""How large chunks and windows are: from the workers that live, or, while there is none, from the registry."""

from __future__ import annotations

from common.errors import UsageError
from common.live import WorkerFacts
from common.registry import Registry
from common.settings import Settings
from producers.coordinator.packing import Capacity, capacity

#: vLLM's own default for offline use.
DEFAULT_MAX_NUM_SEQS = 256


class EngineSize:
    """Capacities by model version."""

    def __init__(self, settings: Settings, registry: Registry | None) -> None:
        self._settings = settings
        self._registry = registry
        self._last: list[WorkerFacts] = []

    def capacity(self, model: str, workers: list[WorkerFacts] | None) -> Capacity:
        """What the workers of `model` can take; while nobody knows of any (None), what was last known."""
        if workers is not None:
            self._last = workers
        return capacity(
            self._settings.scheduler,
            self._last,
            model,
            self._max_num_seqs(model),
            self._settings.inference.chunks_in_flight,
        )

    def _max_num_seqs(self, model: str) -> int:
        if self._settings.inference.batch_size:
            return self._settings.inference.batch_size
        if self._registry is not None:
            try:
                return int(self._registry.get(model).engine.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS))
            except (UsageError, TypeError, ValueError):
                # Not in the registry of this machine: the workers that serve it will tell.
                return DEFAULT_MAX_NUM_SEQS
        return DEFAULT_MAX_NUM_SEQS
