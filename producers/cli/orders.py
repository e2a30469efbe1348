"""What a person tells the coordinator about a batch: cancel, pause, resume-dispatch, reprioritize."""

from __future__ import annotations

import getpass
import socket

from common import exits, say
from common.errors import UsageError
from common.settings import Settings
from common.store import Store
from producers.batch import PRIORITIES
from producers.batch_view import BatchView, ask, look
from producers.cli import surroundings, wording


def cancel(batch_id: str, *, as_json: bool) -> int:
    """Ask for a batch to be cancelled; asking it of one that has ended is no error."""
    store = _store()
    before = look(store, batch_id)
    if before.final:
        if as_json:
            say.json({"id": batch_id, "asked": False, "status": before.status})
        else:
            say.out(f"{batch_id} is {wording.status(before)} already; nothing to cancel")
        return exits.ANSWERED
    return _ask(store, before, "cancel", "asked to cancel; what is answered is kept", as_json=as_json)


def pause(batch_id: str, *, as_json: bool) -> int:
    """Ask that nothing more of a batch is sent."""
    store = _store()
    before = _running(store, batch_id, "pause")
    said = "asked to pause; what was sent is still answered"
    return _ask(store, before, "pause", said, as_json=as_json, then="let it go on: producers resume-dispatch")


def resume_dispatch(batch_id: str, *, as_json: bool) -> int:
    """Ask that a paused batch goes on."""
    settings = surroundings.load_settings()
    store = surroundings.existing_store(settings)
    before = _running(store, batch_id, "resume")
    # With nothing but paused batches the embedded fleet ends.
    bring_back = settings if settings.broker.url is None and before.paused else None
    return _ask(store, before, "resume", "asked to go on", as_json=as_json, bring_back=bring_back)


def reprioritize(batch_id: str, *, priority: str, as_json: bool) -> int:
    """Ask that a batch gets another priority."""
    if priority not in PRIORITIES:
        raise UsageError(f"priority: '{priority}' is not one of {', '.join(PRIORITIES)}")
    store = _store()
    before = _running(store, batch_id, "reprioritize")
    said = f"asked for priority {priority} (it was {before.priority})"
    return _ask(store, before, "reprioritize", said, as_json=as_json, priority=priority)


def _running(store: Store, batch_id: str, verb: str) -> BatchView:
    """Where a batch stands; `UsageError` when it is too late to ask anything of it."""
    seen = look(store, batch_id)
    if seen.final or seen.status in ("cancelling", "finalizing"):
        raise UsageError(f"{batch_id} is {wording.status(seen)}: there is nothing to {verb} any more")
    return seen


def _ask(
    store: Store,
    before: BatchView,
    command: str,
    said: str,
    *,
    as_json: bool,
    priority: str | None = None,
    then: str = "follow it: producers watch",
    bring_back: Settings | None = None,
) -> int:
    ask(store, before.id, command, by=f"{_user()}@{socket.gethostname()}", priority=priority)
    if as_json:
        say.json({"id": before.id, "asked": True, "status": before.status})
    else:
        say.out(f"{before.id}: {said}; {then} {before.id}")
    if before.reason == "no_coordinator" and bring_back is not None:
        from producers import embedded

        # It finds the batch by itself.
        embedded.ensure(bring_back, surroundings.load_registry(bring_back), None, say=say.err).close()
    elif before.reason == "no_coordinator":
        say.err("producers: warning: no coordinator runs; it will be done once one is back")
    return exits.ANSWERED


def _store() -> Store:
    return surroundings.existing_store(surroundings.load_settings())


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
