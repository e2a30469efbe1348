"""A process with a busy engine is killed: nothing may be left to hold memory or a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from common.registry import ModelVersion
from tests.support.processes import Processes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280)]


def test_worker_killed_leaves_no_process(
    processes: Processes, tmp_path: Path, demo_entry: ModelVersion, demo_name: str
) -> None:
    entry = {"source": demo_entry.source, "engine": demo_entry.engine, "hardware": {"gpus": 0, "cpu_kv_gb": 0.25}}
    (tmp_path / "models.yaml").write_text(json.dumps({"default": demo_name, "models": {demo_name: entry}}))
    env = {"BATCHMILL_MODELS": str(tmp_path / "models.yaml")}
    if folder := os.environ.get("BATCHMILL_INFERENCE_MODELS_DIR"):
        env["BATCHMILL_INFERENCE_MODELS_DIR"] = folder
    victim = processes.python("victim", "-m", "tests.engine.victim", env=env)
    victim.wait_line("^busy$", 250)
    # By their parents, lest a title that is written over the environment hides them from `processes.survivors`.
    family = victim.children()
    assert len([p for p in family if p.name().startswith("VLLM")]) >= 2
    victim.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
