"""Under which key an answer is kept, and which requests have one at all. Pure.

A request has a key only when its answer is determined: temperature 0 or a seed, or an endpoint that samples nothing
(a model whose entry says `cache: all` keeps sampled answers too). Two requests have the same key when they differ only
in what cannot change the answer.
"""

from __future__ import annotations

from typing import Any

import msgspec
from blake3 import blake3

from common.urls import URL_CODE, URLS

#: Bytes of a key: 16 hex digits that stand for the model version, then a digest of everything.
TAG_BYTES = 16
KEY_BYTES = TAG_BYTES + 32

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

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(order="deterministic").encode


class Space:
    """The key space of one engine: all answers that the same weights with the same settings give.

    `fingerprint` stands for these (`workers.cache.fingerprint`); `everything`: sampled answers are kept too.
    """

    def __init__(self, model: str, fingerprint: str, *, everything: bool = False) -> None:
        self.model = model
        self.fingerprint = fingerprint
        self._tag = tag(model)
        self._everything = everything

    def key(self, tenant: str, url: int, body: bytes) -> bytes | None:
        """The key of a request (`KEY_BYTES`), or None where its answer is not determined. `url` indexes `URLS`."""
        try:
            fields = _decode(body)
            if not isinstance(fields, dict) or not (self._everything or determined(url, fields)):
                return None
            ignored = _IGNORED_IN_RESPONSES if url == _RESPONSES else _IGNORED
            kept = {name: _plain(value) for name, value in fields.items() if name not in ignored}
            what = _encode(["v2", self.model, self.fingerprint, tenant, URLS[url], kept])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        return self._tag + blake3(what).digest()


def tag(model_version: str) -> bytes:
    """What the keys of a model version begin with, so that they can be found without knowing more."""
    return blake3(model_version.encode()).hexdigest(length=TAG_BYTES // 2).encode()


def determined(url: int, fields: dict[str, Any]) -> bool:
    """True when the engine gives this request one answer: nothing is sampled, or the sampling is seeded."""
    if any(fields.get(name) is not None for name in _STATEFUL):
        return False
    if url in _NO_SAMPLING:
        return True
    temperature, seed = fields.get("temperature"), fields.get("seed")
    cold = isinstance(temperature, (int, float)) and not isinstance(temperature, bool) and temperature == 0
    return cold or (url in _SEEDED and isinstance(seed, int) and not isinstance(seed, bool))


def _plain(value: Any) -> Any:
    """The value with 1.0 written as 1, so that both have one key."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return value
