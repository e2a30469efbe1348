"""The echo engine's answers: bodies in the shape of vLLM's, a function of the request alone. Pure.

The hot path (chat) splices the last message's JSON string into a template without decoding it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import xxhash

from workers.engine.base import Answer

#: Bytes of JSON text taken for one token.
_BYTES_A_TOKEN = 4
#: Numbers in an embedding.
_DIMENSIONS = 8

_encode = msgspec.json.encode


class _Turn(msgspec.Struct, gc=False):
    role: str
    content: msgspec.Raw = msgspec.Raw(b'""')


class _Chat(msgspec.Struct, gc=False):
    messages: list[_Turn]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None


class _Completion(msgspec.Struct, gc=False):
    prompt: str | list[Any]
    max_tokens: int | None = None


class _Responses(msgspec.Struct, gc=False):
    input: msgspec.Raw
    max_output_tokens: int | None = None


class _Embeddings(msgspec.Struct, gc=False):
    input: str | list[Any]


class _Score(msgspec.Struct, gc=False):
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None


class _Rerank(msgspec.Struct, gc=False):
    query: str
    documents: list[str]
    top_n: int | None = None


_chat = msgspec.json.Decoder(_Chat).decode
_completion = msgspec.json.Decoder(_Completion).decode
_responses = msgspec.json.Decoder(_Responses).decode
_embeddings = msgspec.json.Decoder(_Embeddings).decode
_score = msgspec.json.Decoder(_Score).decode
_rerank = msgspec.json.Decoder(_Rerank).decode


class Bodies:
    """Answers in the name of one model; prompts over `max_model_len` tokens (0: no bound) are refused as vLLM does."""

    def __init__(self, model: str, max_model_len: int = 0) -> None:
        self._model = _encode(model)
        self._max_model_len = max_model_len
        self._makers: dict[str, Callable[[bytes], Answer]] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completion,
            "/v1/responses": self.responses,
            "/v1/embeddings": self.embeddings,
            "/v1/score": self.score,
            "/v1/rerank": self.rerank,
            "/v1/messages": self.messages,
        }

    def answer(self, url: str, body: bytes) -> Answer:
        """The answer to a request; 400 for a body that does not fit its url, 404 for another url."""
        maker = self._makers.get(url)
        if maker is None:
            return error(404, "Not Found", "NotFoundError")
        try:
            return maker(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            # msgspec names the field and the type, never the value.
            return error(400, str(exc), "BadRequestError")

    def chat(self, body: bytes) -> Answer:
        """/v1/chat/completions."""
        request = _chat(body)
        limit = request.max_completion_tokens or request.max_tokens
        prompt = len(body) // _BYTES_A_TOKEN
        refusal = self._refuse(prompt, limit)
        if refusal is not None:
            return refusal
        content = bytes(request.messages[-1].content) if request.messages else b'""'
        text, tokens, finish = _echo(content, limit)
        choice = b'{"index":%d,"message":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":"%b"}'
        if request.n is None or request.n <= 1:
            choices = choice % (0, text, finish)
        else:
            choices = b",".join(choice % (i, text, finish) for i in range(request.n))
            tokens *= request.n
        return Answer(
            200,
            b'{"id":"chatcmpl-%016x","object":"chat.completion","created":0,"model":%b,"choices":[%b],"usage":'
            b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":0}}}'
            % (xxhash.xxh3_64_intdigest(body), self._model, choices, prompt, prompt + tokens, tokens),
        )

    def completion(self, body: bytes) -> Answer:
        """/v1/completions: one choice a prompt."""
        request = _completion(body)
        raw = request.prompt
        prompts = raw if isinstance(raw, list) and raw and not isinstance(raw[0], int) else [raw]
        prompt = len(body) // _BYTES_A_TOKEN
        refusal = self._refuse(prompt, request.max_tokens)
        if refusal is not None:
            return refusal
        total, choices = 0, []
        for i, one in enumerate(prompts):
            text, tokens, finish = _echo(_encode(one if isinstance(one, str) else "tokens"), request.max_tokens)
            total += tokens
            choices.append(b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":"%b"}' % (i, text, finish))
        return Answer(
            200,
            b'{"id":"cmpl-%016x","object":"text_completion","created":0,"model":%b,"choices":[%b],"usage":'
            b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":0}}}'
            % (xxhash.xxh3_64_intdigest(body), self._model, b",".join(choices), prompt, prompt + total, total),
        )

    def responses(self, body: bytes) -> Answer:
        """/v1/responses."""
        request = _responses(body)
        prompt = len(body) // _BYTES_A_TOKEN
        refusal = self._refuse(prompt, request.max_output_tokens)
        if refusal is not None:
            return refusal
        text, tokens, finish = _echo(bytes(request.input), request.max_output_tokens)
        full = finish == b"stop"
        digest = xxhash.xxh3_64_intdigest(body)
        return Answer(
            200,
            b'{"id":"resp_%016x","object":"response","created_at":0,"status":"%b","incomplete_details":%b,"model":%b,'
            b'"output":[{"id":"msg_%016x","type":"message","role":"assistant","status":"completed","content":'
            b'[{"type":"output_text","text":%b,"annotations":[]}]}],"usage":{"input_tokens":%d,"input_tokens_details":'
            b'{"cached_tokens":0},"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":%d}}'
            % (
                digest,
                b"completed" if full else b"incomplete",
                b"null" if full else b'{"reason":"max_output_tokens"}',
                self._model,
                digest,
                text,
                prompt,
                tokens,
                prompt + tokens,
            ),
        )

    def embeddings(self, body: bytes) -> Answer:
        """/v1/embeddings: one vector an input."""
        raw = _embeddings(body).input
        inputs = raw if isinstance(raw, list) and raw and not isinstance(raw[0], int) else [raw]
        prompt = len(body) // _BYTES_A_TOKEN
        refusal = self._refuse(prompt, None)
        if refusal is not None:
            return refusal
        data = b",".join(
            b'{"index":%d,"object":"embedding","embedding":%b}' % (i, _vector(_encode(one)))
            for i, one in enumerate(inputs)
        )
        return Answer(
            200,
            b'{"id":"embd-%016x","object":"list","created":0,"model":%b,"data":[%b],"usage":{"prompt_tokens":%d,'
            b'"total_tokens":%d,"completion_tokens":0,"prompt_tokens_details":null}}'
            % (xxhash.xxh3_64_intdigest(body), self._model, data, prompt, prompt),
        )

    def score(self, body: bytes) -> Answer:
        """/v1/score: one score a pair."""
        request = _score(body)
        first, second = request.text_1 or request.queries, request.text_2 or request.documents
        if not first or not second:
            return error(400, "text_1 and text_2 are needed", "BadRequestError")
        lefts, rights = _listed(first), _listed(second)
        if len(lefts) == 1:
            lefts = lefts * len(rights)
        prompt = len(body) // _BYTES_A_TOKEN
        data = b",".join(
            b'{"index":%d,"object":"score","score":%b}' % (i, _number(f"{a}\0{b}".encode()))
            for i, (a, b) in enumerate(zip(lefts, rights, strict=False))
        )
        return Answer(
            200,
            b'{"id":"score-%016x","object":"list","created":0,"model":%b,"data":[%b],"usage":{"prompt_tokens":%d,'
            b'"total_tokens":%d,"completion_tokens":0,"prompt_tokens_details":null}}'
            % (xxhash.xxh3_64_intdigest(body), self._model, data, prompt, prompt),
        )

    def rerank(self, body: bytes) -> Answer:
        """/v1/rerank: documents, the most relevant first."""
        request = _rerank(body)
        prompt = len(body) // _BYTES_A_TOKEN
        scored = [(_number(f"{request.query}\0{d}".encode()), i, d) for i, d in enumerate(request.documents)]
        scored.sort(key=lambda s: (-float(s[0]), s[1]))
        results = b",".join(
            b'{"index":%d,"document":{"text":%b},"relevance_score":%b}' % (i, _encode(d), score)
            for score, i, d in scored[: request.top_n or None]
        )
        return Answer(
            200,
            b'{"id":"rerank-%016x","model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d},"results":[%b]}'
            % (xxhash.xxh3_64_intdigest(body), self._model, prompt, prompt, results),
        )

    def messages(self, body: bytes) -> Answer:
        """/v1/messages, in Anthropic's shape."""
        request = _chat(body)
        prompt = len(body) // _BYTES_A_TOKEN
        refusal = self._refuse(prompt, request.max_tokens)
        if refusal is not None:
            return refusal
        content = bytes(request.messages[-1].content) if request.messages else b'""'
        text, tokens, finish = _echo(content, request.max_tokens)
        return Answer(
            200,
            b'{"id":"msg_%016x","type":"message","role":"assistant","content":[{"type":"text","text":%b}],"model":%b,'
            b'"stop_reason":"%b","stop_sequence":null,"usage":{"input_tokens":%d,"output_tokens":%d}}'
            % (
                xxhash.xxh3_64_intdigest(body),
                text,
                self._model,
                b"end_turn" if finish == b"stop" else b"max_tokens",
                prompt,
                tokens,
            ),
        )

    def _refuse(self, prompt: int, limit: int | None) -> Answer | None:
        if limit is not None and limit < 1:
            return error(400, f"max_tokens must be at least 1, got {limit}.", "BadRequestError")
        if self._max_model_len and prompt > self._max_model_len:
            return error(
                400,
                f"This model's maximum context length is {self._max_model_len} tokens. However, your request has "
                f"{prompt} input tokens. Please reduce the length of the input messages.",
                "BadRequestError",
            )
        return None


def error(status: int, message: str, kind: str) -> Answer:
    """An error body as vLLM writes it."""
    return Answer(status, _encode({"error": {"message": message, "type": kind, "param": None, "code": status}}))


def aborted(model: str) -> Answer:
    """What vLLM answers when its core was asked to stop: status 200, finish reason `abort`."""
    return Answer(
        200,
        b'{"id":"chatcmpl-0","object":"chat.completion","created":0,"model":%b,"choices":[{"index":0,"message":'
        b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":"abort"}],"usage":{"prompt_tokens":1,'
        b'"total_tokens":1,"completion_tokens":0}}' % _encode(model),
    )


def _echo(content: bytes, limit: int | None) -> tuple[bytes, int, bytes]:
    """(JSON string, tokens, finish reason) out of the JSON of what was said last."""
    if content[:1] != b'"':
        content = _encode(content.decode("utf-8", "replace"))
    tokens = (len(content) + 4) // _BYTES_A_TOKEN
    if limit is None or tokens <= limit:
        return b'"echo: ' + content[1:], tokens, b"stop"
    if content.isascii() and b"\\" not in content:
        return b'"%b"' % (b"echo: " + content[1:-1])[: limit * _BYTES_A_TOKEN], limit, b"length"
    # Cut where characters are whole: decode, cut, encode.
    text: str = msgspec.json.decode(content, type=str)
    return _encode(f"echo: {text}"[: limit * _BYTES_A_TOKEN]), limit, b"length"


def _listed(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]


def _vector(raw: bytes) -> bytes:
    return b"[" + b",".join(_number(raw, seed) for seed in range(_DIMENSIONS)) + b"]"


def _number(raw: bytes, seed: int = 0) -> bytes:
    # 32 bits are written exactly by six digits, so the same bytes come out everywhere.
    return b"%.6f" % (xxhash.xxh32_intdigest(raw, seed) / 2**32)
