"""On a machine with few cores, all of them compute.

vLLM keeps a core free for the process of its scheduler, which spins while the arithmetic runs: half of a machine with
two cores. A scheduler that must share its core costs less than that core is worth (docs/benchmarks.md), provided that
the threads which compute sleep while they wait for each other: with OpenMP's default they spin, and two that spin for
one that something else has put off stand still together.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

#: With more cores than this, the core that is kept free is a small part of the machine.
FEW_CORES = 4

_ALL_CORES = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "OMP_WAIT_POLICY": "passive"}
#: Who has set one of these has decided how the threads are placed.
_DECIDED = (*_ALL_CORES, "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def use_all_cores(env: MutableMapping[str, str], cores: int) -> bool:
    """Set what the engine's processes read of `env` when they start; False when it is left as it is.

    `cores`: those that this process may run on. For a CPU engine alone; call it before the engine's processes start.
    """
    preloaded = env.get("LD_PRELOAD", "")
    if cores > FEW_CORES or any(env.get(name) for name in _DECIDED) or "iomp" in preloaded or "libomp" in preloaded:
        return False
    env.update(_ALL_CORES)
    return True


def allowed_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0))
