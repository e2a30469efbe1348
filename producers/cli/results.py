"""`producers results`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from common import exits, say
from common.errors import UsageError
from common.settings import Settings
from common.store import Store
from producers import outputs
from producers.batch_view import BatchView, look
from producers.cli import surroundings, wording
from producers.cli.watch import default_folder, hand_over, tell

STDOUT = "-"


def results(batch_id: str, *, output: str | None, partial: bool, merged: bool, as_json: bool) -> int:
    """Put the outputs of a batch; the outcome of one that has ended is the exit code."""
    settings = surroundings.load_settings()
    store = surroundings.existing_store(settings)
    seen = look(store, batch_id)
    if not seen.final and not partial:
        raise UsageError(
            f"{batch_id} is {wording.status(seen)} ({seen.answered:,} of {seen.request_counts.total:,} done): "
            f"wait for it with 'producers watch {batch_id}', or take what is there with --partial"
        )
    if merged and not seen.final:
        raise UsageError("--merged and --partial do not go together: a retry is merged when it has ended")
    if output == STDOUT:
        to_stdout(_lines(store, settings, seen, merged=merged), as_json=as_json)
    elif seen.final:
        return hand_over(store, seen, target_of(output, batch_id), as_json=as_json, merged=merged)
    else:
        from producers.partial import deliver

        tell(seen, deliver(store, settings, seen, target_of(output, batch_id)), as_json=as_json)
    return exits.of_batch(seen.status, seen.request_counts.failed) if seen.final else exits.ANSWERED


def _lines(store: Store, settings: Settings, seen: BatchView, *, merged: bool) -> Iterator[bytes]:
    """Result lines in the order of the input; of a batch that runs, what is answered so far."""
    if merged:
        from producers import merged as together

        return (line.data for line in together.lines(store, seen.id))
    if seen.final:
        return outputs.lines(store, seen.id)
    from producers.partial import lines

    return lines(store, settings, seen)


def target_of(output: str | None, batch_id: str) -> Path:
    """The folder to put outputs into, which can be written."""
    if output == "":
        raise UsageError("--output is empty; name a folder, or - for stdout")
    target = Path(output) if output is not None else default_folder(batch_id)
    outputs.check_folder(target)
    return target


def to_stdout(lines: Iterator[bytes], *, as_json: bool) -> None:
    """Result lines as they are."""
    if as_json:
        raise UsageError("--output - and --json both want stdout; choose one")
    for line in lines:
        say.raw(line)
    say.flush()
