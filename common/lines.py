"""Result lines: the bytes of one line of `output.jsonl` or `errors.jsonl`.

The shape is OpenAI's batch output line. The engine's body is spliced in untouched; our own marks stand outside
`response.body` under `batchmill`, where OpenAI clients do not look. Every line ends with one newline and has no other.
"""

from __future__ import annotations

import functools

import msgspec

from common.ids import result_id


class Marks(msgspec.Struct, frozen=True, omit_defaults=True):
    """What we add to a line: the exact model version, how many attempts it took, and where the answer is from.

    `cached`: the result cache had it; false: it was asked in vain; None: it was not asked. `shared`: it was computed
    for an equal request at that moment. `fingerprint` stands for all that decides the engine's answers; lines of one
    fingerprint are comparable.
    """

    model: str
    attempts: int = 1
    cached: bool | None = None
    shared: bool = False
    fingerprint: str = ""


_encode = msgspec.json.encode

#: `id` is `common.ids.result_id`, spelt out here since this is done for every request.
_ANSWER = (
    b'{"id":"batch_req_%b_%d","custom_id":%b,"response":{"status_code":%d,"request_id":"req_%b_%d","body":%b},'
    b'"error":null,"batchmill":%b}\n'
)


@functools.lru_cache(1024)
def _key(batch_id: str) -> bytes:
    return batch_id.removeprefix("batch_").encode()


def answer_line(batch_id: str, index: int, custom_id: bytes, status: int, body: bytes, marks: bytes) -> bytes:
    """The line of a request that got an HTTP answer, of whatever status.

    `custom_id` is a JSON string literal, `body` a JSON document without a raw newline, `marks` an encoded `Marks`.
    """
    key = _key(batch_id)
    return _ANSWER % (key, index, custom_id, status, key, index, body, marks)


def error_line(batch_id: str, index: int, custom_id: bytes, code: str, message: str, marks: bytes) -> bytes:
    """The line of a request that never got an answer: `response` is null, `error` has a code and a reason."""
    return b'{"id":"%b","custom_id":%b,"response":null,"error":{"code":%b,"message":%b},"batchmill":%b}\n' % (
        result_id(batch_id, index).encode(),
        custom_id,
        _encode(code),
        _encode(message),
        marks,
    )


def encode_marks(
    model: str, attempts: int = 1, *, cached: bool | None = None, shared: bool = False, fingerprint: str = ""
) -> bytes:
    """Encoded `Marks`; callers keep the bytes, since most lines of a chunk share them."""
    return _encode(Marks(model=model, attempts=attempts, cached=cached, shared=shared, fingerprint=fingerprint))
