"""`producers resume`: after a crash, says what is unfinished, sees to a fleet, and follows every batch to its end."""

from __future__ import annotations

from pathlib import Path

from common import exits, say
from common.errors import Damaged, UsageError
from common.store import Store
from producers.batch_view import BatchView, look
from producers.cli import surroundings, wording
from producers.cli.batches import warn_of_damage
from producers.cli.watch import default_folder, followed, outcome, put, running_fleet, tell
from producers.following import Pace
from producers.intake import recover
from producers.outputs import check_folder


def resume(*, detach: bool, output: Path | None, as_json: bool) -> int:
    """Bring everything that is unfinished to its end; the gravest outcome is the exit code. May be run at any time."""
    settings = surroundings.load_settings()
    check_folder(output or default_folder("batch"))
    store = surroundings.existing_store(settings)
    recover(store)  # A submit that was killed when its batch was whole.
    found = unfinished(store)
    count = f"{len(found)} unfinished batch{'' if len(found) == 1 else 'es'}:"
    say.err(count if found else "nothing to resume: every batch has ended")
    for seen in found:
        say.err(f"  {wording.line(seen, Pace(), embedded=settings.broker.url is None)}")
    # Whoever paused a batch did not crash; following it would never end.
    paused = {seen.id for seen in found if seen.paused and not store.list(f"control/{seen.id}")}
    for batch_id in paused:
        say.err(f"{batch_id} stays paused")
    going = [seen for seen in found if seen.id not in paused]
    ended = []
    code = exits.ANSWERED
    if detach and going:
        with running_fleet(settings, going[0]):
            ended = [outcome(look(store, seen.id), None) for seen in going]
    for seen in () if detach else going:
        last = followed(store, seen, settings, output)
        if last is None:
            return exits.DETACHED
        outputs, failed = put(store, last, output / seen.id if output is not None else default_folder(seen.id))
        code = max(code, exits.of_batch(last.status, failed))
        ended.append(outcome(last, outputs))
        if not as_json:
            tell(last, outputs, as_json=False)
    if as_json:
        say.json({"object": "list", "data": ended})
    return code


def unfinished(store: Store) -> list[BatchView]:
    """The batches that have not ended, in the order in which they came."""
    ids = sorted(batch_id for shard in store.list("active") for batch_id in store.list(f"active/{shard}"))
    views = []
    for batch_id in ids:
        try:
            views.append(look(store, batch_id))
        except UsageError:
            continue  # The coordinator says what is wrong with it.
        except Damaged as exc:
            warn_of_damage(exc)
    return [seen for seen in views if not seen.final]
