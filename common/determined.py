"""Which requests have one answer, and which of them ask the same. Pure.

A request is determined by temperature 0 or a seed, or by an endpoint that samples nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from common.urls import URL_CODE

#: Endpoints that sample nothing.
_NO_SAMPLING = frozenset(URL_CODE[url] for url in ("/v1/embeddings", "/v1/score", "/v1/rerank"))
#: Endpoints whose engine takes a seed; elsewhere it ignores the field, so a seed determines nothing.
_SEEDED = frozenset(URL_CODE[url] for url in ("/v1/chat/completions", "/v1/completions", "/v1/responses"))
_RESPONSES = URL_CODE["/v1/responses"]

#: Body fields that do not change the answer. The model is in the key's space; its name in the body is only an alias.
_IGNORED = frozenset(
    {
        "model",
        "user",
        "metadata",
        "custom_id",
        "stream",
        "stream_options",
        "store",
        "priority",
        "request_id",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    }
)
#: A response object repeats `user`, `metadata`, `service_tier` and more of its request, so there they count.
_IGNORED_IN_RESPONSES = frozenset({"model", "stream", "stream_options", "priority", "request_id"})
#: Fields that let the answer depend on more than the request.
_STATEFUL = frozenset({"previous_response_id", "previous_input_messages", "conversation"})


def may_be_determined(url: int, body: bytes) -> bool:
    """False when `determined` is, told without reading the body; most sampled requests are."""
    return url in _NO_SAMPLING or b'"temperature"' in body or b'"seed"' in body


def determined(url: int, fields: dict[str, Any]) -> bool:
    """True when the engine gives this request one answer: nothing is sampled, or the sampling is seeded."""
    if any(fields.get(name) is not None for name in _STATEFUL):
        return False
    if url in _NO_SAMPLING:
        return True
    temperature, seed = fields.get("temperature"), fields.get("seed")
    cold = isinstance(temperature, (int, float)) and not isinstance(temperature, bool) and temperature == 0
    return cold or (url in _SEEDED and isinstance(seed, int) and not isinstance(seed, bool))


def canonical(url: int, fields: dict[str, Any]) -> dict[str, Any]:
    """What of a body (as `read` gives it) counts for its answer; order its keys when you write it."""
    ignored = _IGNORED_IN_RESPONSES if url == _RESPONSES else _IGNORED
    return {name: value for name, value in fields.items() if name not in ignored}


def _number(text: str) -> int | float:
    """1.0 as 1, so that both are one request."""
    number = float(text)
    return int(number) if number.is_integer() else number


#: The value of a JSON document, with every number in one form. `msgspec.DecodeError` when it is none.
read = msgspec.json.Decoder(float_hook=_number).decode
