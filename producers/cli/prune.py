"""`producers prune`."""

from __future__ import annotations

import time

from common import exits, say
from common.errors import UsageError
from producers import prune as pruning
from producers import schedule
from producers.cli import surroundings, wording


def prune(*, older_than: str, dry_run: bool, as_json: bool) -> int:
    """Remove the batches that ended longer ago than that; with `dry_run`, only name them."""
    try:
        span = schedule.duration(older_than)
    except UsageError as exc:
        raise UsageError(f"--older-than: {exc}") from None
    store = surroundings.existing_store(surroundings.load_settings())
    now = time.time()
    found = pruning.old(store, now - span)
    gone = []
    for one in found if dry_run else pruning.remove(store, found):
        gone.append(one.id)
        if not as_json:
            when = "left over" if one.ended_at is None else f"ended {wording.ago(now - one.ended_at)} ago"
            say.out(f"{one.id}  {when}{'  ' + wording.plain(one.name) if one.name else ''}")
    if as_json:
        say.json({"batches": gone, "removed": not dry_run})
    else:
        verb = "would be removed" if dry_run else "removed"
        said = f"{len(gone):,} batch{'' if len(gone) == 1 else 'es'} {verb}"
        say.err(said if gone else f"no batch ended more than {older_than} ago")
    return exits.ANSWERED
