"""A batch's final status stays, whatever was about to be written when it ended."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import cast

from common.store import LocalStore
from producers.batch import Status, read_status
from producers.coordinator.core import Core
from producers.coordinator.finalizer import Finalizer
from producers.coordinator.leadership import Leadership
from producers.coordinator.progress import new_progress
from tests.support import stored


class Slow(LocalStore):
    """A store whose first status takes until it is told."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def put_atomic(self, path: str, data: bytes) -> None:
        if path.endswith("status.json") and not self.entered.is_set():
            self.entered.set()
            assert self.go_on.wait(20)
        super().put_atomic(path, data)


def test_a_status_that_is_being_written_is_not_the_last(tmp_path: Path) -> None:
    store = Slow(tmp_path)
    batch = stored.batch(store)
    progress = new_progress(batch)
    # Neither is asked anything when only a status is written.
    finalizer = Finalizer(cast(Core, None), store, cast(Leadership, None))
    running = threading.Thread(target=finalizer.say_unless_ended, args=(progress, progress.status()))
    running.start()
    assert store.entered.wait(20)
    progress.final = "completed"
    ending = threading.Thread(target=finalizer.say, args=(progress.status(),))
    ending.start()
    # Without the lock it would end here, and the one that waits would write over it.
    ending.join(0.2)
    store.go_on.set()
    running.join()
    ending.join()
    assert read_status(store, batch).status == "completed"
    finalizer.say_unless_ended(progress, Status(id=batch.id, status="finalizing"))
    assert read_status(store, batch).status == "completed"
