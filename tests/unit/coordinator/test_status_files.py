"""Status files: the last word is never overwritten by an earlier one."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from common.ids import new_batch_id
from common.store import LocalStore
from producers.batch import Status, folder
from producers.coordinator.status_files import StatusFiles


def test_a_final_status_is_not_overwritten_by_one_that_was_on_its_way(tmp_path: Path) -> None:
    batch_id = new_batch_id()
    store = LocalStore(tmp_path)
    files = StatusFiles(store)
    writing, go_on = threading.Event(), threading.Event()
    final = False

    def slowly() -> None:
        writing.set()
        assert go_on.wait(60)

    def in_progress() -> bool:
        return files.say(Status(id=batch_id, status="in_progress"), slowly, lambda _: not final)

    first = threading.Thread(target=in_progress)
    first.start()
    assert writing.wait(60)
    final = True
    last = threading.Thread(target=lambda: files.say(Status(id=batch_id, status="completed"), slowly))
    last.start()
    go_on.set()
    first.join(60)
    last.join(60)
    assert not in_progress()
    assert msgspec.json.decode(store.read(f"{folder(batch_id)}/status.json"), type=Status).status == "completed"
    assert files.say(Status(id=batch_id, status="failed"), lambda: None)
