"""The checks before an engine starts, each on machines that are made up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from common import settings as settings_module
from common.errors import UsageError
from common.registry import Hardware, ModelVersion
from workers.preflight import checks
from workers.preflight.machine import Gpu, Machine, available_memory, look, parse_gpus
from workers.preflight.offload import check_offload

CPU_BUILD, GPU_BUILD = ("cpu", "0.32.0"), ("gpu", "0.32.0")
AVX512 = frozenset({"avx2", "avx512f"})
SETTINGS = settings_module.load(env={"BATCHMILL_INFERENCE_GPU_MEMORY_UTILIZATION": "0.8"})
CPU_MACHINE = Machine(16.0, 8.0, AVX512, "x86_64", None)


def entry(gpus: int = 0, memory: float = 0.0, kv: float = 1.0) -> ModelVersion:
    return ModelVersion(source="/m", hardware=Hardware(gpus=gpus, gpu_memory_gb=memory, cpu_kv_gb=kv))


def gpu_machine(*free: float, flags: frozenset[str] = AVX512) -> Machine:
    gpus = tuple(Gpu(str(i), "NVIDIA H200", 143.8, gb, "570.1") for i, gb in enumerate(free))
    return Machine(64.0, 16.0, flags, "x86_64", gpus)


@pytest.mark.parametrize(
    ("build", "machine", "level", "words"),
    [
        (None, CPU_MACHINE, "problem", "batchmill[cpu]"),
        (None, gpu_machine(140), "problem", "batchmill[gpu]"),
        (GPU_BUILD, CPU_MACHINE, "problem", "no GPU can be used here"),
        (GPU_BUILD, gpu_machine(), "problem", "no GPU can be used here"),
        (CPU_BUILD, gpu_machine(140), "warning", "batchmill[gpu]"),
        (CPU_BUILD, CPU_MACHINE, "ok", "for CPUs"),
        (GPU_BUILD, gpu_machine(140), "ok", "for GPUs"),
    ],
)
def test_build(build: tuple[str, str] | None, machine: Machine, level: str, words: str) -> None:
    found = checks.check_build(build, machine)
    assert (found.level, words in found.text) == (level, True)


NATIVE = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def with_bytes(number: int | str) -> dict[str, Any]:
    return NATIVE | {"kv_connector_extra_config": {"cpu_bytes_to_use": number}}


NESTED = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [NATIVE]}}


@pytest.mark.parametrize(
    ("engine", "build", "level", "words"),
    [
        ({}, CPU_BUILD, "ok", "none"),
        ({"kv_offloading_size": 4}, CPU_BUILD, "problem", "cpu_kv_gb"),
        ({"kv-offloading-size": 4}, CPU_BUILD, "problem", "cpu_kv_gb"),
        ({"kv_transfer_config": NATIVE}, CPU_BUILD, "problem", "engine.kv_transfer_config"),
        ({"kv_transfer_config": NESTED}, CPU_BUILD, "problem", "cpu_kv_gb"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector"}}, CPU_BUILD, "ok", "ExampleConnector"),
        ({"kv_offloading_size": 4}, GPU_BUILD, "ok", "4.3 GB"),
        ({"kv_offloading_size": 58}, GPU_BUILD, "warning", "tight"),
        ({"kv_offloading_size": 60}, GPU_BUILD, "problem", "lower it"),
        ({"kv_offloading_size": 4, "kv_offloading_backend": "lmcache"}, GPU_BUILD, "problem", "pip install lmcache"),
        ({"kv_transfer_config": NESTED}, GPU_BUILD, "problem", "needs kv_connector_extra_config.cpu_bytes_to_use"),
        ({"kv_transfer_config": with_bytes(1 << 36)}, GPU_BUILD, "problem", "68.7 GB of main memory"),
        ({"kv_transfer_config": json.dumps(with_bytes(str(1 << 36)))}, GPU_BUILD, "problem", "68.7 GB of main memory"),
        ({"kv-transfer-config": json.dumps(with_bytes(80)).replace("80", "64G")}, GPU_BUILD, "problem", "68.7 GB"),
        ({"kv_transfer_config": with_bytes(1 << 32)}, GPU_BUILD, "ok", "4.3 GB"),
        ({"kv_transfer_config": with_bytes("80m")}, GPU_BUILD, "problem", "no whole number of bytes"),
        ({"kv_transfer_config": NATIVE | {"kv_connector_extra_config": {"spec_name": "X"}}}, GPU_BUILD, "ok", "0.0 GB"),
        ({"kv_transfer_config": {"kv_connector": "SimpleCPUOffloadConnector"}}, GPU_BUILD, "ok", "8.6 GB"),
        ({"kv_transfer_config": json.dumps(NATIVE)}, CPU_BUILD, "problem", "cpu_kv_gb"),
        ({"kv_offloading_size": "64"}, GPU_BUILD, "problem", "lower it"),
        ({"kv_transfer_config": LMCACHE}, CPU_BUILD, "problem", "pip install lmcache"),
    ],
)
def test_offload(engine: dict[str, Any], build: tuple[str, str], level: str, words: str) -> None:
    machine = CPU_MACHINE if build is CPU_BUILD else gpu_machine(140)
    found = check_offload(ModelVersion(source="/m", engine=engine), build, machine, lambda _: False)
    assert (found.level, words in found.text, "\n" in found.text) == (level, True, False)


@pytest.mark.parametrize(("build", "level"), [(CPU_BUILD, "warning"), (GPU_BUILD, "ok")])
def test_lmcache_that_is_installed(build: tuple[str, str], level: str) -> None:
    entry = ModelVersion(source="/m", engine={"kv_transfer_config": LMCACHE})
    assert check_offload(entry, build, gpu_machine(140), lambda _: True).level == level


def test_driver_that_fails_is_quoted() -> None:
    machine = Machine(16.0, 8.0, AVX512, "x86_64", None, "Failed to initialize NVML: Driver/library version mismatch")
    assert "version mismatch" in checks.check_build(GPU_BUILD, machine).text


@pytest.mark.parametrize(
    ("model", "build", "machine", "level", "words"),
    [
        (entry(1), CPU_BUILD, CPU_MACHINE, "problem", "build for CPUs"),
        (entry(), CPU_BUILD, Machine(16, 8, frozenset(), "x86_64", None), "problem", "AVX2"),
        (entry(), CPU_BUILD, Machine(16, 8, frozenset({"avx2"}), "x86_64", None), "warning", "AVX-512"),
        (entry(), CPU_BUILD, Machine(16, 8, frozenset(), "aarch64", None), "ok", "aarch64"),
        (entry(), CPU_BUILD, CPU_MACHINE, "ok", "CPU"),
        (entry(2), GPU_BUILD, gpu_machine(140), "problem", "needs 2 GPUs, 1 can be used"),
        (entry(2, 80), GPU_BUILD, gpu_machine(140, 20), "problem", "GPU 1 (NVIDIA H200) has 20.0 of 144 GB free"),
        (entry(1, 80), GPU_BUILD, gpu_machine(20, 140), "problem", "GPU 0"),
        (entry(1, 80), GPU_BUILD, gpu_machine(140, 20), "ok", "2 GPUs"),
        (entry(0), GPU_BUILD, gpu_machine(140), "ok", "driver 570.1"),
        (entry(1), GPU_BUILD, gpu_machine(100), "warning", "gpu_memory_utilization 0.8 asks for 115"),
    ],
)
def test_devices(model: ModelVersion, build: tuple[str, str], machine: Machine, level: str, words: str) -> None:
    found = checks.check_devices(model, SETTINGS, build, machine)
    assert (found.level, words in found.text) == (level, True), found.text


@pytest.mark.parametrize(
    ("memory", "weights", "level"), [(16.0, 0.3, "ok"), (3.0, 0.3, "warning"), (1.2, 0.3, "problem")]
)
def test_memory(memory: float, weights: float, level: str) -> None:
    machine = Machine(memory, 8.0, AVX512, "x86_64", None)
    assert checks.check_memory(entry(), CPU_BUILD, machine, weights).level == level
    for text in ("40G", 40 << 30):
        big = ModelVersion(source="/m", engine={"kv-cache-memory-bytes": text}, hardware=Hardware(gpus=0))
        assert "KV cache 42.9 GB" in checks.check_memory(big, CPU_BUILD, machine, weights).text
    # With a GPU build the weights do not stay in main memory.
    assert checks.check_memory(entry(1), GPU_BUILD, machine, weights).level == "ok"


def test_shared_memory() -> None:
    small = Machine(16.0, 0.064, AVX512, "x86_64", None)
    assert checks.check_shared_memory(entry(2), small).level == "warning"
    assert checks.check_shared_memory(entry(1), small).level == "ok"


SMI = """0, GPU-aaaa, NVIDIA H200, 143771, 140000, 570.1
1, GPU-bbbb, NVIDIA H200, 143771, 17, 570.1
2, GPU-cccc, NVIDIA H200, [N/A], [N/A], 570.1
"""


@pytest.mark.parametrize(
    ("visible", "indexes"), [(None, ["0", "1"]), ("1", ["1"]), ("GPU-aa", ["0"]), ("", []), ("-1", [])]
)
def test_visible_gpus(visible: str | None, indexes: list[str]) -> None:
    found = parse_gpus(SMI, visible)
    assert [gpu.index for gpu in found] == indexes
    if visible is None:
        assert (round(found[0].free_gb), round(found[0].total_gb)) == (147, 151)


@pytest.mark.parametrize(
    ("limit", "gb"),
    [("max", 8.0), (str(4 * 1024**3), 4.294967296 - 1.0 + 0.5), (str(1024**2), 0.0)],
)
def test_memory_of_a_container(tmp_path: Path, limit: str, gb: float) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {int(8e9) // 1024} kB\n")
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("1000000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 500000000\n")
    assert available_memory(tmp_path / "meminfo", tmp_path) / 1e9 == pytest.approx(gb, abs=0.01)


def test_memory_without_a_container(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 1000 kB\n")
    assert available_memory(tmp_path / "meminfo", tmp_path) == 1_024_000


def test_this_machine_can_be_looked_at() -> None:
    machine = look()
    assert machine.memory_gb > 0
    assert machine.architecture == os.uname().machine


def test_first_problem_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "vllm_build", lambda: CPU_BUILD)
    monkeypatch.setattr(checks, "look", lambda: CPU_MACHINE)
    settings = settings_module.load(env={"BATCHMILL_INFERENCE_MODELS_DIR": str(tmp_path)})
    checks.before_start("m@1", entry(), settings)
    with pytest.raises(UsageError, match=r"hardware\.gpus: 0"):
        checks.before_start("m@1", entry(1), settings)
