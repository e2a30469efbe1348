"""The peers as processes: each takes files one after the other and says how long it took with and without start-up."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
from celery import Celery

from benchmarks.peers import naive_celery
from tests.support.processes import ROOT, Process, Processes

#: Seconds that anything here may take.
PATIENCE_S = 900.0
_OURS = ("max_num_seqs", "max_num_batched_tokens")


class Took(NamedTuple):
    """Seconds from reading the file to the closed output, and with what had to start for it."""

    run_s: float
    whole_s: float


class Peer(Protocol):
    """Answers files; whatever it has running is up until `close`."""

    name: str
    #: Its engine stays up from one file to the next.
    keeps: bool

    def answer(self, source: Path, target: Path) -> Took:
        """Answer one file; raises when it cannot."""
        ...

    def close(self) -> None:
        """End what runs."""
        ...


class Place(NamedTuple):
    """Where peers run: processes that end with the benchmark, the model, and the engine's arguments by vLLM's names."""

    processes: Processes
    folder: Path
    model: Path
    served_name: str
    engine: dict[str, Any]
    redis_url: str
    ray_python: str | None
    #: Requests of a naive client's chunk.
    chunk: int

    @property
    def keywords(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        return {"model": str(self.model), **self.engine}


def environment() -> dict[str, str]:
    """For every process that holds an engine of a peer."""
    return {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}


@contextlib.contextmanager
def _ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Kill the process afterwards, and what it started: an engine's processes outlive a parent that is killed."""
    below: list[psutil.Process] = []
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for one in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(30)


class RunBatch:
    """vLLM's batch command: one process a file."""

    keeps = False

    def __init__(self, place: Place, *, ours: bool) -> None:
        self.name = "run_batch, our numbers" if ours else "run_batch as shipped"
        self._place = place
        self._engine = {k: v for k, v in place.engine.items() if ours or k not in _OURS}

    def answer(self, source: Path, target: Path) -> Took:
        """See `Peer`; timed from its line on reading the file to its line on writing the output."""
        flags = []
        for name, value in self._engine.items():
            flag = "--" + name.replace("_", "-")
            flags += [flag] if value is True else [flag, str(value)]
        argv = ["-m", "vllm.entrypoints.openai.run_batch", "-i", str(source), "-o", str(target)]
        argv += ["--model", str(self._place.model), "--served-model-name", self._place.served_name, *flags]
        started = time.monotonic()
        process = self._place.processes.python("run_batch", *argv, env=environment())
        with _ended(process.popen):
            process.wait_line("Reading batch from", PATIENCE_S)
            reading = time.monotonic()
            process.wait_line("Writing outputs to local file", PATIENCE_S)
            written = time.monotonic()
            if process.wait(PATIENCE_S) != 0:
                raise SystemExit(f"{self.name} failed:\n" + "\n".join(process.lines[-30:]))
        return Took(written - reading, time.monotonic() - started)

    def close(self) -> None:
        """Nothing is up."""


class LlmChat:
    """`LLM.chat` on the whole file; one engine for all files."""

    name = "LLM.chat, whole file"
    keeps = True

    def __init__(self, place: Place) -> None:
        started = time.monotonic()
        argv = [sys.executable, "-m", "benchmarks.peers.llm_chat", json.dumps(place.keywords)]
        with open(place.folder / "llm_chat.log", "ab") as log:
            self._process = subprocess.Popen(
                argv,
                env=os.environ | environment() | {"PYTHONPATH": str(ROOT)},
                cwd=place.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._log = place.folder / "llm_chat.log"
        self._expect("UP")
        self._start_s = time.monotonic() - started

    def _expect(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise SystemExit(f"{self.name} ended:\n{self._log.read_text('utf-8', 'replace')[-3000:]}")

    def answer(self, source: Path, target: Path) -> Took:
        """See `Peer`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{source}\t{target}\n")
        self._process.stdin.flush()
        took = float(self._expect("DONE"))
        return Took(took, took + self._start_s)

    def close(self) -> None:
        """End the engine."""
        with _ended(self._process):
            pass


class NaiveCelery:
    """A Celery worker with an engine, chunk after chunk."""

    name = "naive Celery"
    keeps = True

    def __init__(self, place: Place) -> None:
        started = time.monotonic()
        env = environment() | {"PEER_REDIS_URL": place.redis_url, "PEER_ENGINE": json.dumps(place.keywords)}
        argv = ["-m", "celery", "-A", "benchmarks.peers.naive_celery", "worker", "-P", "solo", "-l", "info"]
        self._process: Process = place.processes.python("naive-celery", *argv, env=env)
        self._process.wait_line(r"celery@\S+ ready", PATIENCE_S)
        self._start_s = time.monotonic() - started
        self._chunk = place.chunk
        self._celery = Celery("sender", broker=place.redis_url, backend=place.redis_url)

    def answer(self, source: Path, target: Path) -> Took:
        """See `Peer`."""
        started = time.monotonic()
        naive_celery.answer_file(self._celery, source, target, self._chunk, PATIENCE_S)
        took = time.monotonic() - started
        return Took(took, took + self._start_s)

    def close(self) -> None:
        """End the worker; with an engine in it, it does not end when it is told to."""
        self._celery.close()
        with _ended(self._process.popen):
            pass


class RayData:
    """Ray Data LLM: a cluster and an engine a file."""

    name = "Ray Data LLM"
    keeps = False

    def __init__(self, place: Place) -> None:
        if place.ray_python is None:
            raise SystemExit("Ray Data LLM needs an interpreter that has ray[data] and vLLM: --ray-python")
        self._place = place

    def answer(self, source: Path, target: Path) -> Took:
        """See `Peer`; its run counts from the engine's line that it is initialised, which favours it."""
        place = self._place
        script = str(Path(__file__).with_name("ray_data.py"))
        argv = [str(place.ray_python), script, json.dumps(place.engine), str(source), str(target), str(place.model)]
        started = time.monotonic()
        env = environment() | {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        process = place.processes.start("ray", argv, env=env)
        with _ended(process.popen):
            process.wait_line(r"init engine \(.*\) took", PATIENCE_S)
            up = time.monotonic()
            process.wait_line("^WRITTEN", PATIENCE_S)
            written = time.monotonic()
            process.wait(PATIENCE_S)
        return Took(written - up, written - started)

    def close(self) -> None:
        """Nothing is up."""


_BY_WORD: dict[str, Any] = {
    "shipped": lambda place: RunBatch(place, ours=False),
    "ours": lambda place: RunBatch(place, ours=True),
    "chat": LlmChat,
    "celery": NaiveCelery,
    "ray": RayData,
}
#: Words that name the peers on the command line.
WORDS = tuple(_BY_WORD)


def make(word: str, place: Place) -> Peer:
    """The peer that a word of `WORDS` names, up."""
    found: Peer = _BY_WORD[word](place)
    return found
