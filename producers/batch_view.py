"""What people and programs are shown of a batch: one flat object, the same for the commands and the Python client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import msgspec

from common.errors import Damaged, UsageError
from common.ids import new_ulid, ulid_number, ulid_text
from common.messages import CacheFacts
from common.store import LocalStore, Store
from producers import batch as batches
from producers.batch import FINAL, Batch, Command, Heartbeat, Input, Status

#: A coordinator whose heartbeat is older than this many seconds counts as gone.
HEARTBEAT_S = 15.0


class RequestCounts(msgspec.Struct, frozen=True):
    """OpenAI's request_counts: `completed` and `failed` have their final answer, the rest of `total` does not."""

    total: int
    completed: int
    failed: int


class TokenUsage(msgspec.Struct, frozen=True):
    """Of all answers so far: tokens, and how many are from the result cache or were shared.

    `cache_misses` were computed after the cache was asked in vain; `cache_bytes` are of the answers that it gave;
    `shared` got what was computed for an equal request at that moment.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache_hits: int
    cache_misses: int = 0
    cache_bytes: int = 0
    shared: int = 0


class BatchView(msgspec.Struct, frozen=True, kw_only=True):
    """A batch and where it stands. Times are Unix seconds. The JSON of this is stable: fields are only ever added."""

    id: str
    object: str = "batch"
    status: str
    #: Why it does not move, where it does not (`no_workers`, `no_coordinator`, …), or why it failed; else null.
    reason: str | None
    model: str
    name: str | None
    metadata: dict[str, str]
    request_counts: RequestCounts
    in_flight: int
    #: The share of the work that is answered, by the estimated cost of each request; 0 to 1.
    work_done: float
    resent: int
    usage: TokenUsage
    #: The server of the result cache as its workers last saw it, at the latest when the batch ended; null: not used.
    cache: CacheFacts | None
    input: Input
    created_at: float
    started_at: float | None
    finished_at: float | None
    updated_at: float
    tenant: str
    #: One of low, normal, high, urgent.
    priority: str
    #: Nothing is sent for now, because a person said so.
    paused: bool
    #: The end of its completion window; null: it has none.
    expires_at: float | None
    not_before: float | None
    #: `22:00-06:00 Europe/Berlin`
    run_between: str | None
    #: Beside the reason `scheduled`: when requests are sent.
    opens_at: float | None
    #: The batch whose unanswered requests these are.
    retry_of: str | None

    @property
    def final(self) -> bool:
        """True when nothing will change any more."""
        return self.status in FINAL

    @property
    def answered(self) -> int:
        """Requests that have their final answer or error."""
        return self.request_counts.completed + self.request_counts.failed


def view(batch: Batch, status: Status, reason: str | None) -> BatchView:
    """The view of a batch; while it runs, `reason` takes the place of the coordinator's where it is not None."""
    counts, usage = status.request_counts, status.usage
    return BatchView(
        id=batch.id,
        status=status.status,
        reason=status.reason if status.status in FINAL else reason or status.reason,
        model=batch.model,
        name=batch.name,
        metadata=batch.metadata,
        request_counts=RequestCounts(batch.requests, counts.completed, counts.failed),
        in_flight=status.in_flight,
        work_done=round(1.0 if status.status == "completed" else status.work_done, 4),
        resent=status.resent,
        usage=TokenUsage(**msgspec.structs.asdict(usage)),
        cache=status.cache,
        input=batch.input,
        created_at=batch.created_at,
        started_at=status.started_at,
        finished_at=status.finished_at,
        updated_at=status.updated_at,
        tenant=batch.tenant,
        priority=status.priority or batch.priority,
        paused=status.paused,
        expires_at=batch.expires_at,
        not_before=batch.not_before,
        run_between=batch.run_between,
        opens_at=status.opens_at,
        retry_of=batch.retry_of,
    )


def heartbeat(store: Store, shard: int) -> Heartbeat | None:
    """The last sign of life of a shard's coordinator; None when there never was one."""
    try:
        return msgspec.json.decode(store.read(f"coordinator/{shard}.json"), type=Heartbeat)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def alive(beat: Heartbeat | None, now: float) -> bool:
    """Whether a heartbeat is recent, by the wall clock `now`."""
    return beat is not None and now - beat.at <= HEARTBEAT_S


def silence(store: Store) -> str:
    """Why nothing is heard of a coordinator: on a full disk it cannot write its heartbeat, nor a batch's status."""
    return "disk_full" if isinstance(store, LocalStore) and store.is_full() else "no_coordinator"


def look(store: Store, batch_id: str, *, now: float | None = None) -> BatchView:
    """Where a batch stands; `UsageError` when there is none."""
    batch = batches.read_batch(store, batch_id)
    beat = heartbeat(store, batch.shard)
    there = alive(beat, time.time() if now is None else now)
    return view(batch, batches.read_status(store, batch), None if there else silence(store))


class Standing(msgspec.Struct):
    """The unfinished batches of a store: how many, and for what those wait that do not move (`BatchView.reason`)."""

    batches: int
    reasons: dict[str, int]


def standing(store: Store, most: int = 200) -> Standing:
    """Where the unfinished batches stand; of more than `most`, the newest are looked into."""
    ids = sorted((b for shard in store.list("active") for b in store.list(f"active/{shard}")), reverse=True)
    found = Standing(len(ids), {})
    for batch_id in ids[:most]:
        with contextlib.suppress(UsageError, Damaged):
            seen = look(store, batch_id)
            if not seen.final and seen.reason is not None:
                found.reasons[seen.reason] = found.reasons.get(seen.reason, 0) + 1
    return found


def rests(store: Store, batch: Batch) -> bool:
    """True while a batch is paused and nothing is asked of it; as `look` raises."""
    return batches.read_status(store, batch).paused and not store.list(f"control/{batch.id}")


def recent(store: Store, limit: int | None, damaged: Callable[[Damaged], None] = lambda _: None) -> list[BatchView]:
    """The newest batches first, at most `limit` of them (None: all); `damaged` is told of those left out as such."""
    views: list[BatchView] = []
    # Ids sort by their time of creation.
    for batch_id in reversed(store.list("batches")):
        if limit is not None and len(views) >= limit:
            break
        try:
            views.append(look(store, batch_id))
        except UsageError:
            continue  # a folder without a batch: one that is being written, or nothing of ours
        except Damaged as exc:
            damaged(exc)
    return views


def ask(store: Store, batch_id: str, command: str, by: str = "", *, priority: str | None = None) -> BatchView:
    """Ask the coordinator for something (`Command`; it obeys when it next looks); where the batch stood before.

    Asking something of a batch that has ended changes nothing.
    """
    before = look(store, batch_id)
    if not before.final:
        made = Command(command=command, at=time.time(), by=by, priority=priority)
        name = _next_name(store.list(f"control/{batch_id}"))
        store.put_atomic(f"control/{batch_id}/{name}", msgspec.json.encode(made))
    return before


def _next_name(there: list[str]) -> str:
    """A name that sorts behind those of commands that wait: ids of one millisecond, or of two clocks, need not."""
    made = new_ulid()
    for name in there:
        with contextlib.suppress(ValueError):
            made = max(made, ulid_number(name.removesuffix(".json")) + 1)
    return f"{ulid_text(made)}.json"
