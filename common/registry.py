"""The model registry: `config/models.yaml` maps a model version `name@version` to weights and how to run them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from common import engine_arguments
from common.conversion import convert
from common.errors import UsageError
from common.settings import read_yaml

_NAME = re.compile(r"^[a-z0-9][a-z0-9_-]{0,63}@[a-z0-9][a-z0-9_-]{0,31}$")


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker of this model needs."""

    #: GPUs of one engine (tensor parallel size); 0 where a CPU will do.
    gpus: Annotated[int, msgspec.Meta(ge=0)] = 1
    #: GB of memory free on each GPU.
    gpu_memory_gb: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    #: GB of KV cache when it runs on a CPU.
    cpu_kv_gb: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    disk_gb: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast one worker of this model is with a full batch, and what it costs, for `producers analyze`."""

    prompt_tokens_per_s: Annotated[float, msgspec.Meta(gt=0)]
    output_tokens_per_s: Annotated[float, msgspec.Meta(gt=0)]
    cost_per_hour: Annotated[float, msgspec.Meta(ge=0)] | None = None
    currency: str = "USD"


class ModelVersion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of models.yaml."""

    #: A folder, `hf:org/name@revision`, `pypi:dist==version#file.gguf`, or `s3://bucket/prefix`.
    source: str
    #: `blake3:<64 hex>` over the model folder; unset: recorded at the first pull and held to after that.
    digest: str | None = None
    #: Arguments of the engine, by vLLM's names (`max_num_seqs`, `max_model_len`, `enforce_eager`, …).
    engine: dict[str, Any] = {}
    #: Requests in the queue and in engines at a time, all workers together; None: as many as the workers can use.
    max_concurrency: int | None = None
    hardware: Hardware = msgspec.field(default_factory=Hardware)
    #: Which answers the result cache keeps: `determined`, `all` (sampled ones too), or `off`.
    cache: Literal["determined", "all", "off"] = "determined"
    #: Asked once when an engine starts: texts, lists of messages, requests, `file: PATH` (`workers.engine.warm_up`).
    warm_up: list[str | list[dict[str, Any]] | dict[str, Any]] = []
    #: Measured rates, for estimates; None: no estimate of time and cost.
    rates: Rates | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: dict[str, ModelVersion] = {}
    #: name → version that a bare name means; rollback is changing one line.
    current: dict[str, str] = {}
    default: str | None = None


class Registry:
    """Model versions by name. Immutable."""

    def __init__(
        self,
        models: Mapping[str, ModelVersion],
        current: Mapping[str, str],
        default: str | None,
        where: str = "models.yaml",
    ) -> None:
        self._models = dict(models)
        self._current = dict(current)
        self._default = default
        self.where = where

    @property
    def versions(self) -> dict[str, ModelVersion]:
        """All entries, `name@version` → entry."""
        return dict(self._models)

    def get(self, model_version: str) -> ModelVersion:
        """The entry of an exact `name@version`; `UsageError` when there is none."""
        entry = self._models.get(model_version)
        if entry is None:
            raise UsageError(self._unknown(model_version))
        return entry

    def resolve(self, name: str | None) -> str:
        """`name@version` for a name, a name with version, or None (the default); `UsageError` when unknown."""
        if not name:
            if self._default is None:
                raise UsageError(f"no model named, and {self.where} has no 'default'; use --model")
            return self.resolve(self._default)
        if name in self._models:
            return name
        if "@" not in name:
            version = self._current.get(name)
            if version is not None:
                return f"{name}@{version}"
            found = [v for v in self._models if v.partition("@")[0] == name]
            if len(found) == 1:
                return found[0]
            if found:
                raise UsageError(
                    f"{self.where}: '{name}' has versions {', '.join(sorted(found))} and no entry under 'current'; "
                    "name one"
                )
        raise UsageError(self._unknown(name))

    def _unknown(self, name: str) -> str:
        known = ", ".join(sorted(self._models)) or "none"
        return f"unknown model '{name}'; {self.where} has: {known}"


def default_models_path(env: Mapping[str, str] = os.environ) -> Path | None:
    """`$BATCHMILL_MODELS`, else `models.yaml` beside the fleet file or in `config/`, else None."""
    named = env.get("BATCHMILL_MODELS")
    if named:
        return Path(named)
    fleet = env.get("BATCHMILL_CONFIG")
    places = [Path(fleet).parent / "models.yaml"] if fleet else []
    return next((p for p in [*places, Path("config/models.yaml")] if p.exists()), None)


def load(path: Path | None = None, env: Mapping[str, str] = os.environ) -> Registry:
    """The registry out of `path` (default: `default_models_path`); `UsageError` names file and key."""
    path = path or default_models_path(env)
    if path is None:
        raise UsageError("no models.yaml found; set BATCHMILL_MODELS or run where config/models.yaml is")
    raw = read_yaml(path)
    file = convert(raw, _File, str(path))
    for name in file.models:
        if not _NAME.match(name):
            raise UsageError(
                f"{path}: '{name}' is not a model version; write name@version in lower case (letters, digits, - and _)"
            )
        most = file.models[name].max_concurrency
        if most is not None and most < 1:
            raise UsageError(f"{path}: models.{name}.max_concurrency: {most} is too small, at least 1 is needed")
        wrong = engine_arguments.fault(file.models[name].engine)
        if wrong is not None:
            raise UsageError(f"{path}: models.{name}.engine.{wrong[0]}: {wrong[1]}")
    for name, version in file.current.items():
        if f"{name}@{version}" not in file.models:
            raise UsageError(f"{path}: current.{name}: no entry '{name}@{version}' under models")
    registry = Registry(file.models, file.current, file.default, str(path))
    if file.default is not None:
        registry.resolve(file.default)
    return registry
