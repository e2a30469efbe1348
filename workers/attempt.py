"""One attempt at one request: ask the engine, and ask again where that may help.

Retries here are for a moment's trouble (an abort, a 5xx, a timeout) and few; whatever they cannot mend goes back to
the coordinator as a failed attempt, to be tried on another worker. 4xx are never asked twice.
"""

from __future__ import annotations

import asyncio

import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_result, wait_random_exponential

from common.messages import Kind
from common.urls import URLS
from workers.engine.base import Engine, EngineDead
from workers.outcome import Outcome, judge

#: Times a request is asked again within one attempt, after a timeout and after anything else.
AGAIN_AFTER_TIMEOUT = 1
AGAIN = 2

#: Longest wait before asking again, seconds.
LONGEST_WAIT_S = 5.0


class Tried(msgspec.Struct, frozen=True, gc=False):
    """What came of it. `status` 0: no HTTP answer, `outcome.reason` says why."""

    status: int
    body: bytes
    outcome: Outcome


_TIMEOUT = Tried(0, b"", Outcome(Kind.RETRY, "timeout"))


async def attempt(engine: Engine, url: int, body: bytes, timeout_s: float) -> Tried:
    """Ask for an answer to `URLS[url]`; `EngineDead` when there will be none.

    Cancelling this aborts the request in the engine.
    """
    tried = await _once(engine, url, body, timeout_s)
    if tried.outcome.kind is not Kind.RETRY:
        return tried
    # Only here, since a retry wrapper costs several times what a request does.
    return await _again(tried, engine, url, body, timeout_s)


async def _once(engine: Engine, url: int, body: bytes, timeout_s: float) -> Tried:
    try:
        async with asyncio.timeout(timeout_s):
            answer = await engine.infer(URLS[url], body)
    except TimeoutError:
        await engine.check()
        return _TIMEOUT
    except (EngineDead, asyncio.CancelledError):
        raise
    except BaseException as exc:
        # SystemExit and MemoryError too: one request's trouble must end neither the loop nor its neighbours. The
        # text stays here, since it may quote the prompt.
        await engine.check()
        return Tried(0, b"", Outcome(Kind.RETRY, f"engine_error_{type(exc).__name__}"))
    outcome = judge(url, answer.status, answer.body)
    if outcome.kind is Kind.RETRY:
        # A dead engine's application answers with ordinary 500 bodies.
        await engine.check()
    return Tried(answer.status, answer.body, outcome)


async def _again(first: Tried, engine: Engine, url: int, body: bytes, timeout_s: float) -> Tried:
    known: Tried | None = first
    timeouts = 0

    async def ask() -> Tried:
        nonlocal known, timeouts
        # The failure we have is the first try, so that waiting comes before asking again.
        tried, known = known, None
        if tried is None:
            tried = await _once(engine, url, body, timeout_s)
        timeouts += tried is _TIMEOUT
        return tried

    def enough(state: RetryCallState) -> bool:
        return state.attempt_number > AGAIN or timeouts > AGAIN_AFTER_TIMEOUT

    def last(state: RetryCallState) -> Tried:
        assert state.outcome is not None
        tried: Tried = state.outcome.result()
        return tried

    retrying = AsyncRetrying(
        retry=retry_if_result(lambda tried: tried.outcome.kind is Kind.RETRY),
        wait=wait_random_exponential(multiplier=0.5, max=LONGEST_WAIT_S),
        stop=enough,
        retry_error_callback=last,
    )
    return await retrying(ask)
