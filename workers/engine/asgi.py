"""Call an ASGI application in process: no port, no HTTP parser, the answer's bytes as the application wrote them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

Message = MutableMapping[str, Any]
Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

#: Seconds an application gets to notice that its client has gone, before its task is cancelled.
DISCONNECT_GRACE_S = 5.0


class Response(NamedTuple):
    """What came back. `content_type` is lower case, without parameters."""

    status: int
    content_type: str
    body: bytes


class Caller:
    """Posts JSON to one application. Lives on one event loop."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[None]] = set()

    async def post(self, path: str, body: bytes) -> Response:
        """The application's answer; raises what it raised when it did not answer whole.

        When the awaiting task is cancelled, the application sees its client disconnect, which is how it learns to
        abort; it then ends on its own. It runs in a task of its own for that: a handler that is cancelled directly may
        swallow the cancellation and answer, and a cancelled request must never look answered.
        """
        exchange = _Exchange(body)
        task = asyncio.ensure_future(self._app(_scope(path, body), exchange.receive, exchange.send))
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            exchange.disconnect()
            asyncio.get_running_loop().call_later(DISCONNECT_GRACE_S, task.cancel)
            raise
        if exchange.complete:
            # A server-error middleware answers and raises again, for a log; the answer counts.
            return exchange.response()
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        raise error if isinstance(error, Exception) else RuntimeError("the application ended without an answer")

    async def close(self) -> None:
        """Cancel what still runs and wait for it, a moment at most."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=DISCONNECT_GRACE_S)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # Looked at, so that asyncio does not report it: `post` raised it, or nobody waits for it any more.
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()


class _Exchange:
    """One request and its answer."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._content_type = ""
        self._parts: list[bytes] = []
        self.complete = False

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        # Several readers may wait (a handler and a middleware): none of them may cancel the future under the others.
        await asyncio.shield(self._gone)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            for name, value in message.get("headers", ()):
                if name.lower() == b"content-type":
                    self._content_type = value.decode("latin-1").partition(";")[0].strip().lower()
        elif message["type"] == "http.response.body":
            self._parts.append(bytes(message.get("body", b"")))
            if not message.get("more_body", False):
                self.complete = True

    def disconnect(self) -> None:
        if not self._gone.done():
            self._gone.set_result(None)

    def response(self) -> Response:
        return Response(self._status, self._content_type, b"".join(self._parts))


def _scope(path: str, body: bytes) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"batchmill"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
