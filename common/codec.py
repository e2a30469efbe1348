"""The signed envelope of every queue message: `BM1 | key id | keyed blake3 | zstd(MessagePack)`.

The mac covers the purpose, the queue and the compressed payload (which holds batch, slices and `not_after`), so a
message can be moved neither to another queue nor to another use. Each direction has its own key: a worker that leaks
its result key cannot forge work, and a producer cannot forge answers.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Mapping

import zstandard
from blake3 import blake3

from common.errors import BadMessage

_MAGIC = b"BM1"
_MAC = 32

#: Largest payload after decompression; a frame that announces more is refused before it is unpacked.
MAX_PAYLOAD = 64 << 20

PURPOSE_CHUNK = "chunk"
PURPOSE_RESULTS = "results"


class Codec:
    """Seals and opens payloads of one direction. Thread-safe.

    `keys` maps key ids to 32-byte keys; `key_id` names the one to sign with, so that keys rotate by adding the new one
    everywhere first.
    """

    def __init__(self, purpose: str, keys: Mapping[str, bytes], key_id: str, level: int = 1) -> None:
        if key_id not in keys:
            raise ValueError(f"no key named {key_id!r} for {purpose}")
        for name, key in keys.items():
            if len(key) != 32:
                raise ValueError(f"key {name!r} for {purpose} has {len(key)} bytes, not 32")
        self._purpose = purpose.encode()
        self._keys = dict(keys)
        self._key_id = key_id.encode()
        self._level = level
        self._local = threading.local()

    def seal(self, queue: str, payload: bytes) -> bytes:
        """Compress and sign `payload` for `queue`."""
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = zstandard.ZstdCompressor(level=self._level)
        frame = compressor.compress(payload)
        mac = self._mac(self._keys[self._key_id.decode()], queue, frame)
        return b"".join((_MAGIC, bytes((len(self._key_id),)), self._key_id, mac, frame))

    def open(self, queue: str, blob: bytes) -> bytes:
        """The payload of a message taken from `queue`; `BadMessage` when it is not genuine or too large."""
        if len(blob) < len(_MAGIC) + 1 + _MAC or blob[:3] != _MAGIC:
            raise BadMessage("not a Batchmill message")
        at = 4 + blob[3]
        key_id = blob[4:at].decode("ascii", "replace")
        key = self._keys.get(key_id)
        if key is None:
            raise BadMessage("signed with an unknown key")
        mac, frame = blob[at : at + _MAC], blob[at + _MAC :]
        if not hmac.compare_digest(mac, self._mac(key, queue, frame)):
            raise BadMessage("signature does not fit")
        try:
            size = zstandard.frame_content_size(frame)
            if size < 0 or size > MAX_PAYLOAD:
                raise BadMessage(f"payload of {size} bytes, at most {MAX_PAYLOAD} are taken")
            decompressor = getattr(self._local, "decompressor", None)
            if decompressor is None:
                decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
            payload: bytes = decompressor.decompress(frame, max_output_size=MAX_PAYLOAD)
        except zstandard.ZstdError:
            raise BadMessage("payload does not decompress") from None
        return payload

    def _mac(self, key: bytes, queue: str, frame: bytes) -> bytes:
        head = self._purpose + b"\0" + queue.encode() + b"\0"
        return blake3(head, key=key).update(frame).digest()
