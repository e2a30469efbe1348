"""The prompts of a request, as near to what the engine makes of its body as can be had without the engine."""

from __future__ import annotations

from typing import Any

import msgspec

from common.urls import URLS

_decode = msgspec.json.Decoder().decode

#: A prompt: text, or token ids where the request gives those.
Prompt = str | list[int]


class Asked(msgspec.Struct, gc=False):
    """What a body asks: prompts that stand for themselves, or a conversation that a chat template makes a prompt of."""

    prompts: list[Prompt]
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    #: What the chat template is given besides.
    options: dict[str, Any] = {}


def asked(url: int, body: bytes) -> Asked:
    """What a valid request asks. `url` indexes `URLS`."""
    fields: dict[str, Any] = _decode(body)
    path = URLS[url]
    if path == "/v1/responses":
        return _response(fields)
    if isinstance(fields.get("messages"), list):
        messages = list(fields["messages"])
        if path == "/v1/messages" and fields.get("system"):
            messages.insert(0, {"role": "system", "content": _text(fields["system"])})
        # Templates of text models take texts; the engine joins the parts of a content for them as well.
        messages = [m | {"content": _text(m["content"])} if isinstance(m.get("content"), list) else m for m in messages]
        options = fields.get("chat_template_kwargs")
        return Asked([], messages, fields.get("tools"), options if isinstance(options, dict) else {})
    if path == "/v1/rerank":
        query = _text(fields.get("query"))
        return Asked([query + _text(document) for document in _listed(fields.get("documents"))])
    if path == "/v1/score":
        left = _first(fields, "queries", "data_1", "text_1")
        right = _first(fields, "documents", "items", "data_2", "text_2")
        lefts = left if len(left) == len(right) else left[:1] * len(right)
        return Asked([_text(a) + _text(b) for a, b in zip(lefts, right, strict=True)])
    return Asked(_several(fields.get("prompt" if path == "/v1/completions" else "input", "")))


def plain(messages: list[dict[str, Any]]) -> str:
    """A conversation as text, where no template is at hand."""
    return "".join(f"{message.get('role', '')}\n{_text(message.get('content'))}\n" for message in messages)


def _response(fields: dict[str, Any]) -> Asked:
    given = fields.get("input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or [])
    messages = [m | {"content": _text(m.get("content"))} for m in messages if isinstance(m, dict)]
    if fields.get("instructions"):
        messages.insert(0, {"role": "system", "content": _text(fields["instructions"])})
    return Asked([], messages, fields.get("tools"))


def _several(value: Any) -> list[Prompt]:
    """A text, token ids, or several of either."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return [value]
    return [item if isinstance(item, (str, list)) else _text(item) for item in _listed(value)]


def _first(fields: dict[str, Any], *names: str) -> list[Any]:
    return next((_listed(fields[name]) for name in names if fields.get(name) is not None), [])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _text(value: Any) -> str:
    """The text of a content: a string, or parts of which some have text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_text(part) for part in value)
    if isinstance(value, dict):
        return _text(value.get("text", value.get("content", "")))
    return ""
