"""Sends the rows that are due: asks `packing` what goes next, reads it, logs it, publishes it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from common import metrics
from common.codec import Codec
from common.errors import Unreachable
from common.ids import new_chunk_id
from common.logs import get, why
from common.messages import TASK_INFER, VERSION, Chunk, Slice, encode, infer_queue, node_queue, results_queue
from common.publisher import Publisher
from common.settings import Settings
from common.store import Store
from producers.coordinator import packing, sticky, stragglers
from producers.coordinator.backoff import Reconnect
from producers.coordinator.batch_files import BatchFiles, DamagedBatch
from producers.coordinator.broker_calls import answers
from producers.coordinator.capacity import Capacity
from producers.coordinator.core import Core
from producers.coordinator.engine_size import EngineSize
from producers.coordinator.lanes import Lane
from producers.coordinator.ledger import DiskFull
from producers.coordinator.packing import Draft, Pick, Wait
from producers.coordinator.progress import Progress
from producers.coordinator.records import Dispatch, Failed, Lost, Type, sent_slice
from producers.coordinator.records import encode as encode_record
from producers.coordinator.weights import Weights

log = get(__name__)

#: Seconds for which a batch is left alone whose rows could not be read.
UNREADABLE_S = 3.0


#: Seconds after the last deadline in a chunk until workers give it back: their clocks may differ from ours by that.
CLOCK_SLACK_S = 60.0


#: Chunks that may be on their way to the broker without its confirm. Each is kept until then, at most
#: `scheduler.chunk_bytes` and packed; 16 hide a confirm of 20 ms at 800 chunks a second.
CONFIRM_WINDOW = 16


class _Sealed(NamedTuple):
    chunk_id: str
    queue: str
    blob: bytes
    argsrepr: str
    transient: bool


class Dispatcher:
    """One thread: `run` until the core stops."""

    def __init__(
        self, core: Core, store: Store, settings: Settings, codec: Codec, publisher: Publisher, sizes: EngineSize
    ) -> None:
        self._core = core
        self._store = store
        self._settings = settings
        self._codec = codec
        self._publisher = publisher
        publisher.on_blocked = functools.partial(core.trouble, "broker_memory", "dispatcher")
        self._sizes = sizes
        self._weights = Weights(settings.scheduler)
        self._files: dict[str, BatchFiles] = {}
        #: Logged, and not confirmed by the broker yet: to be sent, or on their way.
        self._outbox: dict[str, _Sealed] = {}
        self._reconnect = Reconnect()
        self._heartbeat_at = 0.0

    def run(self) -> None:
        """Dispatch until the core stops."""
        core = self._core
        try:
            while not core.stop.is_set():
                core.dispatch.clear()
                delay = self._round() if self._publish(CONFIRM_WINDOW) else 1e-3
                if delay > 0 and self._publish(0):
                    core.dispatch.wait(min(delay, 1.0))
                self._keep_alive()
        finally:
            if self._publisher.waiting() and core.fatal is None:
                self._publish(0)
            self._publisher.close()
            if core.fatal is None:
                # They never went out; the next life need not wait for them.
                for chunk_id in self._outbox:
                    with contextlib.suppress(DiskFull):
                        core.lose(Lost(chunk_id, leased=False))

    def _round(self) -> float:
        """One chunk for every lane that has one; seconds until there may be more (0: at once)."""
        core = self._core
        if "broker_memory" in core.troubles:
            return 1.0
        with core.lock:
            models = list(core.book.lanes)
            for gone in [b for b in self._files if b not in core.book.batches]:
                del self._files[gone]
        delay = 3600.0
        for model in models:
            if core.stop.is_set():
                break
            delay = min(delay, self._next_chunk(model))
            if not self._publish(CONFIRM_WINDOW):
                return 1e-3
        return delay

    def _next_chunk(self, model: str) -> float:
        """Put the lane's next chunk into the outbox; seconds until there may be another."""
        core = self._core
        if not self._settle_exhausted(model):
            return 1.0
        with core.lock:
            lane = core.book.lanes.get(model)
            if lane is None:
                return 3600.0
            room = _without(self._sizes.capacity(model, core.workers, lane.times), lane)
            metrics.WINDOW.labels(model=model).set(room.window)
            now, wait_s = time.monotonic(), self._settings.scheduler.timeout_ms / 1000
            wall = time.time()
            drafted = packing.draft(core.book, lane, room, now, wall, wait_s, self._weights)
            stolen, seen = None, None
            if isinstance(drafted, Wait) and drafted.idle:
                nodes, factor = self._idle(room.nodes), self._settings.scheduler.straggler_factor
                stolen = sticky.steal(core.book, lane, room, nodes, core.looked_at)
                copy = stragglers.find(core.book, lane, nodes, factor, room.floor, now, wall)
                drafted = copy or drafted
            if isinstance(drafted, Draft):
                seen = sticky.view(core.book, lane, drafted, room, self._settings.scheduler.sticky_prefixes)
        if stolen is not None:
            log.info("chunk_stolen", chunk=stolen)
            core.while_disk_full(functools.partial(core.lose, Lost(stolen, leased=False), metrics.CHUNKS_STOLEN))
            return 0.0
        if isinstance(drafted, Wait):
            return drafted.until - now
        if seen is not None:
            drafted = self._routed(drafted, seen)
        picks = self._read_sizes(drafted.picks)
        if picks:
            self._send(model, drafted._replace(picks=picks))
        return 0.0

    def _routed(self, drafted: Draft, seen: sticky.View) -> Draft:
        try:
            return sticky.route(drafted, seen, self._files_of(seen.progress.id).shared)
        except (DamagedBatch, KeyError, OSError, Unreachable):
            return drafted  # Reading its rows says the same, and what is to be done.

    def _idle(self, nodes: Sequence[str]) -> Sequence[str]:
        """Those of the workers that other shards leave idle; what this one gave them is in its book."""
        if self._settings.scheduler.shards == 1:
            return nodes
        busy = {w.node for w in self._core.workers or [] if w.running + w.waiting}
        return [node for node in nodes if node not in busy]

    def _settle_exhausted(self, model: str) -> bool:
        """Make errors of rows that get no further attempt; False when the coordinator stops meanwhile."""
        core = self._core
        with core.lock:
            lane = core.book.lanes.get(model)
            if lane is None:
                return True
            nodes = _without(self._sizes.capacity(model, core.workers), lane).nodes
            found = packing.exhausted(lane, 1 + self._settings.scheduler.retry_times, nodes)
        return all(core.while_disk_full(functools.partial(core.decide, decision)) for decision in found)

    def _read_sizes(self, drafted: list[Pick]) -> list[Pick]:
        """The picks that fit one message; a batch whose files are damaged fails, alone."""
        picks, sizes, costs = [], [], []
        for pick in drafted:
            try:
                size, cost = self._files_of(pick.batch).row_sizes(pick.positions)
                picks.append(pick)
                sizes.append(size)
                costs.append(cost)
            except (DamagedBatch, KeyError, OSError, Unreachable) as exc:
                self._fail(pick.batch, exc)
        kept = packing.trim(picks, sizes, self._settings.scheduler.chunk_bytes)
        # As many as were picked, or fewer, in the same order.
        return [p._replace(cost=int(c[: len(p.positions)].sum())) for p, c in zip(kept, costs, strict=False)]

    def _send(self, model: str, drafted: Draft) -> None:
        core = self._core
        slices: list[Slice] = []
        kept: list[Pick] = []
        for pick in drafted.picks:
            try:
                files = self._files_of(pick.batch)
                rows = files.rows(pick.positions)
            except (DamagedBatch, KeyError, OSError, Unreachable) as exc:
                self._fail(pick.batch, exc)
                continue
            start, end = int(pick.positions[0]), int(pick.positions[-1]) + 1
            slices.append(Slice(pick.batch, start, end, pick.attempt, rows, files.tenant))
            kept.append(pick)
        if not kept:
            return
        chunk_id, sent_at = new_chunk_id(), time.time()
        sent = [sent_slice(p.batch, p.positions, p.attempt, p.charges, p.lapses, p.tried, p.cost) for p in kept]
        record = Dispatch(chunk_id, model, sent_at, sent, drafted.node, drafted.copy_of)
        encoded = encode_record(record)
        batch, not_after, ahead = None, 0.0, False

        def log_it() -> None:
            with core.lock:
                nonlocal batch, not_after, ahead
                mine = [core.book.batches.get(p.batch) for p in kept]
                if any(progress is None or not progress.dispatchable(time.time()) for progress in mine):
                    return  # Cancelled or paused since: the next draft leaves it out.
                batch = mine[0]
                not_after = _not_after([progress for progress in mine if progress is not None])
                lane = core.book.lane(model)
                core.ledger.append(Type.DISPATCH, encoded, {p.batch for p in kept})
                again = [(p.retry, p.positions) for p in kept if p.retry is not None]
                chunk = core.book.sent(record, time.monotonic(), again, published=False)
                ahead = chunk.ahead
                if drafted.copy_of:
                    metrics.CHUNKS_COPIED.labels(model=model).inc()
                else:
                    packing.charge(core.book, lane, kept, chunk)
                core.dirty.update(p.batch for p in kept)
                for progress in mine:
                    if progress is not None:
                        progress.trouble = None

        if not core.while_disk_full(log_it) or batch is None:
            return
        queue = node_queue(model, drafted.node) if drafted.node else infer_queue(model)
        chunk = Chunk(
            VERSION,
            chunk_id,
            model,
            results_queue(core.shard),
            core.epoch,
            sent_at,
            not_after,
            batch.batch.timeout_s,
            batch.batch.cache,
            slices,
            isolated=drafted.isolated,
            ahead=ahead,
        )
        batches = kept[0].batch if len(kept) == 1 else f"{kept[0].batch}+{len({p.batch for p in kept}) - 1}"
        requests = sum(len(p.positions) for p in kept)
        argsrepr = f"batch={batches} chunk={chunk_id} requests={requests}"
        blob = self._codec.seal(queue, encode(chunk))
        self._outbox[chunk_id] = _Sealed(chunk_id, queue, blob, argsrepr, transient=bool(drafted.node))

    def _publish(self, most: int) -> bool:
        """Send what waits and leave at most `most` chunks unconfirmed; False when the broker failed at it.

        Then all that it did not confirm is sent again by the next call.
        """
        self._note_confirmed()
        if not self._outbox:
            return True
        core = self._core
        try:
            on_their_way = self._publisher.waiting()
            for sealed in self._outbox.values():
                if sealed.chunk_id not in on_their_way:
                    self._publisher.begin_task(
                        sealed.queue,
                        TASK_INFER,
                        sealed.chunk_id,
                        sealed.blob,
                        sealed.argsrepr,
                        transient=sealed.transient,
                    )
            self._publisher.settle(most)
        except Exception as exc:
            self._note_confirmed()
            delay = self._reconnect.failed()
            log.warning("publish_failed", chunks=len(self._outbox), error=why(exc), again_in_s=delay)
            if not self._publisher.blocked:
                core.trouble("broker_unreachable", "dispatcher", not answers(type(exc).__name__))
            core.stop.wait(delay)
            return False
        self._note_confirmed()
        return True

    def _note_confirmed(self) -> None:
        core, confirmed = self._core, self._publisher.confirmed()
        if not confirmed:
            return
        self._reconnect.worked()
        with core.lock:
            for chunk_id in confirmed:
                self._outbox.pop(chunk_id, None)
                chunk = core.book.out.get(chunk_id)
                if chunk is not None:
                    chunk.published, chunk.sent_at = True, time.monotonic()
                    metrics.CHUNKS_SENT.labels(model=chunk.model).inc()
        core.trouble("broker_unreachable", "dispatcher", False)

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if now - self._heartbeat_at < self._settings.broker.heartbeat_s / 3:
            return
        self._heartbeat_at = now
        try:
            self._publisher.heartbeat()
        except Exception as exc:
            # The next publish opens a new connection.
            log.info("publisher_heartbeat_failed", error=why(exc))

    def _files_of(self, batch_id: str) -> BatchFiles:
        files = self._files.get(batch_id)
        if files is None:
            # One look into a dictionary needs no lock, and others hold it for long.
            batch = self._core.book.batches[batch_id].batch
            files = self._files[batch_id] = BatchFiles(self._store, batch)
        return files

    def _fail(self, batch_id: str, exc: Exception) -> None:
        """A batch whose files are damaged ends; one whose files cannot be read waits, and no other waits with it."""
        core = self._core
        if isinstance(exc, DamagedBatch):
            log.error("batch_damaged", batch=batch_id, reason=exc.reason)
            core.while_disk_full(functools.partial(core.decide, Failed(batch_id, exc.reason, time.time())))
        elif not isinstance(exc, KeyError):
            log.error("rows_unreadable", batch=batch_id, error=why(exc))
            with core.lock:
                progress = core.book.batches.get(batch_id)
                if progress is not None:
                    progress.unreadable_until = time.time() + UNREADABLE_S
                    progress.trouble = "store_unreachable"
                    core.dirty.add(batch_id)
            core.control.set()


def _not_after(batches: list[Progress]) -> float:
    """Unix seconds from which on nobody wants any row of a chunk; 0: that never comes, or a worker's clock is wrong.

    The last deadline counts and not the first: rows of a batch that has expired are aborted by its mark in the live
    state, the others are wanted still.
    """
    if any(p.clock_doubted or p.batch.expires_at is None for p in batches):
        return 0.0
    return max(p.batch.expires_at or 0.0 for p in batches) + CLOCK_SLACK_S


def _without(room: Capacity, lane: Lane) -> Capacity:
    """Not those that were lost: what they said of themselves outlives them by half a minute."""
    return replace(room, nodes=tuple(node for node in room.nodes if node not in lane.silent))
