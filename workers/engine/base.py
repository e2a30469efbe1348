"""What the worker needs of an engine. One engine lives as long as its process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Answer(msgspec.Struct, frozen=True, gc=False):
    """An HTTP answer: status and the JSON body, bytes as the engine made them, without a raw newline."""

    status: int
    body: bytes


class EngineFacts(msgspec.Struct, kw_only=True):
    """What does not change while an engine lives; shown on Flower's Pool tab and in `workers` listings."""

    engine: str
    model: str
    device: str
    max_num_seqs: int
    max_model_len: int = 0
    detail: dict[str, str | int | float] = {}


class EngineStats(msgspec.Struct, kw_only=True):
    """Gauges of the moment."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    #: Requests so far that had to give their place in the KV cache back and be computed again.
    preempted: int = 0


class EngineDead(Exception):
    """The engine cannot answer any more; the process must end (exit 70) and a new one start."""


class Engine(Protocol):
    """All methods run on the engine's own event loop, except `facts` and `stats`, which any thread may call."""

    async def start(self) -> None:
        """Load the model and be ready; raises `BatchmillError` when it cannot."""
        ...

    async def infer(self, url: str, body: bytes) -> Answer:
        """Answer one request. Cancelling the awaiting task aborts it in the engine. `EngineDead` when it died."""
        ...

    async def check(self) -> None:
        """`EngineDead` when the engine is not alive; asked before a 5xx answer is believed."""
        ...

    def facts(self) -> EngineFacts:
        """Known once `start` returned."""
        ...

    def stats(self) -> EngineStats:
        """Cheap; may be called every second."""
        ...

    async def stop(self) -> None:
        """End the engine and its processes."""
        ...


class BulkEngine(Engine, Protocol):
    """An engine that answers many at once; the worker prefers this where it is there (EchoEngine)."""

    async def infer_bulk(self, requests: Sequence[tuple[str, bytes]]) -> list[Answer]:
        """Answers in the order of the requests."""
        ...
