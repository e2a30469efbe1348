"""KV offload: may this model's engine keep KV cache blocks in host memory here?

`kv_offloading_size` (GiB, of all GPUs of the engine together) with `kv_offloading_backend: native` or `lmcache`, or a
`kv_transfer_config` that names a connector. vLLM 0.32 finds out what it cannot do only after the weights are loaded, in
a traceback of one of its processes.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from common import engine_arguments
from common.registry import ModelVersion
from workers.preflight.finding import Finding, ok, problem, warning
from workers.preflight.machine import GB, Machine

#: Connectors that keep blocks in this machine's memory; vLLM has them for CUDA, ROCm and XPU devices.
_NATIVE = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})
_LMCACHE = frozenset({"LMCacheConnectorV1", "LMCacheMPConnector"})
GIB = 1 << 30
#: What the simple connector takes where nothing is said.
_SIMPLE_BYTES = 8 * GIB
#: GB that stay free beside what is offloaded.
_SPARE_GB = 2.0


def check_offload(
    entry: ModelVersion,
    build: tuple[str, str] | None,
    machine: Machine,
    installed: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
) -> Finding:
    """One line on what the entry asks for. `installed`: whether a package can be imported."""
    size, config = engine_arguments.offloading_gib(entry.engine), engine_arguments.transfer_config(entry.engine)
    connectors = list(_connectors(config))
    names = {name for name, _ in connectors}
    if size is not None:
        lmcache = engine_arguments.argument(entry.engine, "kv_offloading_backend") == "lmcache"
        names.add("LMCacheMPConnector" if lmcache else "OffloadingConnector")
    if not names & (_NATIVE | _LMCACHE):
        return ok("offload", ", ".join(sorted(names)) if names else "none")
    asked = "engine.kv_offloading_size" if size is not None else "engine.kv_transfer_config"
    on_cpu = build is not None and build[0] == "cpu"
    if on_cpu and names & _NATIVE:
        return problem(
            "offload",
            f"{asked}: on a CPU the KV cache is in main memory already and vLLM refuses to offload it; take it out and "
            "raise hardware.cpu_kv_gb",
        )
    if names & _LMCACHE and not installed("lmcache"):
        return problem("offload", f"{asked}: LMCache is not installed; pip install lmcache")
    if on_cpu:
        return warning("offload", f"{asked}: LMCache beside vLLM's build for CPUs is untried; vLLM may refuse it")
    if names & _NATIVE:
        try:
            needed = size * GIB if size is not None else sum(_bytes(*one, entry.hardware.gpus) for one in connectors)
        except ValueError as exc:
            return problem("offload", f"{asked}: {exc}")
        text = f"{needed / GB:.1f} GB of main memory for KV cache, {machine.memory_gb:.1f} GB available"
        if needed / GB > machine.memory_gb:
            return problem("offload", f"{asked}: {text}; lower it")
        if needed / GB + _SPARE_GB > machine.memory_gb:
            return warning("offload", f"{asked}: {text}: that is tight")
        return ok("offload", text)
    return ok("offload", ", ".join(sorted(names)))


def _bytes(name: str, extra: Mapping[str, Any], gpus: int) -> int:
    """Bytes of main memory that a connector takes, for all GPUs; `ValueError` says what it would not start with."""
    if name not in _NATIVE:
        return 0
    per_rank = name == "SimpleCPUOffloadConnector" and "cpu_bytes_to_use_per_rank" in extra
    key = "cpu_bytes_to_use_per_rank" if per_rank else "cpu_bytes_to_use"
    given = extra.get(key)
    if given is None:
        if name == "SimpleCPUOffloadConnector":
            return _SIMPLE_BYTES
        if "spec_name" in extra:
            # Another way to keep blocks, which has settings of its own.
            return 0
        raise ValueError(f"{name} needs kv_connector_extra_config.{key}, in bytes")
    if isinstance(given, bool) or not re.fullmatch(r"[1-9]\d*", str(given), re.ASCII):
        raise ValueError(f"kv_connector_extra_config.{key} is no whole number of bytes")
    return int(given) * (max(1, gpus) if per_rank else 1)


def _connectors(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The connectors that a `kv_transfer_config` names and their own settings, those inside a MultiConnector too."""
    if not isinstance(config, dict):
        return
    name, extra = config.get("kv_connector"), config.get("kv_connector_extra_config")
    own = extra if isinstance(extra, dict) else {}
    if isinstance(name, str):
        yield name, own
    inner = own.get("connectors")
    for one in inner if isinstance(inner, list) else ():
        yield from _connectors(one)
