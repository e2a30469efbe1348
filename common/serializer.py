"""The kombu serializer of our messages: bytes in, bytes out, and a decoder that never raises.

A message that fails to decode inside kombu is acked, so deleted (celery/worker/consumer/consumer.py). This decoder
takes anything and hands the blob on; verification happens where a bad message can be dead-lettered with its reason.
"""

from __future__ import annotations

from typing import Any

from kombu.serialization import register

NAME = "batchmill"
CONTENT_TYPE = "application/x-batchmill"


def dumps(value: Any) -> bytes:
    """The blob out of bytes, or out of Celery's `(args, kwargs, embed)` with the blob as only argument."""
    if isinstance(value, bytes):
        return value
    blob = value[0][0]
    if not isinstance(blob, bytes):
        raise TypeError(f"a {NAME} message carries bytes, not {type(blob).__name__}")
    return blob


def loads(data: Any) -> tuple[tuple[bytes], dict[str, Any], dict[str, Any]]:
    """Celery's `(args, kwargs, embed)` with the blob as only argument; total, `embed` always empty."""
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogateescape")
    return (bytes(data),), {}, {}


def install() -> None:
    """Register the serializer with kombu; may be called again."""
    register(NAME, dumps, loads, content_type=CONTENT_TYPE, content_encoding="binary")
