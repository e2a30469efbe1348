"""A fleet with a real engine that is up: a coordinator and one worker on a private Redis, for benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import plain_yaml, registry
from common.live import LiveState
from common.registry import ModelVersion
from common.settings import load
from tests.conftest import make_fleet_env
from tests.support.ports import wait_until
from tests.support.processes import ROOT, Process, Processes

MODEL = "smollm2-135m@1"


def demo_entry() -> ModelVersion:
    """The demo model as this project ships it."""
    return registry.load(ROOT / "config" / "models.yaml", env={}).get(MODEL)


class Fleet:
    """Up until its `processes` are closed. Everything about it is the default but what the constructor is told."""

    def __init__(
        self,
        folder: Path,
        redis_url: str,
        *,
        cache_url: str | None = None,
        engine: dict[str, Any] | None = None,
        settings: dict[str, str] | None = None,
        worker: str = "workers",
    ) -> None:
        """`engine`: arguments beside the model's entry; `settings`: environment of every role; `worker`: its module."""
        self.folder = folder
        self.env = make_fleet_env(folder, redis_url, redis_url) | {"BATCHMILL_INFERENCE_ENGINE": "vllm"}
        whole = plain_yaml.parse((ROOT / "config" / "models.yaml").read_text("utf-8"))
        whole["models"][MODEL]["engine"] |= engine or {}
        (folder / "models.yaml").write_text(plain_yaml.dump(whole))
        self.env["BATCHMILL_MODELS"] = str(folder / "models.yaml")
        models = os.environ.get("BATCHMILL_INFERENCE_MODELS_DIR")
        # The fleet's home is empty; pulled models lie in the user's.
        self.env["BATCHMILL_INFERENCE_MODELS_DIR"] = models or str(Path("~/.local/share/batchmill/models").expanduser())
        if cache_url is not None:
            self.env["BATCHMILL_CACHE_URL"] = cache_url
        self.env |= settings or {}
        (folder / "processes").mkdir()
        self.processes = Processes(folder / "processes")
        started = time.monotonic()
        self.coordinator: Process = self.processes.coordinator(self.env)
        argv = ["-m", worker, "start", "--model", MODEL]
        if worker != "workers":
            # A supervisor would start the ordinary one.
            argv.append("--no-supervisor")
        self.worker: Process = self.processes.python("worker", *argv, env=self.env)
        live = LiveState(load(env=self.env))
        wait_until(lambda: any(w.state == "ready" for w in live.workers()), 300, "the engine is up", every=0.1)
        #: Seconds until the engine was up.
        self.start_s = time.monotonic() - started

    @property
    def model_folder(self) -> Path:
        """Where the model's files are."""
        name, _, version = MODEL.partition("@")
        return Path(self.env["BATCHMILL_INFERENCE_MODELS_DIR"]) / name / version

    def submit(self, source: Path, *options: str) -> tuple[float, Path]:
        """Seconds of `producers submit`, from start to exit, and the folder of its outputs."""
        out = self.folder / f"out-{time.monotonic_ns()}"
        argv = [sys.executable, "-m", "producers", "submit", str(source), "--model", MODEL, "--output", str(out)]
        base = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")}
        started = time.monotonic()
        run = subprocess.run(
            [*argv, *options],
            env=base | {"PYTHONPATH": str(ROOT)} | self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        took = time.monotonic() - started
        if run.returncode != 0:
            raise SystemExit(f"submit ended with {run.returncode}:\n{run.stderr[-3000:]}\n{self.worker.text[-3000:]}")
        return took, out
