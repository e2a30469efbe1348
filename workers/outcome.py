"""What an HTTP answer of the engine means: final success, final error, or a failed attempt. Pure.

The rule (architecture, invariant 6): an answer is an answer. Final are 2xx with a normal finish reason and
deterministic 4xx; `abort`, 408, 409, 429 and 5xx are failed attempts. A 2xx whose body cannot be read, or that names
a finish reason we do not know, is not believed.
"""

from __future__ import annotations

import msgspec

from common.messages import Kind
from common.urls import URL_CODE

#: Choices of chat and text completions. vLLM adds `repetition`; `abort` and `error` are its own failures.
_NORMAL_FINISH = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter", "repetition"})
#: Anthropic's `stop_reason`; null means that vLLM had none to map (an abort).
_NORMAL_STOP = frozenset({"end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal"})
#: Why a response of /v1/responses may be incomplete and still be the answer.
_NORMAL_INCOMPLETE = frozenset({"max_output_tokens", "content_filter"})
#: 4xx that another try may change: timeout, conflict, too early, too many requests, client closed.
_PASSING_4XX = frozenset({408, 409, 425, 429, 499})


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """`reason` says why it is a `RETRY` (None otherwise); tokens count only for `OUTPUT`."""

    kind: Kind
    reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct, gc=False):
    finish_reason: str | None = None


class _Completion(msgspec.Struct, gc=False):
    choices: list[_Choice]
    usage: _Usage | None = None


class _ResponseUsage(msgspec.Struct, gc=False):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None


class _Incomplete(msgspec.Struct, gc=False):
    reason: str | None = None


class _Response(msgspec.Struct, gc=False):
    status: str
    incomplete_details: _Incomplete | None = None
    usage: _ResponseUsage | None = None


class _MessageUsage(msgspec.Struct, gc=False):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Message(msgspec.Struct, gc=False):
    stop_reason: str | None = None
    usage: _MessageUsage | None = None


class _Pooled(msgspec.Struct, gc=False):
    """Embeddings, scores and ranks: nothing is generated, so nothing can be cut short."""

    usage: _Usage | None = None


_completion = msgspec.json.Decoder(_Completion).decode
_response = msgspec.json.Decoder(_Response).decode
_message = msgspec.json.Decoder(_Message).decode
_pooled = msgspec.json.Decoder(_Pooled).decode

_ERROR = Outcome(Kind.ERROR)
#: A member of an enumeration is looked up slowly, and this one for every request.
_OUTPUT = Kind.OUTPUT


def judge(url: int, status: int, body: bytes) -> Outcome:
    """The outcome of an answer to a request for `common.urls.URLS[url]`. Never raises on an answer's content."""
    if 200 <= status < 300:
        try:
            return _READERS[url](body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return Outcome(Kind.RETRY, "unreadable_answer")
    if 400 <= status < 500 and status not in _PASSING_4XX:
        return _ERROR
    return Outcome(Kind.RETRY, f"http_{status}")


def _read_completion(body: bytes) -> Outcome:
    answer = _completion(body)
    for choice in answer.choices:
        if choice.finish_reason not in _NORMAL_FINISH:
            return Outcome(Kind.RETRY, _finish(choice.finish_reason))
    if not answer.choices:
        return Outcome(Kind.RETRY, "no_choices")
    usage = answer.usage
    if usage is None:
        return Outcome(_OUTPUT)
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details is not None else 0
    return Outcome(_OUTPUT, None, usage.prompt_tokens or 0, usage.completion_tokens or 0, cached)


def _read_response(body: bytes) -> Outcome:
    answer = _response(body)
    if answer.status != "completed":
        reason = answer.incomplete_details.reason if answer.incomplete_details is not None else None
        if answer.status != "incomplete" or reason not in _NORMAL_INCOMPLETE:
            return Outcome(Kind.RETRY, _finish("abort" if answer.status == "cancelled" else answer.status))
    usage = answer.usage
    if usage is None:
        return Outcome(_OUTPUT)
    details = usage.input_tokens_details
    cached = (details.cached_tokens or 0) if details is not None else 0
    return Outcome(_OUTPUT, None, usage.input_tokens or 0, usage.output_tokens or 0, cached)


def _read_message(body: bytes) -> Outcome:
    answer = _message(body)
    if answer.stop_reason not in _NORMAL_STOP:
        return Outcome(Kind.RETRY, _finish(answer.stop_reason))
    usage = answer.usage
    if usage is None:
        return Outcome(_OUTPUT)
    # Anthropic counts cached tokens apart from `input_tokens`; everywhere else they are part of the prompt's.
    cached = usage.cache_read_input_tokens or 0
    prompt = (usage.input_tokens or 0) + cached + (usage.cache_creation_input_tokens or 0)
    return Outcome(_OUTPUT, None, prompt, usage.output_tokens or 0, cached)


def _read_pooled(body: bytes) -> Outcome:
    usage = _pooled(body).usage
    if usage is None:
        return Outcome(_OUTPUT)
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details is not None else 0
    return Outcome(_OUTPUT, None, usage.prompt_tokens or 0, 0, cached)


def _finish(reason: str | None) -> str:
    # The engine's word ends up in messages for people; anything long is not one of its reasons.
    return f"finish_{reason[:32]}" if reason else "finish_none"


_READERS = {
    URL_CODE["/v1/chat/completions"]: _read_completion,
    URL_CODE["/v1/completions"]: _read_completion,
    URL_CODE["/v1/responses"]: _read_response,
    URL_CODE["/v1/embeddings"]: _read_pooled,
    URL_CODE["/v1/score"]: _read_pooled,
    URL_CODE["/v1/rerank"]: _read_pooled,
    URL_CODE["/v1/messages"]: _read_message,
}
