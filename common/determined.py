"""Which requests have one answer, and which of them ask the same. Pure.

A request is determined by temperature 0 or a seed, or by an endpoint that samples nothing.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import msgspec

from common.urls import URL_CODE

#: Endpoints that sample nothing.
_NO_SAMPLING = frozenset(URL_CODE[url] for url in ("/v1/embeddings", "/v1/score", "/v1/rerank"))
#: Endpoints whose engine takes a seed; elsewhere it ignores the field, so a seed determines nothing.
_SEEDED = frozenset(URL_CODE[url] for url in ("/v1/chat/completions", "/v1/completions", "/v1/responses"))
_RESPONSES = URL_CODE["/v1/responses"]

#: Not `bool`, which is an `int` too.
_NUMBERS = (int, float)
_name = itemgetter(0)

_TEXT, _FLAG, _MAPPING, _NONE = (frozenset((kind, type(None))) for kind in (str, bool, dict, type(None)))
#: Body fields that do not change the answer, while their value is of a type that every engine takes: a value of another
#: one may be why a request is refused, so there it counts. The model is in the key's space, its name in the body is an
#: alias. `priority` counts whatever it is: an engine without priorities may refuse all but 0.
_IGNORED = {
    "model": frozenset((str,)),
    "user": _TEXT,
    "metadata": _MAPPING,
    "custom_id": _TEXT,
    "stream": _FLAG,
    # Refused where nothing is streamed.
    "stream_options": _NONE,
    "store": _FLAG,
    "request_id": frozenset((str,)),
    "service_tier": _TEXT,
    "safety_identifier": _TEXT,
    "prompt_cache_key": _TEXT,
}
#: A response object repeats `user`, `metadata`, `service_tier` and more of its request, so there they count.
_IGNORED_IN_RESPONSES = {name: _IGNORED[name] for name in ("model", "stream", "stream_options", "request_id")}
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
    # A little above 0 is none: vLLM makes 0.01 of it, and samples.
    if type(temperature) in _NUMBERS and temperature == 0:
        return True
    # To vLLM -1 is no seed. What else it would take for one ("7", 7.0, true) is computed each time.
    return url in _SEEDED and type(seed) is int and seed != -1


def canonical(url: int, fields: dict[str, Any]) -> dict[str, Any]:
    """What of a body (as `read` gives it) counts for its answer; write it as it stands, it is in order.

    Only the body's own fields and those of its messages are put in order, and the body's numbers into one form: further
    in an engine may see the difference. A chat template prints a tool's schema as it was written, and a grammar has the
    properties in the order of their schema.
    """
    ignored = _IGNORED_IN_RESPONSES if url == _RESPONSES else _IGNORED
    found = {
        # 1.0 as 1, so that both are one request.
        name: int(value) if type(value) is float and value.is_integer() else value
        for name, value in sorted(fields.items(), key=_name)
        if name not in ignored or type(value) not in ignored[name]
    }
    messages = found.get("messages")
    if type(messages) is list:
        # Some programs write the role first, some last.
        found["messages"] = [dict(sorted(m.items(), key=_name)) if type(m) is dict else m for m in messages]
    return found


#: The value of a JSON document. `msgspec.DecodeError` when it is none.
read = msgspec.json.Decoder().decode
