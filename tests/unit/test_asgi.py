"""Calling an application in process, with applications that behave as vLLM's handlers do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from workers.engine import asgi
from workers.engine.asgi import Caller, Response


async def answer(send: Any, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
    headers = [(b"Content-Type", content_type)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    half = len(body) // 2
    await send({"type": "http.response.body", "body": body[:half], "more_body": True})
    await send({"type": "http.response.body", "body": body[half:]})


async def read(receive: Any) -> bytes:
    message = await receive()
    assert message["type"] == "http.request"
    assert not message["more_body"]
    body: bytes = message["body"]
    return body


def test_request_and_answer_pass_untouched() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)
        body = await read(receive)
        await answer(send, 418, body[::-1], b"Application/JSON; charset=utf-8")

    assert asyncio.run(Caller(app).post("/v1/x", b'{"a":1}')) == Response(418, "application/json", b'}1:"a"{')
    assert (seen["method"], seen["path"], seen["type"]) == ("POST", "/v1/x", "http")
    assert dict(seen["headers"])[b"content-length"] == b"7"


def test_cancelling_disconnects_and_the_swallowed_cancellation_is_no_answer() -> None:
    """vLLM's handlers turn a cancellation into a 400 "Client disconnected": it must not come back as an answer."""
    events: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read(receive)
        work = asyncio.ensure_future(asyncio.Event().wait())
        gone = asyncio.ensure_future(receive())
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        events.append(gone.result()["type"])
        work.cancel()
        await answer(send, 400, b'"Client disconnected"')
        events.append("ended by itself")

    async def main() -> None:
        caller = Caller(app)
        post = asyncio.ensure_future(caller.post("/", b""))
        while not caller._tasks:
            await asyncio.sleep(0)
        post.cancel()
        with pytest.raises(asyncio.CancelledError):
            await post
        await asyncio.wait(caller._tasks)

    asyncio.run(main())
    assert events == ["http.disconnect", "ended by itself"]


def test_application_that_ignores_the_disconnect_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "DISCONNECT_GRACE_S", 0.01)
    cancelled = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def main() -> None:
        caller = Caller(app)
        post = asyncio.ensure_future(caller.post("/", b""))
        await asyncio.sleep(0)
        post.cancel()
        with pytest.raises(asyncio.CancelledError):
            await post
        await asyncio.wait_for(cancelled.wait(), 5)

    asyncio.run(main())


def test_answer_counts_although_the_middleware_raises_again() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, 500, b"{}")
        raise ValueError("for the log")

    assert asyncio.run(Caller(app).post("/", b"")).status == 500


@pytest.mark.parametrize("started", [False, True])
def test_no_whole_answer_raises(started: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
        raise KeyError("boom")

    with pytest.raises(KeyError):
        asyncio.run(Caller(app).post("/", b""))


def test_silent_application_raises() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        return

    with pytest.raises(RuntimeError, match="without an answer"):
        asyncio.run(Caller(app).post("/", b""))


def test_many_at_once_get_their_own_answers() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        number = json.loads(await read(receive))
        await asyncio.sleep(0.001 * (number % 7))
        await answer(send, 200, json.dumps(number * 2).encode())

    async def main() -> list[bytes]:
        caller = Caller(app)
        return [r.body for r in await asyncio.gather(*(caller.post("/", b"%d" % i) for i in range(200)))]

    assert asyncio.run(main()) == [b"%d" % (2 * i) for i in range(200)]


def test_close_ends_what_runs() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        caller = Caller(app)
        post = asyncio.ensure_future(caller.post("/", b""))
        await asyncio.sleep(0)
        await caller.close()
        with pytest.raises(RuntimeError):
            await post
        assert not caller._tasks

    asyncio.run(main())
