"""What this machine has: memory, shared memory, CPU flags, GPUs. Reads, decides nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GB = 1e9


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver sees it; memory in GB."""

    index: str
    name: str
    total_gb: float
    free_gb: float
    driver: str


@dataclass(frozen=True)
class Machine:
    """The machine at this moment; memory in GB."""

    memory_gb: float
    shm_gb: float
    cpu_flags: frozenset[str]
    architecture: str
    #: Those that a worker may use; None: no driver here (nvidia-smi is missing or fails).
    gpus: tuple[Gpu, ...] | None
    #: Why `gpus` is None, when nvidia-smi is there and fails.
    gpu_error: str = ""


def look(env: Mapping[str, str] = os.environ) -> Machine:
    """Look once."""
    gpus, error = _gpus(env)
    try:
        shm = shutil.disk_usage("/dev/shm").free / GB
    except OSError:
        shm = 0.0
    return Machine(available_memory() / GB, shm, _cpu_flags(), os.uname().machine, gpus, error)


def available_memory(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be used, of the machine or of the container that we are in, whichever is less."""
    free = 0
    for line in proc.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free = int(value.split()[0]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        # The page cache counts as used there and is given back when it is needed.
        cache = next(
            int(line.split()[1])
            for line in (cgroup / "memory.stat").read_text().splitlines()
            if line.startswith("inactive_file ")
        )
    except (OSError, ValueError, StopIteration):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used + cache))


def parse_gpus(text: str, visible: str | None) -> tuple[Gpu, ...]:
    """GPUs out of nvidia-smi's CSV; `visible` is CUDA_VISIBLE_DEVICES, None where it is not set."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 6:
            continue
        index, uuid, name, total, free, driver = parts
        try:
            gpu = Gpu(index, name, float(total) * 1.048576e-3, float(free) * 1.048576e-3, driver)
        except ValueError:
            continue
        if visible is None or index in visible.split(",") or any(uuid.startswith(v) for v in visible.split(",") if v):
            found.append(gpu)
    return tuple(found)


def _gpus(env: Mapping[str, str]) -> tuple[tuple[Gpu, ...] | None, str]:
    binary = shutil.which("nvidia-smi", path=env.get("PATH"))
    if binary is None:
        return None, ""
    query = "--query-gpu=index,uuid,name,memory.total,memory.free,driver_version"
    try:
        done = subprocess.run(
            [binary, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError) as exc:
        return None, type(exc).__name__
    if done.returncode != 0:
        return None, " ".join((done.stdout + done.stderr).split())[:200]
    return parse_gpus(done.stdout, env.get("CUDA_VISIBLE_DEVICES")), ""


def _cpu_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()
