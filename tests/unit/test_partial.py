"""Results in mid-run: read from a ledger that somebody else writes, and never from the wrong one."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from common import lines as result_lines
from common.errors import UsageError
from common.messages import VERSION, Kind, Part, Results, Usage, encode
from common.registry import ModelVersion, Registry
from common.settings import Settings
from common.store import LocalStore
from producers import intake, partial
from producers.batch import Batch, read_status
from producers.batch_view import BatchView, view
from producers.coordinator.batch_files import BatchFiles
from producers.coordinator.ledger import Ledger
from producers.coordinator.records import Exhausted, Type, pack_positions
from producers.coordinator.segments import Seal, write_seal
from producers.intake import Options
from tests.support import oracle, stored

MODELS = Registry({stored.MODEL: ModelVersion(source="x")}, {}, stored.MODEL)


class Scene:
    """A batch of 40 requests, of which number 7 is invalid, and a ledger written by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = msgspec.convert({"store": {"url": str(folder / "store")}}, Settings)
        self.store = LocalStore(folder / "store")
        raw = b"".join(b'{"custom_id":"c%d","body":{"prompt":"%d"}}\n' % (n, n % 5) for n in range(40))
        raw = raw.replace(b'"prompt":"2"}}\n{"custom_id":"c8"', b'"stream":true}}\n{"custom_id":"c8"')
        self.batch = intake.submit_bytes(raw, self.store, self.settings, MODELS, Options(skip_invalid=True))
        assert self.batch.invalid == 1
        self.ids = [f"c{n}" for n in range(40)]
        self.wal = self.store.root / "wal" / str(self.batch.shard)
        self.ledger = Ledger(self.wal, 1, segment_bytes=2048)
        self.index = BatchFiles(self.store, self.batch).plan(0, self.batch.planned)["index"]

    def results(self, positions: list[int], kind: Kind, of: Batch | None = None, text: str = "ok") -> None:
        """Log what a worker answered."""
        batch = of or self.batch
        marks = result_lines.encode_marks(batch.model)
        made = []
        for pos in positions:
            index = int(self.index[pos])
            custom_id = b'"c%d"' % index
            if kind is Kind.OUTPUT:
                body = b'{"text":"%b"}' % text.encode()
                made.append(result_lines.answer_line(batch.id, index, custom_id, 200, body, marks))
            else:
                made.append(result_lines.error_line(batch.id, index, custom_id, "timeout", text, marks))
        part = Part(
            batch.id,
            np.array(positions, "<u4").tobytes(),
            bytes([kind]) * len(positions),
            np.array([len(m) for m in made], "<u4").tobytes(),
            b"".join(made),
            Usage(),
        )
        results = Results(VERSION, "chunk_1", batch.model, "node", 0, False, [part])
        self.ledger.append(Type.RESULTS, encode(results), (batch.id,))

    def seen(self, completed: int = 0, failed: int = 1) -> BatchView:
        """The view that the coordinator's status gives."""
        stored.status(self.store, self.batch, "in_progress", completed, failed)
        return view(self.batch, read_status(self.store, self.batch), None)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def _answered(scene: Scene, seen: BatchView) -> tuple[set[str], set[str]]:
    put = partial.deliver(scene.store, scene.settings, seen, scene.folder / "out")
    assert put.summary is None
    checked = oracle.check(scene.folder / "out", scene.batch.id, scene.ids, partial=True)
    both = sorted(checked.output + checked.errors, key=lambda line: int(line["id"].rpartition("_")[2]))
    found = list(partial.lines(scene.store, scene.settings, seen))
    assert [msgspec.json.decode(line) for line in found] == both
    return {line["custom_id"] for line in checked.output}, {line["custom_id"] for line in checked.errors}


def _ids(scene: Scene, positions: list[int]) -> set[str]:
    return {f"c{scene.index[pos]}" for pos in positions}


def test_what_is_logged_is_what_is_put(scene: Scene) -> None:
    other = intake.submit_bytes(
        b'{"custom_id":"x","body":{"prompt":"x"}}\n', scene.store, scene.settings, MODELS, Options()
    )
    assert _answered(scene, scene.seen()) == (set(), {"c7"})
    for start in range(0, 20, 4):
        scene.results([start, start + 2], Kind.OUTPUT)
        scene.results([0], Kind.OUTPUT, of=other)
    scene.results([1], Kind.ERROR)
    # Not final: an attempt that failed is no answer.
    scene.results([3], Kind.RETRY)
    # The first answer stands.
    scene.results([0], Kind.OUTPUT, text="later")
    output, errors = _answered(scene, scene.seen(10, 2))
    assert output == _ids(scene, [0, 2, 4, 6, 8, 10, 12, 14, 16, 18])
    assert errors == _ids(scene, [1]) | {"c7"}
    assert b"later" not in (scene.folder / "out" / "output.jsonl").read_bytes()
    # An answer takes the place of an error, as it does at the end.
    scene.results([1, 3], Kind.OUTPUT)
    assert _answered(scene, scene.seen(12, 1)) == (output | _ids(scene, [1, 3]), {"c7"})
    assert scene.ledger.segment_count > 1


def test_requests_that_were_given_up_are_errors(scene: Scene) -> None:
    scene.results([3], Kind.RETRY, text="the last attempt")
    for positions, use_line in (([3], True), ([5], False)):
        packed = pack_positions(np.array(positions, np.uint32))
        decision = Exhausted(scene.batch.id, packed, use_line, "engine_crash", "the engine ended", 4)
        scene.ledger.append(Type.DECISION, encode(decision), (scene.batch.id,))
    output, errors = _answered(scene, scene.seen(0, 3))
    assert (output, errors) == (set(), _ids(scene, [3, 5]) | {"c7"})
    text = (scene.folder / "out" / "errors.jsonl").read_text()
    assert "the last attempt" in text
    assert "engine_crash" in text


def test_what_comes_after_a_seal_does_not_count(scene: Scene) -> None:
    scene.results([0], Kind.OUTPUT)
    (segment,) = [p for p in scene.wal.iterdir() if p.name.endswith("-000000")]
    write_seal(segment, Seal(segment.stat().st_size, 2), lambda _folder: None)
    scene.results([1], Kind.OUTPUT)
    assert _answered(scene, scene.seen(1))[0] == _ids(scene, [0])


def test_another_machines_log_is_refused_and_nothing_is_put(scene: Scene) -> None:
    scene.results([0, 1], Kind.OUTPUT)
    stored.heartbeat(scene.store, 1.0)
    with pytest.raises(UsageError, match=r"only 3 of 31 answers are in the log on this machine; run it on h, where"):
        partial.deliver(scene.store, scene.settings, scene.seen(30), scene.folder / "out")
    assert os.listdir(scene.folder / "out") == []
    with pytest.raises(UsageError, match="only 3 of 31"):
        list(partial.lines(scene.store, scene.settings, scene.seen(30)))
    elsewhere = msgspec.structs.replace(
        scene.settings, store=msgspec.structs.replace(scene.settings.store, wal_dir=str(scene.folder / "none"))
    )
    with pytest.raises(UsageError, match="only 1 of 31"):
        partial.deliver(scene.store, elsewhere, scene.seen(30), scene.folder / "out")


def test_a_batch_that_ends_meanwhile_is_told_from_the_wrong_log(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.results([0, 1], Kind.OUTPUT)
    seen = scene.seen(2)

    def dropped(self: Ledger, *_: object) -> Path:
        raise FileNotFoundError(2, "No such file or directory")

    with monkeypatch.context() as patched:
        patched.setattr(partial.Snapshot, "path_of", dropped)
        with pytest.raises(UsageError, match="ended while its log was read"):
            partial.deliver(scene.store, scene.settings, seen, scene.folder / "out")
    scene.ledger.release(scene.batch.id)
    for path in scene.wal.iterdir():
        path.unlink()
    stored.status(scene.store, scene.batch, "completed", 39, 1)
    with pytest.raises(UsageError, match="ended while its log was read"):
        partial.deliver(scene.store, scene.settings, seen, scene.folder / "out")


def test_nothing_answered_yet_is_no_error(scene: Scene) -> None:
    scene.ledger.close()
    for path in scene.wal.iterdir():
        path.unlink()
    scene.wal.rmdir()
    assert _answered(scene, scene.seen()) == (set(), {"c7"})


def test_looking_changes_nothing(scene: Scene) -> None:
    scene.results([0, 1], Kind.OUTPUT)

    def tree() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in scene.store.root.rglob("*") if p.is_file()}

    seen = scene.seen(2)
    before = tree()
    partial.deliver(scene.store, scene.settings, seen, scene.folder / "out")
    assert tree() == before
