"""`producers watch`, and how `submit` follows what it enqueued."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from common import exits, say
from common.errors import BatchmillError
from common.settings import Settings
from common.store import Store
from producers.batch_view import BatchView, look
from producers.cli import surroundings, wording
from producers.cli.progress import display
from producers.following import follow
from producers.outputs import NoOutputs, Outputs, check_folder, deliver
from producers.schedule import waits


def outcome(seen: BatchView, outputs: Outputs | None) -> dict[str, object]:
    """The JSON of `submit` and `watch`: the view's fields, and where the outputs are (null: they are not put)."""
    return {**msgspec.to_builtins(seen), "outputs": msgspec.to_builtins(outputs)}


def default_folder(batch_id: str) -> Path:
    """Where outputs go when nobody says."""
    return Path("batchmill-out") / batch_id


def watch(batch_id: str, *, output: Path | None, as_json: bool) -> int:
    """Follow a batch to its end; its outcome is the exit code."""
    settings = surroundings.load_settings()
    store = surroundings.existing_store(settings)
    seen = look(store, batch_id)
    target = output or default_folder(batch_id)
    check_folder(target)
    if seen.final:
        return hand_over(store, seen, target, as_json=as_json)
    return to_the_end(store, seen, settings, output, as_json=as_json)


def to_the_end(
    store: Store, seen: BatchView, settings: Settings, output: Path | None, *, as_json: bool, merged: bool = False
) -> int:
    """Follow, with somebody to run the batch, until it has ended; then put its outputs."""
    last = followed(store, seen, settings, output)
    if last is None:
        return exits.DETACHED
    return hand_over(store, last, output or default_folder(seen.id), as_json=as_json, merged=merged)


def followed(store: Store, seen: BatchView, settings: Settings, output: Path | None) -> BatchView | None:
    """The last view of a batch that is followed to its end; None when a person stopped following it."""
    try:
        with running_fleet(settings, seen) as attend, display() as show:
            for view in follow(store, seen.id):
                seen = attend(view)
                show(seen)
    except KeyboardInterrupt:
        way_back(seen.id, output)
        return None
    return seen


def hand_over(store: Store, seen: BatchView, target: Path, *, as_json: bool, merged: bool = False) -> int:
    """Put the outputs of a batch that has ended, where it has any, and tell how it did."""
    try:
        outputs, failed = put(store, seen, target, merged=merged)
    except KeyboardInterrupt:
        say.err(f"\nstopped before its outputs were put; get them with: producers results {seen.id} --output DIR")
        raise
    tell(seen, outputs, as_json=as_json)
    if merged and not as_json:
        say.out(f"  merged with what it retries: {wording.number(failed, 'request')} without an answer")
    return exits.of_batch(seen.status, failed)


def put(store: Store, seen: BatchView, target: Path, *, merged: bool = False) -> tuple[Outputs | None, int]:
    """Put the outputs of a batch that has ended; None when it has none. And how many requests in them failed.

    `merged`: with those of the batches that it retries.
    """
    if merged:
        from producers import merged as together

        outputs, told = together.deliver(store, seen.id, target)
        return outputs, told.failed
    # A batch whose own files were damaged fails without outputs; its reason is told.
    with contextlib.suppress(NoOutputs):
        return deliver(store, seen.id, target), seen.request_counts.failed
    return None, seen.request_counts.failed


@contextlib.contextmanager
def running_fleet(settings: Settings, seen: BatchView) -> Iterator[Callable[[BatchView], BatchView]]:
    """See to it that somebody runs the batch; yields what looks after that, given every view.

    A configured fleet runs by itself: no more than a warning is said here. The embedded one is brought up, and does not
    end before this block does.
    """
    if settings.broker.url is not None:
        if seen.reason == "no_coordinator":
            say.err("producers: warning: no coordinator has been seen lately; start one: producers coordinate")
        yield lambda view: view
        return
    from producers import embedded
    from producers.attendant import Attendant

    registry = surroundings.load_registry(settings)
    try:
        rests = seen.paused or waits(seen.not_before, seen.run_between, time.time())
        fleet = embedded.ensure(settings, registry, None if rests else seen.model, say=say.err)
    except BatchmillError as exc:
        raise type(exc)(f"{exc}; {seen.id} is kept, 'producers watch {seen.id}' goes on with it") from None
    with fleet:
        if fleet.notice is not None:
            say.err(f"producers: warning: {fleet.notice}")
        yield Attendant(fleet, say.err)


def tell(seen: BatchView, outputs: Outputs | None, *, as_json: bool) -> None:
    """How a batch ended, or stands, on stdout."""
    if as_json:
        say.json(outcome(seen, outputs))
        return
    said = [wording.ending(seen)]
    named = [("speed", wording.speed(seen))]
    if outputs is not None:
        named += [("output", outputs.output), ("errors", outputs.errors), ("summary", outputs.summary)]
    said += [f"  {name:<8} {value}" for name, value in named if value is not None]
    say.out("\n".join(said))


def output_again(named: Path | None) -> str:
    """The option that names the same folder again, to be pasted into a shell."""
    return f" --output {shlex.quote(str(named))}" if named is not None else ""


def way_back(batch_id: str, named: Path | None) -> None:
    """How to come back to a batch that is no longer followed."""
    where = output_again(named)
    say.err(f"\nNo longer following; {batch_id} goes on.")
    say.err(f"  come back   producers watch {batch_id}{where}")
    say.err(f"  cancel it   producers cancel {batch_id}")
