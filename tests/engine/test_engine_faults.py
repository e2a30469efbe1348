"""Parts of a busy engine are killed: what its worker sees, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.registry import ModelVersion
from tests.engine.bodies import GENERATE
from tests.support.processes import Process, Processes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(200)]


def event(process: Process, name: str, timeout: float, after: int = 0) -> Any:
    return json.loads(process.wait_line(rf'^{{"event": "{name}"', timeout, after).string)


@pytest.fixture
def victim(processes: Processes, tmp_path: Path, demo_entry: ModelVersion, demo_name: str) -> Process:
    """A process whose engine works on one long request of each endpoint."""
    models = {"default": demo_name, "models": {demo_name: {"source": demo_entry.source, "engine": demo_entry.engine}}}
    models["models"][demo_name]["hardware"] = {"gpus": 0, "cpu_kv_gb": 0.25}  # type: ignore[index]
    (tmp_path / "models.yaml").write_text(json.dumps(models))
    env = {"BATCHMILL_MODELS": str(tmp_path / "models.yaml")}
    if folder := os.environ.get("BATCHMILL_INFERENCE_MODELS_DIR"):
        env["BATCHMILL_INFERENCE_MODELS_DIR"] = folder
    return processes.python("victim", "-m", "tests.engine.victim", env=env)


def family(process: Process) -> list[psutil.Process]:
    """The process and its engine's. vLLM writes its titles over their environment, so `survivors` does not see them."""
    found = [psutil.Process(process.pid), *process.children()]
    assert len([p for p in found if p.name().startswith("VLLM")]) >= 2
    return found


def check_gone(members: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(members, timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def check_dead(process: Process, members: list[psutil.Process], killed_at: float, within: float) -> None:
    """Every request and the health check say that the engine is dead; the process ends as a worker does."""
    dead = event(process, "dead", within + 10)
    assert dead["at"] - killed_at < within
    outcomes = [json.loads(line) for line in process.lines if line.startswith('{"event": "outcome"')]
    assert {o["url"]: o["kind"] for o in outcomes} == dict.fromkeys(GENERATE, "dead")
    assert all(o["at"] - killed_at < within for o in outcomes)
    assert process.wait(30) == 70
    check_gone(members)


def test_engine_process_killed(victim: Process) -> None:
    busy, members = event(victim, "busy", 150), family(victim)
    killed_at = time.monotonic()
    os.kill(busy["engine"], signal.SIGKILL)
    check_dead(victim, members, killed_at, 5)


def test_engine_process_told_to_end_gives_no_cut_answers(victim: Process) -> None:
    """vLLM answers 200 with what it has; /v1/responses even says `completed`. None of it may come out as an answer."""
    busy, members = event(victim, "busy", 150), family(victim)
    killed_at = time.monotonic()
    os.kill(busy["engine"], signal.SIGTERM)
    check_dead(victim, members, killed_at, 15)


def test_worker_killed_leaves_no_process(victim: Process) -> None:
    busy, members = event(victim, "busy", 150), family(victim)
    os.kill(busy["pid"], signal.SIGKILL)
    check_gone(members)
