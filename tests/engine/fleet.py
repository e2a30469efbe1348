"""A fleet with a real engine: its environment, its commands, its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from common.registry import ModelVersion
from tests.conftest import make_fleet_env
from tests.support.brokers import RedisBroker
from tests.support.processes import ROOT, Process


def real_env(folder: Path, broker: RedisBroker, name: str, model: ModelVersion, **fields: Any) -> dict[str, str]:
    """Environment of a fleet that serves the demo model, few requests at a time so that a batch lasts.

    `fields`: more of its entry in models.yaml.
    """
    env = make_fleet_env(folder, broker.url, broker.state_url)
    entry = {"source": model.source, "engine": model.engine | {"max_num_seqs": 4}}
    models = {name: entry | {"hardware": {"gpus": 0, "cpu_kv_gb": 0.25}} | fields}
    Path(env["BATCHMILL_MODELS"]).write_text(json.dumps({"default": name, "models": models}))
    env["BATCHMILL_INFERENCE_ENGINE"] = "vllm"
    if pulled := os.environ.get("BATCHMILL_INFERENCE_MODELS_DIR"):
        env["BATCHMILL_INFERENCE_MODELS_DIR"] = pulled
    else:
        # Models are pulled into the home of whoever runs the tests.
        del env["BATCHMILL_HOME"]
    return env


def producers(env: dict[str, str], *argv: str, status: int = 0) -> Any:
    """A command that prints JSON."""
    base = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "producers", *argv, "--json"],
        env=base | env,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == status, done.stderr.decode()
    return json.loads(done.stdout)


def engine_process(worker: Process) -> psutil.Process:
    """The engine's core below a worker."""
    return next(p for p in worker.children() if p.name().startswith("VLLM::EngineCor"))
