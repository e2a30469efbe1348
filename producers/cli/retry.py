"""`producers retry`: a new batch of the requests that another one left unanswered."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common import say
from common.errors import UsageError
from producers.batch import read_batch
from producers.batch_view import look
from producers.cli import surroundings, wording
from producers.cli.submit import let_go, warn_of_hours
from producers.cli.watch import default_folder, running_fleet, to_the_end
from producers.intake import Options
from producers.intake.again import submit_again
from producers.outputs import check_folder
from producers.reachability import check_fleet


@dataclass(frozen=True)
class Wish:
    """The options of `retry` as given."""

    batch_id: str
    detach: bool
    output: Path | None
    merged: bool
    options: Options
    as_json: bool


def retry(wish: Wish) -> int:
    """Enqueue what is unanswered of a batch that has ended, and follow it; the new batch's outcome is the exit code."""
    settings = surroundings.load_settings()
    wish.options.check()
    check_folder(wish.output or default_folder("batch"))
    store = surroundings.existing_store(settings)
    earlier = look(store, wish.batch_id)
    if not earlier.final:
        raise UsageError(
            f"{earlier.id} is {wording.status(earlier)}: retry it when it has ended "
            f"(producers watch {earlier.id}, or producers cancel {earlier.id})"
        )
    if earlier.status == "failed":
        raise UsageError(f"{earlier.id} failed as a whole, so its requests are not there: {wording.reason(earlier)}")
    check_fleet(settings, store, lambda: surroundings.load_registry(settings), say.err)
    batch = submit_again(store, settings, read_batch(store, earlier.id), wish.options)
    seen = look(store, batch.id)
    what = wording.number(batch.requests, "request")
    say.err(f"{batch.id}: {what} of {earlier.id} again, for {batch.model}")
    warn_of_hours(batch)
    if not wish.detach:
        return to_the_end(store, seen, settings, wish.output, as_json=wish.as_json, merged=wish.merged)
    with running_fleet(settings, seen):
        return let_go(seen, wish.output, as_json=wish.as_json)
