"""Under which key an answer is kept, and which requests have one at all. Pure.

A request has a key only when its answer is determined: temperature 0 or a seed, or an endpoint that samples nothing.
Two requests have the same key when they differ only in what cannot change the answer.
"""

from __future__ import annotations

from typing import Any

import msgspec
from blake3 import blake3

from common.urls import URL_CODE, URLS

#: Endpoints that sample nothing.
_NO_SAMPLING = frozenset(URL_CODE[url] for url in ("/v1/embeddings", "/v1/score", "/v1/rerank"))

#: Body fields that do not change the answer. The model is in the key space; its name in the body is only an alias.
_IGNORED = frozenset(
    {
        "model",
        "user",
        "metadata",
        "stream",
        "store",
        "priority",
        "request_id",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    }
)

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(order="deterministic").encode


def key_space(model_version: str, facts: dict[str, Any]) -> bytes:
    """What all answers of one engine share: model version, weights and whatever changes answers."""
    return _encode(["v1", model_version, facts])


def key(space: bytes, url: int, body: bytes) -> bytes | None:
    """The key of a request (32 bytes), or None where its answer is not determined. `url` indexes `URLS`."""
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    if url not in _NO_SAMPLING and not _determined(fields):
        return None
    kept = {name: _plain(value) for name, value in fields.items() if name not in _IGNORED}
    return blake3(b"\0".join((space, URLS[url].encode(), _encode(kept)))).digest()


def _determined(fields: dict[str, Any]) -> bool:
    temperature, seed = fields.get("temperature"), fields.get("seed")
    cold = isinstance(temperature, (int, float)) and not isinstance(temperature, bool) and temperature == 0
    return cold or (isinstance(seed, int) and not isinstance(seed, bool))


def _plain(value: Any) -> Any:
    """The value with 1.0 written as 1, so that both have one key."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value
