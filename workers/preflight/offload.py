"""KV offload: may this model's engine keep KV cache blocks in host memory here?

`kv_offloading_size` (GiB, of all GPUs of the engine together) with `kv_offloading_backend: native` or `lmcache`, or a
`kv_transfer_config` that names a connector. vLLM 0.32 finds out what it cannot do only after the weights are loaded, in
a traceback of one of its processes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from common.registry import ModelVersion
from workers.preflight.finding import Finding, ok, problem, warning
from workers.preflight.machine import Machine

#: Connectors that keep blocks in this machine's memory; vLLM has them for CUDA, ROCm and XPU devices.
_NATIVE = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector"})
_LMCACHE = frozenset({"LMCacheConnectorV1", "LMCacheMPConnector"})
#: GB that stay free beside what is offloaded.
_SPARE_GB = 2.0


def check_offload(
    entry: ModelVersion,
    build: tuple[str, str] | None,
    machine: Machine,
    installed: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
) -> Finding:
    """One line on what the entry asks for. `installed`: whether a package can be imported."""
    engine = {key.replace("-", "_"): value for key, value in entry.engine.items()}
    size = engine.get("kv_offloading_size")
    names = set(_connectors(engine.get("kv_transfer_config")))
    if size is not None:
        names.add("LMCacheMPConnector" if engine.get("kv_offloading_backend") == "lmcache" else "OffloadingConnector")
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
    if names & _NATIVE and isinstance(size, (int, float)):
        needed = size * 1.074
        text = f"{needed:.1f} GB of main memory for KV cache, {machine.memory_gb:.1f} GB available"
        if needed > machine.memory_gb:
            return problem("offload", f"{asked}: {text}; lower it")
        if needed + _SPARE_GB > machine.memory_gb:
            return warning("offload", f"{asked}: {text}: that is tight")
        return ok("offload", text)
    return ok("offload", ", ".join(sorted(names)))


def _connectors(config: Any) -> Iterator[str]:
    """The connectors that a `kv_transfer_config` names, those inside a MultiConnector too."""
    if not isinstance(config, dict):
        return
    name = config.get("kv_connector")
    if isinstance(name, str):
        yield name
    more = config.get("kv_connector_extra_config")
    inner = more.get("connectors") if isinstance(more, dict) else None
    for one in inner if isinstance(inner, list) else ():
        yield from _connectors(one)
