"""Request bodies for every endpoint."""

from __future__ import annotations

import json
from typing import Any

#: Endpoints of a model that generates text, each with the field that bounds its answer.
GENERATE = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
POOLING = ("/v1/embeddings", "/v1/score", "/v1/rerank")


def body(url: str, text: str, limit: int = 16, model: str | None = None, **more: Any) -> bytes:
    """A greedy request to `url` about `text`."""
    fields: dict[str, Any] = {}
    if url in ("/v1/chat/completions", "/v1/messages"):
        fields["messages"] = [{"role": "user", "content": text}]
    elif url == "/v1/completions":
        fields["prompt"] = text
    elif url in ("/v1/responses", "/v1/embeddings"):
        fields["input"] = text
    elif url == "/v1/score":
        fields |= {"text_1": text, "text_2": [text, "something else"]}
    elif url == "/v1/rerank":
        fields |= {"query": text, "documents": [text, "something else"]}
    if url in GENERATE:
        fields |= {"temperature": 0, GENERATE[url]: limit}
    if model is not None:
        fields["model"] = model
    return json.dumps(fields | more).encode()
