"""The endpoints a request may name, and how the short form finds its own.

The order is a wire format: a row carries the position in `URLS`, so entries are only ever appended.
"""

from __future__ import annotations

URLS: tuple[str, ...] = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/messages",
)

URL_CODE: dict[str, int] = {url: code for code, url in enumerate(URLS)}

#: Short form (no `url`): the first body field found here decides.
SHORT_FORM: tuple[tuple[str, str], ...] = (
    ("messages", "/v1/chat/completions"),
    ("prompt", "/v1/completions"),
    ("input", "/v1/embeddings"),
)
