"""What a valid request is: the one place that says so.

A line is a JSON object `{"custom_id", "url"?, "method"?, "body"}` in UTF-8. The structs below say which types and
bounds the fields of a body have, as far as a wrong one could never be answered; everything else is the engine's to
judge, which answers one bad request with one error. Fields that are not named here pass untouched.

- Fields besides those four are ignored: files often carry more for their owner's own use.
- Of a key that stands twice in an object the last one counts, as it does for the engine (RFC 8259 leaves it open); only
  `custom_id` may not, since nobody could tell whose answer it is.
- NaN, Infinity, numbers out of a double's range, lone surrogates and bytes that are not UTF-8 are no JSON.
- `stream` and `background` are refused: their answer is not the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Raw

from common import engine_arguments
from common.errors import UsageError
from common.registry import Registry
from common.settings import Settings
from common.urls import SHORT_FORM, URL_CODE, URLS
from producers.intake.explain import (
    MAX_CUSTOM_ID,
    MAX_DEPTH,
    Refused,
    check_utf8,
    depth,
    explain_body,
    explain_line,
    kind,
    repeats_key,
    shown,
)
from producers.planner import prefix_key, token_cost

#: Tokens of an answer that states no limit, for the estimate of costs.
DEFAULT_OUTPUT_TOKENS = 256
#: What the completions API itself takes when `max_tokens` is left out.
COMPLETION_OUTPUT_TOKENS = 16

Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)] | None
Count = Annotated[int, Meta(ge=1, le=16384)] | None
#: vLLM's vocabularies end far below; what is more, or below 0, has no token in any model.
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Text = str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
#: Of a score or rerank request: a text, something with parts, or several of these.
Scored = str | dict[str, Any] | Annotated[list[str | dict[str, Any]], Meta(min_length=1)]


class Message(msgspec.Struct, gc=False):
    """One message of a conversation; its content is the engine's to judge."""

    role: str


Messages = Annotated[list[Message], Meta(min_length=1)]


class Body(msgspec.Struct, gc=False, kw_only=True):
    """What all bodies have in common."""

    model: str | None = None
    stream: bool | None = None


class Chat(Body):
    """/v1/chat/completions"""

    messages: Messages
    max_tokens: Tokens = None
    max_completion_tokens: Tokens = None
    n: Count = None


class Completion(Body):
    """/v1/completions; `max_tokens: 0` asks for the prompt's own log probabilities."""

    prompt: Text | None = None
    prompt_embeds: Any = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    n: Count = None


class Response(Body):
    """/v1/responses"""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_output_tokens: Tokens = None
    background: bool | None = None


class Embedding(Body):
    """/v1/embeddings: `input`, or `messages` for models that embed conversations."""

    input: Text | None = None
    messages: Messages | None = None


class Score(Body):
    """/v1/score, in any of the spellings engines take."""

    text_1: Scored | None = None
    text_2: Scored | None = None
    data_1: Scored | None = None
    data_2: Scored | None = None
    queries: Scored | None = None
    documents: Scored | None = None
    items: Scored | None = None


class Rerank(Body):
    """/v1/rerank"""

    query: str | dict[str, Any]
    documents: Scored


class AnthropicMessages(Body):
    """/v1/messages, where `max_tokens` is required"""

    messages: Messages
    max_tokens: Tokens = None


class _Endpoint(NamedTuple):
    """How the bodies of one URL are read."""

    decode: Callable[[Raw], Any]
    prompt: Callable[[Raw], Any]
    #: The fields that bound the answer; the first one given counts, the last one is set by default.
    limits: tuple[str, ...] = ()
    #: Tokens of an answer whose length is not bounded, for the estimate.
    output: int = DEFAULT_OUTPUT_TOKENS
    #: Of each group one field must be there.
    needs: tuple[tuple[str, ...], ...] = ()
    #: A bound on the answer must be there.
    needs_limit: bool = False


def _prompt(*fields: str) -> Callable[[Raw], Any]:
    """A decoder of the parts of a body that make the prompt, in the order in which the engine sees them."""
    struct = msgspec.defstruct("Prompt", [(f, Raw, Raw(b"")) for f in fields], gc=False)
    return msgspec.json.Decoder(struct).decode


def _body(struct: type[Body]) -> Callable[[Raw], Any]:
    return msgspec.json.Decoder(struct).decode


_TEMPLATE = ("cache_salt", "chat_template", "chat_template_kwargs", "tools", "documents")
_ENDPOINTS: dict[str, _Endpoint] = {
    "/v1/chat/completions": _Endpoint(
        _body(Chat), _prompt(*_TEMPLATE, "messages"), ("max_completion_tokens", "max_tokens")
    ),
    "/v1/completions": _Endpoint(
        _body(Completion),
        _prompt("cache_salt", "prompt", "prompt_embeds"),
        ("max_tokens",),
        COMPLETION_OUTPUT_TOKENS,
        needs=(("prompt", "prompt_embeds"),),
    ),
    "/v1/responses": _Endpoint(
        _body(Response), _prompt("cache_salt", "tools", "instructions", "input"), ("max_output_tokens",)
    ),
    "/v1/embeddings": _Endpoint(
        _body(Embedding), _prompt("cache_salt", "input", "messages"), output=0, needs=(("input", "messages"),)
    ),
    "/v1/score": _Endpoint(
        _body(Score),
        _prompt("cache_salt", "queries", "data_1", "text_1", "documents", "items", "data_2", "text_2"),
        output=0,
        needs=(("queries", "data_1", "text_1"), ("documents", "items", "data_2", "text_2")),
    ),
    "/v1/rerank": _Endpoint(_body(Rerank), _prompt("cache_salt", "query", "documents"), output=0),
    "/v1/messages": _Endpoint(
        _body(AnthropicMessages),
        _prompt("cache_salt", "tools", "system", "messages"),
        ("max_tokens",),
        needs_limit=True,
    ),
}
_BY_CODE = [_ENDPOINTS[url] for url in URLS]


class Head(msgspec.Struct, gc=False):
    """The line around the body."""

    custom_id: str
    body: Raw
    url: str | None = None
    method: str | None = None


_decode_head = msgspec.json.Decoder(Head).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

#: What is left of a valid request: custom id (a JSON string literal), code of the url, body (no raw newline or CR in
#: it), the planner's key, cost in tokens, how much of that is the answer.
Checked = tuple[bytes, int, bytes, bytes, int, int]


class Rules:
    """The rules for one batch. The first request decides its model version, unless the caller did."""

    def __init__(
        self, settings: Settings, registry: Registry, model: str | None, max_tokens_default: int | None
    ) -> None:
        self._registry = registry
        self._default_model = settings.inference.default_model
        self._max_output_setting = settings.inference.max_output_tokens
        self._context_setting = settings.inference.max_seq_len
        self._max_tokens_default = max_tokens_default
        self.longest = settings.store.max_request_bytes
        #: The batch's model version; None until it is decided.
        self.model: str | None = None
        #: What bodies may call it; None stands for a body that names no model.
        self._names: set[str | None] = set()
        self._max_output = 2**31 - 1
        self._max_output_is = ""
        if model is not None:
            self._decide(registry.resolve(model))

    def decide_default(self) -> str:
        """The batch's model version when no request decided it; `UsageError` when there is no default."""
        if self.model is None:
            self._decide(self._registry.resolve(self._default_model))
        assert self.model is not None
        return self.model

    def check(self, line: bytes | None, utf8: bool = True) -> Checked | None:
        """A line as a request; None when it is blank; raises `Refused`.

        `line`: None for one that is too long; `utf8`: it is known to be UTF-8.
        """
        if line is None:
            raise Refused("", f"is longer than {self.longest} bytes (store.max_request_bytes)")
        if not utf8:
            check_utf8(line)
        try:
            head = _decode_head(line)
        except (msgspec.DecodeError, RecursionError) as exc:
            if not line.strip():
                return None
            raise explain_line(line, exc) from None
        custom_id = _encode(head.custom_id)
        if not 3 <= len(custom_id) <= MAX_CUSTOM_ID + 2:
            if len(custom_id) < 3:
                raise Refused("custom_id", "is empty")
            raise Refused("custom_id", f"has {len(custom_id) - 2} bytes, at most {MAX_CUSTOM_ID} are taken")
        try:
            return self._check_body(head, custom_id, line)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise explain_body(head.body, exc, custom_id) from None
        except Refused as refused:
            refused.custom_id = custom_id
            raise

    def _check_body(self, head: Head, custom_id: bytes, line: bytes) -> Checked:
        if head.method is not None and head.method != "POST":
            raise Refused("method", "must be POST")
        if line.count(b"{") + line.count(b"[") > MAX_DEPTH and depth(line) > MAX_DEPTH:
            raise Refused("body", f"is nested deeper than {MAX_DEPTH} levels")
        raw = head.body
        # Everything is decoded once, whatever its name: parts that the structs leave alone must be JSON too.
        whole = _decode_any(raw)
        if not isinstance(whole, dict):
            raise Refused("body", f"must be an object, is {kind(whole)}")
        if line.count(b'"custom_id"') > 1 and repeats_key(line, bytes(raw), "custom_id"):
            raise Refused("custom_id", "stands twice in the object")
        code = URL_CODE.get(head.url) if head.url is not None else self._short_form(whole)
        if code is None:
            raise Refused("url", f"{shown(head.url or '')} is not supported; supported are {', '.join(URLS)}")
        endpoint = _BY_CODE[code]
        body = endpoint.decode(raw)
        if body.stream:
            raise Refused("body.stream", "must be false or left out: a batch has no one to stream to")
        if body.model not in self._names:
            self._check_model(body.model)
        for group in endpoint.needs:
            if all(getattr(body, name) is None for name in group):
                raise Refused(f"body.{group[0]}", "is missing")
        text = bytes(raw)
        if b"\r" in text:
            # Strings cannot hold a raw CR, so this one is whitespace between them.
            text = text.replace(b"\r", b" ")
        output = endpoint.output
        if endpoint.limits:
            asked = self._limit(endpoint.limits, body)
            if asked is not None:
                output = asked
            elif self._max_tokens_default is not None:
                output = self._max_tokens_default
                text = b'%b,"%b":%d}' % (text[:-1].rstrip(), endpoint.limits[-1].encode(), output)
            elif endpoint.needs_limit:
                raise Refused(f"body.{endpoint.limits[-1]}", "is missing; add it, or use --max-tokens-default")
            if code == _RESPONSES and body.background:
                raise Refused("body.background", "must be false or left out: its answer is only a promise of one")
            if code < _RESPONSES and body.n is not None:
                output *= body.n
            if code == _MESSAGES and body.model is None:
                # The one endpoint that insists on it.
                text = b'%b,"model":%b}' % (text[:-1].rstrip(), _encode(self.model))
        prompt = b"\0".join(msgspec.structs.astuple(endpoint.prompt(raw)))
        cost = token_cost(len(prompt), output)
        return custom_id, code, text, prefix_key(prompt), cost, min(output, cost)

    def _short_form(self, body: dict[str, Any]) -> int:
        for field, meant in SHORT_FORM:
            if field in body:
                return URL_CODE[meant]
        raise Refused("url", f"is missing, and the body has none of {', '.join(f for f, _ in SHORT_FORM)}")

    def _limit(self, names: tuple[str, ...], body: Any) -> int | None:
        for name in names:
            asked: int | None = getattr(body, name)
            if asked is not None:
                if asked > self._max_output:
                    raise Refused(f"body.{name}", f"{asked} is more than {self._max_output_is} of {self._max_output}")
                return asked
        return None

    def _check_model(self, name: str | None) -> None:
        """Decide the model version, or refuse a body that names another one."""
        try:
            meant = self._registry.resolve(self._default_model if name is None else name)
        except UsageError as exc:
            if name is None:
                raise  # nothing names a model and there is no default: not this line's fault
            raise Refused("body.model", str(exc)) from None
        if self.model is None:
            self._decide(meant)
        if name is None or meant == self.model:
            self._names.add(name)
        else:
            raise Refused(
                "body.model",
                f"{shown(name)} is {meant}, this batch runs on {self.model}: one batch, one model version",
            )

    def _decide(self, model: str) -> None:
        self.model = model
        self._names |= {None, model}
        context = engine_arguments.context(self._registry.get(model).engine, self._context_setting)
        if context is not None:
            self._max_output, self._max_output_is = context, f"the context of {model}"
        if self._max_output_setting is not None and self._max_output_setting < self._max_output:
            self._max_output, self._max_output_is = self._max_output_setting, "inference.max_output_tokens"
        if self._max_tokens_default is not None and self._max_tokens_default > self._max_output:
            raise UsageError(
                f"--max-tokens-default: {self._max_tokens_default} is more than {self._max_output_is} "
                f"of {self._max_output}"
            )


_RESPONSES = URL_CODE["/v1/responses"]
_MESSAGES = URL_CODE["/v1/messages"]
