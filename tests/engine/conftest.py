"""Real engines, each started once for all tests that use it (a start takes 20-30 s on two cores)."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from common import registry as registries
from common import settings as settings_module
from common.errors import BatchmillError
from common.registry import Hardware, ModelVersion, Registry
from common.settings import Settings
from tests.engine import tiny_models
from tests.support.brokers import missing
from tests.support.processes import ROOT
from workers.engine import cpu_threads
from workers.engine.base import Answer
from workers.engine.vllm import VllmEngine
from workers.engine_thread import EngineThread
from workers.models.pull import pull
from workers.models.source import model_folder

#: Small, so that engines start fast and several tests can fill them. In float32, greedy answers do not depend on what
#: shares a step with them; in bfloat16 about half of them do after 48 tokens.
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "enforce_eager": True,
}


class Running:
    """A started engine in its thread, as a worker has it."""

    def __init__(self, model: str, entry: ModelVersion, settings: Settings) -> None:
        self.model = model
        self.deaths: list[str] = []
        self.killed = False
        self.engine = VllmEngine(model, entry, settings)
        self.thread = EngineThread(lambda: self.engine, self.deaths.append)
        self.thread.start()

    def infer(self, url: str, body: bytes, timeout: float = 120) -> Answer:
        """One answer."""
        return self.thread.submit(self.engine.infer(url, body)).result(timeout)

    def infer_all(self, requests: Iterable[tuple[str, bytes]], timeout: float = 240) -> list[Answer]:
        """All answers, asked at once."""

        async def ask() -> list[Answer]:
            return list(await asyncio.gather(*(self.engine.infer(url, body) for url, body in requests)))

        return self.thread.submit(ask()).result(timeout)

    def kill(self, sig: int) -> float:
        """Send a signal to the engine's own process; the monotonic time of it. The engine's last test ends so."""
        self.killed = True
        os.kill(self.engine._processes[0].pid, sig)
        return time.monotonic()

    def stop(self) -> None:
        """End it; it must not have died before, unless a test killed it."""
        assert self.thread.stop(30)
        assert self.killed or self.deaths == []


def running(model: str, entry: ModelVersion, settings: Settings) -> Iterator[Running]:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    engine = Running(model, entry, settings)
    yield engine
    engine.stop()
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    # multiprocessing's own helper serves all engines of this process and ends with it.
    assert [p.cmdline() for p in left if "resource_tracker" not in " ".join(p.cmdline())] == []


@pytest.fixture(scope="session")
def settings() -> Settings:
    """Settings without a file: only where models lie."""
    if importlib.util.find_spec("vllm") is None:
        missing("vLLM", "pip install 'batchmill[cpu]' or 'batchmill[gpu]'")
    return settings_module.load(ROOT / "config" / "fleet.yaml")


@pytest.fixture(scope="session")
def demo_registry(settings: Settings) -> Registry:
    """The demo model as this project ships it, on this machine."""
    registry = registries.load(ROOT / "config" / "models.yaml")
    name = registry.resolve(None)
    try:
        pull(name, registry.get(name), settings, logging.getLogger("pull").info)
    except BatchmillError as exc:
        missing(f"the demo model ({exc})", f"workers models pull {name}")
    return registry


@pytest.fixture(scope="session")
def demo_name(demo_registry: Registry) -> str:
    return demo_registry.resolve(None)


@pytest.fixture(scope="session")
def demo_entry(demo_registry: Registry, demo_name: str) -> ModelVersion:
    """The demo model with a small engine."""
    source = demo_registry.get(demo_name).source
    return ModelVersion(source=source, engine=dict(ENGINE), hardware=Hardware(gpus=0, cpu_kv_gb=0.25))


@pytest.fixture(scope="module")
def demo(demo_name: str, demo_entry: ModelVersion, settings: Settings) -> Iterator[Running]:
    """The demo model's engine."""
    yield from running(demo_name, demo_entry, settings)


#: Asked of vLLM directly, and of whatever is tested.
PROMPTS = (
    "What is the capital of France?",
    "Write a line about the sea.",
    "List three colours.",
    "2 + 2 = ?",
    *(f"Tell me one fact about the number {n}." for n in range(20)),
)
ANSWER_TOKENS = 48


@pytest.fixture(scope="session")
def direct_answers(
    demo_name: str, demo_entry: ModelVersion, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The greedy answers of vLLM alone, in a process of its own: prompt → text of at most `ANSWER_TOKENS` tokens."""
    wanted = {
        "model": str(model_folder(demo_name, demo_entry, settings)),
        "engine": ENGINE | {"kv_cache_memory_bytes": 1 << 28},
        "chats": [[{"role": "user", "content": prompt}] for prompt in PROMPTS],
        "max_tokens": ANSWER_TOKENS,
    }
    # Left to itself it leaves its sockets in /tmp.
    env = dict(os.environ) | {"VLLM_RPC_BASE_PATH": str(tmp_path_factory.mktemp("ipc"))}
    # Another number of threads adds up in another order, which a near tie between two tokens can show.
    cpu_threads.use_all_cores(env, cpu_threads.allowed_cores())
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.direct"],
        input=json.dumps(wanted),
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=240,
        check=True,
    )
    answers: list[str] = json.loads(done.stdout)
    return dict(zip(PROMPTS, answers, strict=True))


@pytest.fixture(scope="session")
def tiny_settings(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A models folder of its own: tiny models are made anew in every run."""
    return settings_module.load(
        ROOT / "config" / "fleet.yaml",
        env={"BATCHMILL_INFERENCE_MODELS_DIR": str(tmp_path_factory.mktemp("models"))},
    )


def tiny(folder: Path) -> ModelVersion:
    engine: dict[str, Any] = {"max_num_seqs": 4, "enforce_eager": True, "runner": "pooling"}
    return ModelVersion(source=str(folder), engine=engine, hardware=Hardware(gpus=0, cpu_kv_gb=0.05))


@pytest.fixture(scope="module")
def embedder(tiny_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny embedding model's engine."""
    folder = tiny_models.embedding_model(tmp_path_factory.mktemp("tiny") / "embedding")
    yield from running("tiny-embed@1", tiny(folder), tiny_settings)


@pytest.fixture(scope="module")
def ranker(tiny_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny cross-encoder's engine."""
    folder = tiny_models.ranking_model(tmp_path_factory.mktemp("tiny") / "ranking")
    yield from running("tiny-rank@1", tiny(folder), tiny_settings)
