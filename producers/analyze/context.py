"""What has room in a model's context: which requests its engine will refuse, and how long answers can get. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import engine_arguments
from common.registry import ModelVersion
from common.settings import Settings
from common.urls import URL_CODE

#: Endpoints that write nothing, so that a prompt may fill the context.
_NO_ANSWER = frozenset(URL_CODE[url] for url in ("/v1/embeddings", "/v1/score", "/v1/rerank"))


def context_of(entry: ModelVersion, settings: Settings, folder: Path | None) -> int | None:
    """Tokens of a model's context: of its entry, else of the fleet, else of its `config.json`; None: not known."""
    said = engine_arguments.context(entry.engine, settings.inference.max_seq_len)
    if said is not None or folder is None:
        return said
    try:
        config = json.loads((folder / "config.json").read_bytes())
        # Scaled positions reach further, by rules of each kind of their own.
        own = None if config.get("rope_scaling") else config.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return own if isinstance(own, int) and own > 0 else None


def room(context: int, url: int, fields: dict[str, Any], prompts: Sequence[int], answer: int) -> int | None:
    """Tokens that the answers of a request can have; None when the engine refuses it.

    `prompts`: tokens of each of its prompts; `answer`: tokens that it asks for in all. As vLLM 0.32 has it: a prompt
    that leaves no token for its answer is refused (`renderers/params.py`, `v1/engine/input_processor.py`), an answer
    that is asked to be longer than what is left is cut (`get_max_tokens`).
    """
    if fields.get("truncate_prompt_tokens") is not None:
        # Its prompt is cut to what it says.
        return answer
    most = context if url in _NO_ANSWER else context - 1
    if any(tokens > most for tokens in prompts):
        return None
    several = fields.get("n")
    left = sum(context - tokens for tokens in prompts)
    return min(answer, left * (several if isinstance(several, int) else 1))
