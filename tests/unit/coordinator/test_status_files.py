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

    class SlowStore(LocalStore):
        def put_atomic(self, path: str, data: bytes) -> None:
            writing.set()
            assert go_on.wait(10)
            super().put_atomic(path, data)

    slow = StatusFiles(SlowStore(tmp_path))
    first = threading.Thread(target=lambda: slow.say(Status(id=batch_id, status="in_progress"), lambda: not final))
    first.start()
    assert writing.wait(10)
    final = True
    last = threading.Thread(target=lambda: slow.say(Status(id=batch_id, status="completed")))
    last.start()
    go_on.set()
    first.join(10)
    last.join(10)
    assert not slow.say(Status(id=batch_id, status="in_progress"), lambda: not final)
    assert msgspec.json.decode(store.read(f"{folder(batch_id)}/status.json"), type=Status).status == "completed"
    assert files.say(Status(id=batch_id, status="failed"))
