"""What another service asks for with the task `batchmill.submit`, and what it is answered. Pure.

The task is a plain Celery one (JSON, protocol 2), so that a service needs nothing of ours to send it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from common.errors import Unreachable, UsageError
from common.messages import TASK_SUBMIT
from producers.intake import Options

#: Bytes of a message, at most: what is larger belongs into a file that the message names.
MAX_INLINE = 8 << 20
#: Characters of a task's id (Celery makes UUIDs).
MAX_TASK_ID = 255


class Submission(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The task's keyword arguments: the batch, either inline or by URL, and the options of `producers submit`."""

    #: The requests, each an object as a line of a batch file holds it.
    requests: list[msgspec.Raw] | None = None
    #: A batch file below one of `security.intake_urls`.
    url: str | None = None
    model: str | None = None
    name: str | None = None
    metadata: dict[str, str] = {}
    skip_invalid: bool = False
    max_tokens_default: int | None = None
    cache: str | None = None
    timeout_s: float | None = None
    idempotency_key: str | None = None
    priority: str | None = None
    tenant: str | None = None
    completion_window: str | None = None
    not_before: str | None = None
    run_between: str | None = None

    def options(self, task_id: str) -> Options:
        """The options; a message that is delivered twice makes one batch, so without a key the task's id is it."""
        return Options(
            model=self.model,
            name=self.name,
            metadata=self.metadata,
            skip_invalid=self.skip_invalid,
            max_tokens_default=self.max_tokens_default,
            cache=self.cache,
            timeout_s=self.timeout_s,
            idempotency_key=self.idempotency_key or f"celery task {task_id}",
            key_names_file=self.idempotency_key is not None,
            report_file=False,
            priority=self.priority,
            tenant=self.tenant,
            completion_window=self.completion_window,
            not_before=self.not_before,
            run_between=self.run_between,
        )

    def lines(self) -> bytes:
        """The inline requests as the file that they would be."""
        # A newline in JSON can only be white space.
        return b"".join(bytes(request).replace(b"\n", b" ") + b"\n" for request in self.requests or ())


_arguments = msgspec.json.Decoder(tuple[list[Any], msgspec.Raw, Any]).decode
_submission = msgspec.json.Decoder(Submission).decode


def read(body: bytes, urls: Sequence[str]) -> Submission:
    """The submission in the body of a task; `UsageError` says what is wrong with it, never what it holds."""
    if len(body) > MAX_INLINE:
        raise UsageError(f"the task has {len(body)} bytes, at most {MAX_INLINE} are taken: name a file with url=")
    try:
        args, kwargs, _ = _arguments(body)
        wish = _submission(kwargs)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"not the arguments of a submission: {exc}") from None
    if args:
        raise UsageError("the task takes keyword arguments only: requests= or url=, model=, …")
    if (wish.requests is None) == (wish.url is None):
        raise UsageError("the task takes either requests= or url=")
    if wish.url is not None and not allowed(wish.url, urls):
        raise UsageError("url: is not below one of security.intake_urls")
    return wish


def allowed(url: str, prefixes: Sequence[str]) -> bool:
    """True when `url` lies below one of the prefixes. A path on this machine counts by where it really leads."""
    if any(part == ".." for part in url.replace("\\", "/").split("/")) or "%2e" in url.lower():
        return False
    return any(_real(url).startswith(_real(prefix).rstrip("/") + "/") for prefix in prefixes)


def _real(url: str) -> str:
    return os.path.realpath(url.removeprefix("file://")) if "://" not in url or url.startswith("file://") else url


def success(task_id: str, batch_id: str) -> dict[str, Any]:
    """The reply with the batch's id, as Celery's result backends have it."""
    return {"task_id": task_id, "status": "SUCCESS", "result": batch_id, "traceback": None, "children": []}


def failure(task_id: str, exc: Exception) -> dict[str, Any]:
    """The reply that raises at the other end: a built-in exception, which needs nothing of ours there."""
    kind = "ConnectionError" if isinstance(exc, Unreachable) else "ValueError"
    reason = {"exc_type": kind, "exc_message": [str(exc)], "exc_module": "builtins"}
    return {"task_id": task_id, "status": "FAILURE", "result": reason, "traceback": None, "children": []}


def task_id_of(headers: Mapping[str, Any]) -> str | None:
    """The id of a `batchmill.submit` task; None for another message."""
    task_id = headers.get("id")
    if headers.get("task") != TASK_SUBMIT or not isinstance(task_id, str) or not 0 < len(task_id) <= MAX_TASK_ID:
        return None
    return task_id
