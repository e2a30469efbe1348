"""Under which key an answer is kept, and which requests have one at all. Pure.

A request has a key only when its answer is determined (`common.determined`); a model whose entry says `cache: all`
keeps sampled answers too. Two requests have the same key when they differ only in what cannot change the answer.
"""

from __future__ import annotations

import msgspec
from blake3 import blake3

from common.determined import canonical, determined, may_be_determined, read
from common.urls import URLS

#: Bytes of a key: 16 hex digits that stand for the model version, then a digest of everything.
TAG_BYTES = 16
KEY_BYTES = TAG_BYTES + 32

_encode = msgspec.json.Encoder().encode


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
        if not self._everything and not may_be_determined(url, body):
            return None
        try:
            fields = read(body)
            if not isinstance(fields, dict) or not (self._everything or determined(url, fields)):
                return None
            what = _encode(["v3", self.model, self.fingerprint, tenant, URLS[url], canonical(url, fields)])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        return self._tag + blake3(what).digest()

    def determined(self, url: int, body: bytes) -> bool:
        """Whether a request that has a key has one answer; always, but where sampled answers are kept too."""
        return not self._everything or determined(url, read(body))


def tag(model_version: str) -> bytes:
    """What the keys of a model version begin with, so that they can be found without knowing more."""
    return blake3(model_version.encode()).hexdigest(length=TAG_BYTES // 2).encode()
