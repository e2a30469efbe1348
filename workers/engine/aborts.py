"""Notice that the engine aborted a request nobody cancelled.

An engine process that is told to end (SIGTERM) answers every request with what it has so far. In the answers this is
hard or impossible to see: chat and completions carry `finish_reason: "abort"`, /v1/messages lacks its `stop_reason`,
and /v1/responses says `"status": "completed"`. So we look where it can be told apart: at the outputs that vLLM's
application builds its answers from.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any


class Watch:
    """What became of the outputs of one call of the application."""

    __slots__ = ("aborted",)

    def __init__(self) -> None:
        self.aborted = False


#: The watch of the running call. Tasks that the application starts inherit it, since they copy the context.
_current: ContextVar[Watch | None] = ContextVar("batchmill_watch", default=None)


@contextlib.contextmanager
def watching() -> Iterator[Watch]:
    """Within the block, tasks that are created report to the `Watch` it gives."""
    watch = Watch()
    token = _current.set(watch)
    try:
        yield watch
    finally:
        _current.reset(token)


def observe(llm: Any) -> None:
    """Put the observer before an `AsyncLLM`'s `generate` and `encode`."""
    generate, encode = llm.generate, llm.encode

    async def observed_generate(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        watch = _current.get()
        async with contextlib.aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                if watch is not None and any(one.finish_reason == "abort" for one in output.outputs):
                    watch.aborted = True
                yield output

    async def observed_encode(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        watch = _current.get()
        async with contextlib.aclosing(encode(*args, **kwargs)) as outputs:
            async for output in outputs:
                if watch is not None and output.finished and output.outputs.data.numel() == 0:
                    watch.aborted = True
                yield output

    llm.generate, llm.encode = observed_generate, observed_encode
