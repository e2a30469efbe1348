"""An engine without a model: deterministic answers at a settable pace. For tests and for measuring all around it.

Knobs by environment: `BATCHMILL_ECHO_LATENCY_MS` and `BATCHMILL_ECHO_TOKENS_PER_S` (of one request; 0: no wait),
`BATCHMILL_ECHO_MAX_NUM_SEQS`, `BATCHMILL_ECHO_START_S` (how long it loads), `BATCHMILL_ECHO_FAULTS` and
`BATCHMILL_ECHO_FAULTS_DIR` (see `echo_faults`), `BATCHMILL_ECHO_JOURNAL` (a file, see `echo_journal`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence

import msgspec

from common.engine_arguments import argument, context
from common.errors import UsageError
from common.registry import ModelVersion
from common.settings import Settings
from workers.engine import echo_bodies
from workers.engine.base import Answer, EngineDead, EngineFacts, EngineStats
from workers.engine.echo_faults import Fault, Faults
from workers.engine.echo_journal import Journal

_PREFIX = "BATCHMILL_ECHO_"


class EchoEngine:
    """Runs up to `max_num_seqs` requests at once, each for `latency + tokens / rate` seconds."""

    def __init__(
        self, model: str, entry: ModelVersion, settings: Settings, env: Mapping[str, str] = os.environ
    ) -> None:
        configured = settings.inference.batch_size or argument(entry.engine, "max_num_seqs") or 256
        max_model_len = context(entry.engine, settings.inference.max_seq_len) or 0
        max_num_seqs = int(_number(env, "MAX_NUM_SEQS", float(configured)))
        self._facts = EngineFacts(
            engine="echo", model=model, device="cpu", max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        self._latency_s = _number(env, "LATENCY_MS", 0) / 1000
        self._tokens_per_s = _number(env, "TOKENS_PER_S", 0)
        self._start_s = _number(env, "START_S", 0)
        self._faults = Faults(env.get(f"{_PREFIX}FAULTS", ""), env.get(f"{_PREFIX}FAULTS_DIR"))
        journal = env.get(f"{_PREFIX}JOURNAL")
        self._journal = Journal(journal) if journal else None
        self._bodies = echo_bodies.Bodies(model, max_model_len)
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._died = asyncio.Event()
        self._inside = 0
        self._running = 0

    @property
    def instant(self) -> bool:
        """True when no knob makes a request wait or fail, and nobody keeps count of single ones."""
        return not (self._latency_s or self._tokens_per_s or self._faults or self._journal)

    async def start(self) -> None:
        """Ready after `BATCHMILL_ECHO_START_S`."""
        await asyncio.sleep(self._start_s)

    async def infer(self, url: str, body: bytes) -> Answer:
        """Answer one request; `EngineDead` after the fault `die`."""
        self._inside += 1
        try:
            async with self._slots:
                self._running += 1
                if self._journal is not None:
                    self._journal.taken(body)
                try:
                    answer = await self._infer(url, body)
                finally:
                    self._running -= 1
                if self._journal is not None:
                    self._journal.answered(body)
                return answer
        finally:
            self._inside -= 1

    async def _infer(self, url: str, body: bytes) -> Answer:
        await self.check()
        fault = self._faults.find(body)
        if fault is not None:
            answer = await self._suffer(fault)
            if answer is not None:
                return answer
        answer = self._bodies.answer(url, body)
        seconds = self._latency_s
        if self._tokens_per_s:
            seconds += _completion_tokens(answer.body) / self._tokens_per_s
        if seconds:
            await self._wait(seconds)
        return answer

    async def _suffer(self, fault: Fault) -> Answer | None:
        """The answer of a fault, or None when the request goes on after it."""
        match fault.action:
            case "slow":
                await self._wait(fault.seconds)
                return None
            case "until":
                while not os.path.exists(fault.file):
                    await self._wait(0.05)
                return None
            case "hang":
                await self._wait(None)
            case "die":
                self._died.set()
                await self.check()
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "abort":
                return echo_bodies.aborted(self._facts.model)
            case "garbage":
                return Answer(200, b"not json")
            case "raise":
                raise RuntimeError("a fault of the script")
            case "memoryerror":
                raise MemoryError
            case "systemexit":
                raise SystemExit(1)
        return echo_bodies.error(fault.status, "a fault of the script", "InternalServerError")

    async def _wait(self, seconds: float | None) -> None:
        try:
            await asyncio.wait_for(self._died.wait(), seconds)
        except TimeoutError:
            return
        await self.check()

    async def check(self) -> None:
        """`EngineDead` after the fault `die`."""
        if self._died.is_set():
            raise EngineDead("the fault script ended the engine")

    def facts(self) -> EngineFacts:
        """See `Engine`."""
        return self._facts

    def stats(self) -> EngineStats:
        """See `Engine`."""
        return EngineStats(running=self._running, waiting=self._inside - self._running)

    async def stop(self) -> None:
        """Nothing to end."""


class BulkEchoEngine(EchoEngine):
    """The echo engine without waits or faults: a whole chunk in one call."""

    async def infer_bulk(self, requests: Sequence[tuple[str, bytes]]) -> list[Answer]:
        """Answers in the order of the requests."""
        answer = self._bodies.answer
        return [answer(url, body) for url, body in requests]


def make(model: str, entry: ModelVersion, settings: Settings, env: Mapping[str, str] = os.environ) -> EchoEngine:
    """The bulk engine where nothing has to wait, else the one that takes requests singly."""
    engine = EchoEngine(model, entry, settings, env)
    return BulkEchoEngine(model, entry, settings, env) if engine.instant else engine


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_Answer).decode


def _completion_tokens(body: bytes) -> int:
    usage = _answer(body).usage
    return usage.completion_tokens or usage.output_tokens if usage is not None else 0


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(f"{_PREFIX}{name}")
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{_PREFIX}{name}: '{text}' is not a number") from None
