"""Under which key an answer is kept, and which requests have one at all. Pure.

A request has a key only when its answer is determined (`common.determined`); a model whose entry says `cache: all`
keeps sampled answers too. Two requests have the same key when they differ only in what cannot change the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from blake3 import blake3

from common.determined import canonical, determined, may_be_determined, read
from common.urls import URL_CODE, URLS
from workers.cache.template_clock import Clock, clock_in

#: Bytes of a key: 16 hex digits that stand for the model version, then a digest of everything.
TAG_BYTES = 16
KEY_BYTES = TAG_BYTES + 32

#: The one endpoint whose prompts never go through a chat template.
_COMPLETIONS = URL_CODE["/v1/completions"]

_encode = msgspec.json.Encoder().encode


def local_day() -> str:
    """The day as a chat template sees it that is rendered in this process."""
    return time.strftime("%Y-%m-%d")


class Space:
    """The key space of one engine: all answers that the same weights with the same settings give.

    `fingerprint` stands for these (`workers.cache.fingerprint`); `everything`: sampled answers are kept too. `clock`:
    what the model's chat template prints of the time; `today`: None where answers are not today's, so that none whose
    template prints the date has a key.
    """

    def __init__(
        self,
        model: str,
        fingerprint: str,
        *,
        everything: bool = False,
        clock: Clock = Clock.NONE,
        today: Callable[[], str] | None = local_day,
    ) -> None:
        self.model = model
        self.fingerprint = fingerprint
        self._tag = tag(model)
        self._everything = everything
        self._clock = clock
        self._today = today

    def day(self) -> str:
        """Today; what was found under a key of another day may be of either."""
        return self._today() if self._today is not None else ""

    def key(self, tenant: str, url: int, body: bytes) -> bytes | None:
        """The key of a request (`KEY_BYTES`), or None where its answer is not determined. `url` indexes `URLS`."""
        if not self._everything and not may_be_determined(url, body):
            return None
        try:
            fields = read(body)
            if not isinstance(fields, dict) or not (self._everything or determined(url, fields)):
                return None
            asked: list[object] = ["v3", self.model, self.fingerprint, tenant, URLS[url], canonical(url, fields)]
            clock = self._clock_of(url, fields)
            if clock is not Clock.NONE:
                if self._today is None or (clock is Clock.MOMENT and not self._everything):
                    return None
                asked.append(self._today())
            what = _encode(asked)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        return self._tag + blake3(what).digest()

    def determined(self, url: int, body: bytes) -> bool:
        """Whether a request that has a key has one answer; always, but where sampled answers are kept too."""
        if not self._everything:
            return True
        fields = read(body)
        return determined(url, fields) and self._clock_of(url, fields) is not Clock.MOMENT

    def _clock_of(self, url: int, fields: dict[str, Any]) -> Clock:
        if url == _COMPLETIONS:
            return Clock.NONE
        own = fields.get("chat_template")
        return max(self._clock, clock_in(own)) if type(own) is str else self._clock


def tag(model_version: str) -> bytes:
    """What the keys of a model version begin with, so that they can be found without knowing more."""
    return blake3(model_version.encode()).hexdigest(length=TAG_BYTES // 2).encode()
