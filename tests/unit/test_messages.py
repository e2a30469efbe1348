"""What crosses a queue: nothing forged, moved, oversized or of another version gets through."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from common import lines, messages, serializer
from common.codec import MAX_PAYLOAD, PURPOSE_CHUNK, PURPOSE_RESULTS, Codec
from common.errors import BadMessage
from common.ids import is_batch_id, new_batch_id, result_id
from common.messages import Chunk, Kind, Part, Results, Row, Slice, Usage

KEY = bytes(range(32))
codec = Codec(PURPOSE_CHUNK, {"k1": KEY}, "k1")


@given(st.binary(max_size=2000), st.text(max_size=20))
def test_what_is_sealed_opens_again(payload: bytes, queue: str) -> None:
    assert codec.open(queue, codec.seal(queue, payload)) == payload


@given(st.data())
def test_a_changed_bit_anywhere_is_refused(data: st.DataObject) -> None:
    blob = bytearray(codec.seal("q", b"payload" * 20))
    at = data.draw(st.integers(0, len(blob) - 1))
    blob[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadMessage):
        codec.open("q", bytes(blob))


@given(st.binary(max_size=200))
def test_rubbish_is_refused_and_nothing_else_raised(blob: bytes) -> None:
    with pytest.raises(BadMessage):
        codec.open("q", blob)


def test_a_message_cannot_be_moved() -> None:
    blob = codec.seal("infer.a.1", b"x")
    with pytest.raises(BadMessage, match="signature"):
        codec.open("infer.b.1", blob)
    with pytest.raises(BadMessage, match="signature"):
        Codec(PURPOSE_RESULTS, {"k1": KEY}, "k1").open("infer.a.1", blob)


def test_keys_rotate() -> None:
    new = Codec(PURPOSE_CHUNK, {"k1": KEY, "k2": b"n" * 32}, "k2")
    assert new.open("q", codec.seal("q", b"old")) == b"old"
    with pytest.raises(BadMessage, match="unknown key"):
        codec.open("q", new.seal("q", b"new"))
    with pytest.raises(ValueError, match="32"):
        Codec(PURPOSE_CHUNK, {"k1": b"short"}, "k1")


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    frame = zstandard.ZstdCompressor().compress(b"\0" * (MAX_PAYLOAD + 1))
    blob = b"BM1\x02k1" + codec._mac(KEY, "q", frame) + frame
    with pytest.raises(BadMessage, match="at most"):
        codec.open("q", blob)


def chunk(**changes: object) -> Chunk:
    row = msgspec.msgpack.encode(Row(pos=3, index=7, custom_id=b'"a"', url=0, body=b"{}"))
    fields: dict[str, object] = {
        "v": messages.VERSION,
        "id": "chunk_1",
        "model": "m@1",
        "reply_to": "results.0",
        "epoch": 1,
        "sent_at": 0.0,
        "not_after": 0.0,
        "timeout_s": 1.0,
        "cache": "off",
        "slices": [Slice("batch_1", 3, 4, 1, messages.join_rows([row, row]))],
    }
    return Chunk(**(fields | changes))  # type: ignore[arg-type]


def test_a_chunk_keeps_its_rows() -> None:
    back = messages.decode_chunk(messages.encode(chunk()))
    rows = messages.decode_rows(back.slices[0].rows)
    assert [(r.pos, r.index, r.custom_id, r.body) for r in rows] == [(3, 7, b'"a"', b"{}")] * 2


def test_another_version_is_refused() -> None:
    with pytest.raises(BadMessage, match="version 9"):
        messages.decode_chunk(messages.encode(chunk(v=9)))


@given(st.binary(max_size=100))
def test_a_payload_that_is_no_message_is_refused(payload: bytes) -> None:
    for decode in (messages.decode_chunk, messages.decode_results):
        with pytest.raises(BadMessage):
            decode(payload)


def results(part: Part) -> bytes:
    return messages.encode(Results(messages.VERSION, "chunk_1", "m@1", "node", 0, True, [part]))


def columns(sizes: list[int], lines_: bytes) -> Part:
    n = len(sizes)
    return Part(
        "batch_1",
        np.arange(n, dtype="<u4").tobytes(),
        bytes([Kind.OUTPUT] * n),
        np.array(sizes, dtype="<u4").tobytes(),
        lines_,
        Usage(),
    )


def test_columns_that_disagree_are_refused() -> None:
    good = messages.decode_results(results(columns([1, 2], b"abb")))
    assert messages.positions(good.parts[0]).tolist() == [0, 1]
    assert messages.lengths(good.parts[0]).tolist() == [1, 2]
    for bad in (columns([1, 2], b"abbb"), columns([1], b""), Part("b", b"\0", b"\1", b"\0\0\0\0", b"", Usage())):
        with pytest.raises(BadMessage):
            messages.decode_results(results(bad))


@given(st.one_of(st.binary(), st.text()), st.booleans())
def test_the_kombu_decoder_is_total(data: bytes | str, as_view: bool) -> None:
    (blob,), kwargs, embed = serializer.loads(memoryview(data) if as_view and isinstance(data, bytes) else data)
    assert isinstance(blob, bytes)
    assert kwargs == {}
    assert embed == {}


def test_the_kombu_encoder_takes_a_blob_bare_or_as_an_argument() -> None:
    assert serializer.dumps(b"x") == serializer.dumps(((b"x",), {}, {})) == b"x"
    with pytest.raises(TypeError):
        serializer.dumps((("text",), {}, {}))


def test_result_lines_are_openais() -> None:
    batch_id = new_batch_id()
    assert is_batch_id(batch_id)
    marks = lines.encode_marks("m@1", attempts=2, cached=True)
    answer = json.loads(lines.answer_line(batch_id, 5, b'"c\\u00e9"', 200, b'{"a": 1}', marks))
    assert answer == {
        "id": result_id(batch_id, 5),
        "custom_id": "cé",
        "response": {"status_code": 200, "request_id": answer["response"]["request_id"], "body": {"a": 1}},
        "error": None,
        "batchmill": {"model": "m@1", "attempts": 2, "cached": True},
    }
    error = json.loads(lines.error_line(batch_id, 5, b'"c"', "timeout", 'a "quoted" reason\n', marks))
    assert error["response"] is None
    assert error["error"] == {"code": "timeout", "message": 'a "quoted" reason\n'}


@pytest.mark.parametrize("text", ["", "batch_", "batch_../../etc", "batch_" + "A" * 26, "../batch_" + "0" * 26])
def test_only_well_formed_ids_become_paths(text: str) -> None:
    assert not is_batch_id(text)
