"""Picks the engine by settings. The only place that knows them all, and that imports vLLM."""

from __future__ import annotations

from common.registry import Registry
from common.settings import Settings
from workers.engine.base import Engine


def load(settings: Settings, registry: Registry, model_version: str) -> Engine:
    """The engine for an exact `name@version`, not started yet; `UsageError` for a version the registry lacks."""
    entry = registry.get(model_version)
    if settings.inference.engine == "echo":
        from workers.engine import echo

        return echo.make(model_version, entry, settings)
    from workers.engine.vllm import VllmEngine

    return VllmEngine(model_version, entry, settings)
