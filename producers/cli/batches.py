"""`producers status` and `list`: short questions to the store."""

from __future__ import annotations

import time

from common import say
from common.errors import Damaged
from producers.batch_view import look, recent
from producers.cli import surroundings


def status(batch_id: str, *, as_json: bool) -> int:
    """Where a batch stands."""
    settings = surroundings.load_settings()
    seen = look(surroundings.existing_store(settings), batch_id)
    if as_json:
        say.json(seen)
    else:
        from producers.cli.cards import card

        say.render(card(seen, time.time(), embedded=settings.broker.url is None))
    return 0


def show(*, limit: int | None, as_json: bool) -> int:
    """The newest batches."""
    settings = surroundings.load_settings()
    store = surroundings.existing_store(settings)
    found = recent(store, limit, warn_of_damage)
    if as_json:
        say.json({"object": "list", "data": found})
    elif found:
        from producers.cli.cards import NARROWEST, listing

        # A narrower terminal wraps the lines: an id that was cut could not be copied.
        width = max(NARROWEST, say.console().width)
        embedded = settings.broker.url is None
        say.render(listing(found, time.time(), width, embedded=embedded), width=width)
    else:
        say.err(f"no batches in {store.url}")
    return 0


def warn_of_damage(exc: Damaged) -> None:
    """Say that a batch is left out."""
    say.err(f"producers: warning: {exc}")
