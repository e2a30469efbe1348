"""A batch as the store holds it: what intake wrote (`Batch`, immutable), what the coordinator says (`Status`).

Layout below `batches/<id>/`:

- `batch.json`: `Batch`; on an object store written last, so a batch without it does not exist.
- `rows`: the MessagePack `Row`s in planned order, one after the other.
- `plan`: one fixed-width record a position (`common.plan`): where its row starts, how long it is, its index, its cost,
  what it shares with the one before it.
- `invalid`, `invalid.idx`: with `--skip-invalid`, ready-made error lines, one record each (`producers.invalid_file`).
- `status.json`: `Status`, written by the coordinator alone.
- `output.jsonl`, `errors.jsonl`, `summary.json`: the outputs.

Besides: `active/<shard>/<id>` (empty; present while there is work), `control/<id>/<ulid>.json` (`Command`),
`coordinator/<shard>.json` (`Heartbeat`), `epochs/<shard>/<n>`.
"""

from __future__ import annotations

import contextlib

import msgspec

from common.errors import Damaged, UsageError
from common.ids import is_batch_id
from common.messages import CacheFacts, Usage
from common.plan import Window as Window  # noqa: PLC0414 (read from here by the batch's side)
from common.store import Store


class Input(msgspec.Struct, frozen=True):
    """Where the batch came from: a name for people, bytes as read (before decompression), blake3 of them."""

    name: str
    bytes: int
    digest: str


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What was submitted."""

    id: str
    model: str
    created_at: float
    shard: int
    input: Input
    #: All requests, the invalid ones included (indexes run from 0 to this).
    requests: int
    #: Requests to answer (positions run from 0 to this).
    planned: int
    #: Requests that are error results from the start (`--skip-invalid`).
    invalid: int
    #: Estimated cost of all planned requests, in tokens.
    cost: int
    windows: list[Window]
    name: str | None = None
    metadata: dict[str, str] = {}
    timeout_s: float = 600.0
    cache: str = "off"
    #: Same key, same batch: a repeated submit returns the first one's id.
    idempotency_key: str | None = None
    #: Whose work it is: tenants share a model version's workers by the weights of `scheduler.tenants`.
    tenant: str = "default"
    #: One of `PRIORITIES`, as submitted; the coordinator may have been told another since (`Status.priority`).
    priority: str = "normal"
    #: Unix seconds: what is unanswered then becomes `batch_expired`; None: never.
    expires_at: float | None = None
    #: Unix seconds before which nothing is sent.
    not_before: float | None = None
    #: Daily window outside which nothing is sent, as `producers.schedule.run_window` reads it.
    run_between: str | None = None
    #: The batch whose failed, expired and cancelled requests these are.
    retry_of: str | None = None


#: From the least to the most urgent.
PRIORITIES = ("low", "normal", "high", "urgent")


#: Statuses after which nothing changes any more.
FINAL = frozenset({"completed", "failed", "cancelled", "expired"})


class Counts(msgspec.Struct):
    """OpenAI's request_counts."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Status(msgspec.Struct, kw_only=True):
    """Where a batch stands (`status` is one of the OpenAI Batch API's, plus `queued`)."""

    id: str
    status: str = "queued"
    #: Shown beside the status: `no_workers`, `no_coordinator`, `disk_full`, … None: all is well.
    reason: str | None = None
    #: One of `PRIORITIES`, by the last word on it; empty: as submitted.
    priority: str = ""
    paused: bool = False
    #: Beside the reason `scheduled`: Unix seconds from which on requests are sent.
    opens_at: float | None = None
    model: str = ""
    name: str | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    #: Sent to workers and not answered yet.
    in_flight: int = 0
    #: The share of the work that is answered, 0 to 1: long requests count for more than short ones.
    work_done: float = 0.0
    #: Rows sent more than once (retries and losses).
    resent: int = 0
    usage: Usage = msgspec.field(default_factory=Usage)
    #: The server of the result cache as its workers last saw it, at the latest when the batch ended; None: not used.
    cache: CacheFacts | None = None
    created_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    updated_at: float = 0.0


class Command(msgspec.Struct, kw_only=True, frozen=True):
    """What a person asks the coordinator to do with a batch: `cancel`, `pause`, `resume` or `reprioritize`."""

    command: str
    at: float
    by: str = ""
    #: For `reprioritize`: one of `PRIORITIES`.
    priority: str | None = None


class Heartbeat(msgspec.Struct, kw_only=True, frozen=True):
    """The active coordinator of a shard."""

    epoch: int
    host: str
    pid: int
    at: float


def folder(batch_id: str) -> str:
    """The batch's folder in the store; `UsageError` for what is no batch id."""
    if not is_batch_id(batch_id):
        raise UsageError(f"'{batch_id}' is not a batch id (batch_…); `producers list` shows them")
    return f"batches/{batch_id}"


def read_batch(store: Store, batch_id: str) -> Batch:
    """The batch; `UsageError` when there is none, `Damaged` when its file is not what intake wrote."""
    path = f"{folder(batch_id)}/batch.json"
    try:
        raw = store.read(path)
    except FileNotFoundError:
        raise UsageError(f"no batch {batch_id} in {store.url}; `producers list` shows what is there") from None
    try:
        batch = msgspec.json.decode(raw, type=Batch)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise Damaged(f"{store.url}/{path}: is damaged: {exc}; submit the file again") from None
    if batch.id != batch_id or min(batch.planned, batch.invalid, batch.shard) < 0 or batch.planned > batch.requests:
        raise Damaged(f"{store.url}/{path}: is damaged: it is not what was submitted as {batch_id}; submit it again")
    return batch


class _Told(msgspec.Struct):
    """What a batch's `summary.json` says of its end."""

    status: str
    completed: int
    failed: int
    resent: int
    #: By name: `Usage` itself is an array where messages carry it.
    usage: dict[str, int]
    timings: dict[str, float | None]
    cache: CacheFacts | None = None


def status_path(batch: Batch) -> str:
    """Where its status is in the store."""
    return f"{folder(batch.id)}/status.json"


def read_status(store: Store, batch: Batch) -> Status:
    """The batch's status; `queued` until the coordinator has taken it up.

    Of a batch that has ended and whose status file is gone or damaged, it is what `summary.json` says, with a reason
    that says so. `Damaged` when that cannot be read either.
    """
    path = status_path(batch)
    try:
        return _status(store, path)
    except FileNotFoundError:
        ended = _by_summary(store, batch)
        if ended is None:
            return Status(
                id=batch.id,
                model=batch.model,
                name=batch.name,
                request_counts=Counts(total=batch.requests, failed=batch.invalid),
                created_at=batch.created_at,
                updated_at=batch.created_at,
            )
    except Damaged:
        ended = _by_summary(store, batch)
        if ended is None:
            raise
    # Its last status may have come, and its marker gone, between the two looks.
    with contextlib.suppress(FileNotFoundError, Damaged):
        return _status(store, path)
    return ended


def _status(store: Store, path: str) -> Status:
    raw = store.read(path)
    try:
        return msgspec.json.decode(raw, type=Status)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise Damaged(
            f"{store.url}/{path}: is damaged: {exc}; while the batch runs its coordinator writes it anew"
        ) from None


def _by_summary(store: Store, batch: Batch) -> Status | None:
    """The end of a batch as its summary has it; None when it is unfinished, or that file cannot be read."""
    try:
        told = msgspec.json.decode(store.read(f"{folder(batch.id)}/summary.json"), type=_Told)
    except (FileNotFoundError, msgspec.DecodeError, ValueError):
        return None
    if told.status not in FINAL or store.exists(f"active/{batch.shard}/{batch.id}"):
        return None
    finished_at = told.timings.get("finished_at")
    return Status(
        id=batch.id,
        status=told.status,
        reason="its status.json is missing or damaged: this is by its summary.json",
        model=batch.model,
        name=batch.name,
        request_counts=Counts(batch.requests, told.completed, told.failed),
        resent=told.resent,
        usage=Usage(**{name: told.usage.get(name, 0) for name in Usage.__struct_fields__}),
        cache=told.cache,
        created_at=batch.created_at,
        started_at=told.timings.get("started_at"),
        finished_at=finished_at,
        updated_at=finished_at or batch.created_at,
    )
