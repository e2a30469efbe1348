"""Asking again within one attempt: only where it may help, and not often."""

from __future__ import annotations

import asyncio

import pytest

from common.messages import Kind
from workers import attempt as attempt_module
from workers.attempt import AGAIN, Tried, attempt
from workers.engine.base import Answer, EngineDead, EngineFacts, EngineStats

OK = Answer(200, b'{"choices":[{"finish_reason":"stop"}]}')
ABORT = Answer(200, b'{"choices":[{"finish_reason":"abort"}]}')


class Scripted:
    """An engine that gives these answers in turn; an exception is raised, None hangs."""

    def __init__(self, *script: Answer | BaseException | None, dead_after: int | None = None) -> None:
        self.script = list(script)
        self.asked = 0
        self.dead_after = dead_after
        self.aborted = 0

    async def start(self) -> None:
        """Ready."""

    async def infer(self, url: str, body: bytes) -> Answer:
        """The next of the script."""
        self.asked += 1
        found = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if found is None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.aborted += 1
                raise
        if isinstance(found, BaseException):
            raise found
        assert found is not None
        return found

    async def check(self) -> None:
        """Dead once it was asked `dead_after` times."""
        if self.dead_after is not None and self.asked >= self.dead_after:
            raise EngineDead("gone")

    def facts(self) -> EngineFacts:
        """Something."""
        return EngineFacts(engine="scripted", model="m@1", device="cpu", max_num_seqs=1)

    def stats(self) -> EngineStats:
        """Nothing."""
        return EngineStats()

    async def stop(self) -> None:
        """Nothing."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between tries are the retry library's business."""
    monkeypatch.setattr(attempt_module, "wait_random_exponential", lambda **_: lambda _state: 0.0)


def run(engine: Scripted, timeout_s: float = 5) -> Tried:
    return asyncio.run(attempt(engine, 0, b"{}", timeout_s))


def test_an_answer_is_asked_for_once() -> None:
    engine = Scripted(OK)
    assert run(engine).outcome.kind is Kind.OUTPUT
    assert engine.asked == 1


def test_a_4xx_is_never_asked_again() -> None:
    engine = Scripted(Answer(400, b"{}"), OK)
    assert run(engine).outcome.kind is Kind.ERROR
    assert engine.asked == 1


@pytest.mark.parametrize("trouble", [Answer(500, b"{}"), Answer(429, b"{}"), ABORT, RuntimeError("x"), MemoryError()])
def test_passing_trouble_passes(trouble: Answer | BaseException) -> None:
    engine = Scripted(trouble, OK)
    assert run(engine).outcome.kind is Kind.OUTPUT
    assert engine.asked == 2


def test_lasting_trouble_is_a_failed_attempt() -> None:
    engine = Scripted(Answer(503, b'{"error":1}'))
    tried = run(engine)
    assert (tried.status, tried.body, tried.outcome.kind) == (503, b'{"error":1}', Kind.RETRY)
    assert engine.asked == 1 + AGAIN


@pytest.mark.parametrize("trouble", [SystemExit(1), MemoryError("prompt"), ValueError("prompt")])
def test_an_exception_costs_one_request_and_tells_no_prompt(trouble: BaseException) -> None:
    tried = run(Scripted(trouble))
    assert tried.status == 0
    assert tried.outcome.reason == f"engine_error_{type(trouble).__name__}"


def test_a_timeout_aborts_and_is_tried_once_more() -> None:
    engine = Scripted(None)
    tried = run(engine, timeout_s=0.02)
    assert (tried.status, tried.outcome.reason) == (0, "timeout")
    assert (engine.asked, engine.aborted) == (2, 2)


@pytest.mark.parametrize("trouble", [Answer(500, b"{}"), ABORT, RuntimeError()])
def test_no_failure_of_a_dead_engine_is_believed(trouble: Answer | BaseException) -> None:
    with pytest.raises(EngineDead):
        run(Scripted(trouble, dead_after=1))


def test_a_timeout_of_a_dead_engine_is_its_death() -> None:
    with pytest.raises(EngineDead):
        run(Scripted(None, dead_after=1), timeout_s=0.02)


def test_death_itself_passes_through() -> None:
    engine = Scripted(EngineDead("gone"))
    with pytest.raises(EngineDead):
        run(engine)
    assert engine.asked == 1


def test_cancelling_reaches_the_engine() -> None:
    engine = Scripted(None)

    async def cancelled() -> None:
        task = asyncio.ensure_future(attempt(engine, 0, b"{}", 5))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert engine.aborted == 1
