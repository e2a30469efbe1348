"""The Python client: submit requests, follow them, read the answers in order.

    from producers.client import Client

    with Client() as client:
        batch = client.submit({"custom_id": str(n), "body": {"prompt": text}} for n, text in enumerate(texts))
        client.wait(batch.id)
        for line in client.results(batch.id):
            print(line["custom_id"], line["response"])

It does what the `producers` command does, on the same settings: with a broker configured it leaves batches to that
fleet, with none it brings the embedded fleet up. Every error a caller can cause is a `common.errors.BatchmillError`.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, cast

import msgspec

from common import places
from common import registry as registry_module
from common import settings as settings_module
from common.errors import UsageError
from common.registry import Registry
from common.settings import Settings
from common.store import open_store
from producers import intake, outputs
from producers.batch import PRIORITIES, Batch, read_batch
from producers.batch_view import BatchView, ask, look, recent
from producers.following import follow
from producers.intake import Options
from producers.intake.again import submit_again
from producers.intake.bulk import submit_many
from producers.reachability import check_fleet
from producers.schedule import waits

if TYPE_CHECKING:
    from producers.embedded import Fleet

#: `Client.list` hides the type of that name.
Views = list[BatchView]

#: What can be submitted: a path or URL, an open binary file, or requests as mappings.
Source = str | os.PathLike[str] | BinaryIO | Iterable[Mapping[str, Any]]


class Client:
    """One user of one fleet. Not for several threads at a time; cheap to make.

    `settings`: None reads config/fleet.yaml and the environment, as the commands do. `models`: None reads
    config/models.yaml. Closing it (or leaving its `with` block) ends nothing: batches go on.
    """

    def __init__(self, settings: Settings | None = None, models: Registry | None = None) -> None:
        self.settings = settings if settings is not None else settings_module.load()
        self._models = models
        self.store = open_store(places.store_url(self.settings))
        self._fleet: Fleet | None = None

    @property
    def models(self) -> Registry:
        """The model registry."""
        if self._models is None:
            self._models = registry_module.load()
        return self._models

    def submit(
        self,
        source: Source,
        *,
        model: str | None = None,
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
        skip_invalid: bool = False,
        max_tokens_default: int | None = None,
        cache: str | None = None,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
        priority: str | None = None,
        tenant: str | None = None,
        completion_window: str | None = None,
        not_before: str | None = None,
        run_between: str | None = None,
    ) -> BatchView:
        """Check requests and enqueue them as one batch; streams, whatever the size.

        A mapping is one line of the file (docs/file-formats.md). Raises `InvalidInput` (its `report` lists the bad
        lines) with nothing enqueued, `UsageError`, `Unreachable`.
        """
        options = Options(
            model=model,
            name=name,
            metadata=dict(metadata or {}),
            skip_invalid=skip_invalid,
            max_tokens_default=max_tokens_default,
            cache=cache,
            timeout_s=timeout_s,
            idempotency_key=idempotency_key,
            priority=priority,
            tenant=tenant,
            completion_window=completion_window,
            not_before=not_before,
            run_between=run_between,
        )
        opened = _opened(source)
        self._check_fleet()
        if isinstance(opened, str):
            batch = intake.submit(opened, self.store, self.settings, self.models, options)
        else:
            batch = intake.submit_stream(opened, self.store, self.settings, self.models, options)
        self._see_to_a_fleet(batch)
        return look(self.store, batch.id)

    def submit_many(self, sources: Iterable[Iterable[Mapping[str, Any]]], **options: Any) -> Iterator[str]:
        """Enqueue many batches, for a fraction of the waits on the disk; their ids, in order.

        Each source holds the requests of one batch; `options` are those of `submit`, the same for all. What `submit`
        raises of a source is raised when its turn comes: the batches before it are enqueued, it and those after it are
        not. Nothing happens before the first id is asked for.
        """
        wish = Options(**options)
        self._check_fleet()
        encoded = (b"".join(msgspec.json.encode(r) + b"\n" for r in requests) for requests in sources)
        for batch in submit_many(encoded, self.store, self.settings, self.models, wish):
            self._see_to_a_fleet(batch)
            yield batch.id

    def status(self, batch_id: str) -> BatchView:
        """Where a batch stands; `UsageError` when there is none."""
        return look(self.store, batch_id)

    def list(self, limit: int | None = 20) -> Views:
        """The newest batches, newest first."""
        return recent(self.store, limit)

    def cancel(self, batch_id: str) -> BatchView:
        """Ask for a batch to be cancelled, and return at once; nothing happens to one that has ended."""
        ask(self.store, batch_id, "cancel", by="client")
        return look(self.store, batch_id)

    def pause(self, batch_id: str) -> BatchView:
        """Ask that nothing more of a batch is sent, and return at once; what was sent is still answered."""
        ask(self.store, batch_id, "pause", by="client")
        return look(self.store, batch_id)

    def resume_dispatch(self, batch_id: str) -> BatchView:
        """Ask that a paused batch goes on, and return at once."""
        ask(self.store, batch_id, "resume", by="client")
        return look(self.store, batch_id)

    def reprioritize(self, batch_id: str, priority: str) -> BatchView:
        """Ask for another priority (low, normal, high or urgent), and return at once."""
        if priority not in PRIORITIES:
            raise UsageError(f"priority: '{priority}' is not one of {', '.join(PRIORITIES)}")
        ask(self.store, batch_id, "reprioritize", by="client", priority=priority)
        return look(self.store, batch_id)

    def retry(self, batch_id: str, **options: Any) -> BatchView:
        """Enqueue what a batch that has ended left unanswered as a new one; twice gives the same new batch.

        `options`: those of `producers.intake.Options` that are to be other than they were. Its outputs can be read
        together with the first one's: `results(id, merged=True)`. `UsageError` when there is nothing to retry.
        """
        seen = look(self.store, batch_id)
        if not seen.final or seen.status == "failed":
            raise UsageError(f"{batch_id} is {seen.status}: only a batch that has ended with outputs can be retried")
        self._check_fleet()
        made = submit_again(self.store, self.settings, read_batch(self.store, batch_id), Options(**options))
        self._see_to_a_fleet(made)
        return look(self.store, made.id)

    def wait(
        self,
        batch_id: str,
        timeout_s: float | None = None,
        on_update: Callable[[BatchView], None] | None = None,
    ) -> BatchView:
        """Block until a batch has ended; its last view. `on_update` is given every view on the way.

        Raises `TimeoutError` when it has not ended in time (it goes on), `UsageError` when there is none, `Unreachable`
        when the store, or an embedded fleet that is needed, is gone.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        seen = look(self.store, batch_id)
        attend = (lambda view: view) if seen.final else self._attendant(seen)

        def pause(seconds: float) -> None:
            left = seconds if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{batch_id} has not ended within {timeout_s:g} s; it goes on")
            time.sleep(min(seconds, left))

        for view in follow(self.store, batch_id, pause=pause):
            seen = attend(view)
            if on_update is not None:
                on_update(seen)
        return seen

    def results(self, batch_id: str, *, partial: bool = False, merged: bool = False) -> Iterator[dict[str, Any]]:
        """The result lines of a batch, answers and errors, in the order of its input.

        A line is `{"id", "custom_id", "response", "error", "batchmill"}` (docs/file-formats.md). `partial`: of a batch
        that runs, those that are there; it takes the coordinator's log, so its machine or a shared disk. `merged`: of a
        retry, all requests of the batch that was submitted first. Raises `UsageError` when the batch has not ended
        otherwise.
        """
        seen = look(self.store, batch_id)
        if seen.final and merged:
            from producers import merged as together

            found: Iterator[bytes] = (line.data for line in together.lines(self.store, batch_id))
        elif seen.final:
            found = outputs.lines(self.store, batch_id)
        elif partial:
            from producers.partial import lines

            found = lines(self.store, self.settings, seen)
        else:
            raise UsageError(f"{batch_id} is {seen.status}: its results are there when it has ended; use wait()")
        return map(msgspec.json.decode, found)

    def save(self, batch_id: str, folder: str | os.PathLike[str]) -> outputs.Outputs:
        """Copy the outputs of a batch that has ended into a folder: output.jsonl, errors.jsonl, summary.json."""
        target = Path(folder)
        outputs.check_folder(target)
        if not look(self.store, batch_id).final:
            raise UsageError(f"{batch_id} has not ended: its outputs are there when it has; use wait()")
        return outputs.deliver(self.store, batch_id, target)

    def close(self) -> None:
        """Let an embedded fleet end by itself once it has nothing to do."""
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_fleet(self) -> None:
        if self._fleet is None:  # Else it is ours, and was looked at.
            check_fleet(self.settings, self.store, lambda: self.models)

    def _see_to_a_fleet(self, of: Batch | BatchView) -> Fleet | None:
        if self.settings.broker.url is not None:
            return None
        from producers import embedded

        # For a batch whose hours have not come, no model is loaded yet.
        model = None if waits(of.not_before, of.run_between, time.time()) else of.model
        if self._fleet is None or self._fleet.model != model:
            self.close()
            self._fleet = embedded.ensure(self.settings, self.models, model)
        return self._fleet

    def _attendant(self, seen: BatchView) -> Callable[[BatchView], BatchView]:
        fleet = self._see_to_a_fleet(seen)
        if fleet is None:
            return lambda view: view
        from producers.attendant import Attendant

        return Attendant(fleet, lambda _line: None)


class _Lines(io.RawIOBase):
    """Requests as the file that they would be, made while it is read."""

    def __init__(self, requests: Iterable[Mapping[str, Any]]) -> None:
        self._requests = iter(requests)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while len(self._rest) < len(buffer):
            try:
                request = next(self._requests)
            except StopIteration:
                break
            self._rest += msgspec.json.encode(request) + b"\n"
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _opened(source: Source) -> str | BinaryIO:
    """What intake reads: a path or URL, or a stream."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, bytes | Mapping):
        raise UsageError("submit takes a path, a binary file or an iterable of requests, not one request or its bytes")
    if isinstance(source, io.TextIOBase):
        raise UsageError("submit takes a binary file: open it with mode 'rb'")
    if hasattr(source, "read"):
        return cast(BinaryIO, source)
    return io.BufferedReader(_Lines(source), 1 << 18)
