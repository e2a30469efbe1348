"""Identifiers. A batch's id sorts by creation time; a result's id follows from (batch, index) alone."""

from __future__ import annotations

import re

from ulid import ULID

_BATCH_ID = re.compile(r"^batch_[0-9a-hjkmnp-tv-z]{26}$")


def new_batch_id() -> str:
    """`batch_<ulid>`, lower case: unique, and sorted by time of creation."""
    return f"batch_{str(ULID()).lower()}"


def new_chunk_id() -> str:
    """`chunk_<ulid>`: also the Celery task id of the message that carries the chunk."""
    return f"chunk_{str(ULID()).lower()}"


def is_batch_id(text: str) -> bool:
    """True for a well-formed batch id: ids become paths, so nothing else may reach the store."""
    return _BATCH_ID.match(text) is not None


def result_id(batch_id: str, index: int) -> str:
    """The `id` of a result line: a function of (batch, index), so that assembling twice gives the same bytes."""
    return f"batch_req_{batch_id.removeprefix('batch_')}_{index}"
