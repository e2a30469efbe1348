"""An answer as the cache's Redis holds it: `version | mac | zstd frame`.

The mac is keyed and covers key and frame: an answer that was damaged, moved to another request, or written by somebody
without the fleet's key for results is no answer. So a cache that strangers can write to loses its use, not our trust.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Sequence

import zstandard
from blake3 import blake3

from common.errors import UsageError
from common.settings import Settings

#: Bytes of an answer, at most; a larger one is not kept.
MAX_BODY = 4 << 20

_VERSION = b"\x01"
_MAC = 16
_HEAD = len(_VERSION) + _MAC
_CONTEXT = "batchmill 2026-01 values of the result cache"


class Values:
    """Packs and unpacks. Thread-safe. `keys`: 32 bytes each; the first one signs, all are accepted."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = [blake3(key, derive_key_context=_CONTEXT).digest() for key in keys]
        self._local = threading.local()

    def pack(self, key: bytes, body: bytes) -> bytes:
        """The value that stands for `body` under `key`."""
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = zstandard.ZstdCompressor(level=1)
        return self.seal(key, compressor.compress(body))

    def seal(self, key: bytes, frame: bytes) -> bytes:
        """The value out of a zstd frame."""
        return b"".join((_VERSION, _mac(self._keys[0], key, frame), frame))

    def frame(self, key: bytes, value: bytes) -> bytes | None:
        """The genuine zstd frame of a value; None when it is not."""
        if len(value) < _HEAD or value[:1] != _VERSION:
            return None
        mac, frame = value[1:_HEAD], value[_HEAD:]
        if not any(hmac.compare_digest(mac, _mac(known, key, frame)) for known in self._keys):
            return None
        return frame

    def unpack(self, key: bytes, value: bytes) -> bytes | None:
        """The answer; None when the value is not genuine."""
        frame = self.frame(key, value)
        return None if frame is None else self.inflate(frame)

    def inflate(self, frame: bytes) -> bytes | None:
        """The content of a zstd frame; None when it is damaged or too large."""
        try:
            if not 0 <= zstandard.frame_content_size(frame) <= MAX_BODY:
                return None
            decompressor = getattr(self._local, "decompressor", None)
            if decompressor is None:
                decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
            body: bytes = decompressor.decompress(frame, max_output_size=MAX_BODY)
        except zstandard.ZstdError:
            return None
        return body


def values(settings: Settings) -> Values:
    """With the fleet's keys for results; `UsageError` when there is none."""
    security = settings.security
    if not security.results_key:
        raise UsageError(
            "security.results_key is not set: the result cache signs what it holds with it "
            "(BATCHMILL_SECURITY_RESULTS_KEY_FILE, as the workers have it)"
        )
    return Values([bytes.fromhex(text) for text in (security.results_key, *security.old_results_keys.values())])


def _mac(known: bytes, key: bytes, frame: bytes) -> bytes:
    return blake3(key, key=known).update(frame).digest(length=_MAC)
