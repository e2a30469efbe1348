"""The fault suite's oracle: a sound aftermath passes, and for each property a doctored one does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from common.ids import new_batch_id, result_id
from tests.fault.aftermath import Aftermath, Outcome, faults
from tests.fault.measure import Measured, measure
from tests.fault.table import Row, markdown, splice
from tests.support.brokers import Depth
from workers.engine.echo_journal import Event

BATCH = new_batch_id()
IDS = ["a", "b", "c", "d"]


def answer(index: int) -> dict[str, Any]:
    response = {"status_code": 200, "request_id": "x", "body": {"said": f"echo {index}"}}
    return {"id": result_id(BATCH, index), "custom_id": IDS[index], "response": response, "error": None}


def error(index: int, code: str) -> dict[str, Any]:
    told = {"code": code, "message": "too slow"}
    return {"id": result_id(BATCH, index), "custom_id": IDS[index], "response": None, "error": told}


def sound() -> Aftermath:
    outcome = Outcome(
        batch=BATCH,
        custom_ids=IDS,
        expected={name: {"said": f"echo {index}"} for index, name in enumerate(IDS)},
        output=[answer(0), answer(1), answer(3)],
        errors=[error(2, "timeout")],
        summary={"status": "completed", "total": 4, "completed": 3, "failed": 1},
        status={"status": "completed", "request_counts": {"total": 4, "completed": 3, "failed": 1}},
        failed={"c": "timeout"},
    )
    return Aftermath([outcome])


def test_a_sound_aftermath_has_no_fault() -> None:
    assert faults(sound()) == []


def lose_a_result(found: Aftermath) -> None:
    del found.outcomes[0].output[1]


def answer_twice(found: Aftermath) -> None:
    found.outcomes[0].output.insert(1, copy.deepcopy(found.outcomes[0].output[1]))


def answer_and_fail(found: Aftermath) -> None:
    found.outcomes[0].errors.append(error(3, "timeout"))


def answer_what_nobody_asked(found: Aftermath) -> None:
    found.outcomes[0].output.append(answer(3) | {"custom_id": "e"})


def swap_output(found: Aftermath) -> None:
    found.outcomes[0].output.reverse()


def swap_errors(found: Aftermath) -> None:
    one = found.outcomes[0]
    one.output.pop(1)
    one.errors.append(error(1, "timeout"))
    one.failed = {"b": "timeout", "c": "timeout"}


def name_another_index(found: Aftermath) -> None:
    found.outcomes[0].output[0]["id"] = result_id(BATCH, 3)


def name_another_batch(found: Aftermath) -> None:
    found.outcomes[0].output[0]["id"] = result_id(new_batch_id(), 0)


def change_an_answer(found: Aftermath) -> None:
    found.outcomes[0].output[0]["response"]["body"] = {"said": "echo 1"}


def fail_with_another_code(found: Aftermath) -> None:
    found.outcomes[0].errors[0]["error"]["code"] = "engine_crash"


def fail_what_should_not(found: Aftermath) -> None:
    one = found.outcomes[0]
    one.output.pop()
    one.errors.append(error(3, "timeout"))


def answer_what_should_fail(found: Aftermath) -> None:
    one = found.outcomes[0]
    one.errors.clear()
    one.output.insert(2, answer(2))


def end_otherwise(found: Aftermath) -> None:
    found.outcomes[0].status["status"] = "cancelled"


def end_otherwise_in_the_summary(found: Aftermath) -> None:
    found.outcomes[0].summary["status"] = "expired"


def miscount_the_status(found: Aftermath) -> None:
    found.outcomes[0].status["request_counts"]["completed"] = 4


def miscount_the_summary(found: Aftermath) -> None:
    found.outcomes[0].summary["failed"] = 0


def leave_ready(found: Aftermath) -> None:
    found.messages["infer.m.1"] = Depth(1, 0)


def leave_unacked(found: Aftermath) -> None:
    found.messages["infer.m.1.node"] = Depth(0, 1)


def leave_a_key(found: Aftermath) -> None:
    found.keys.append("bm:lease:chunk_1")


def leave_a_process(found: Aftermath) -> None:
    found.processes.append("123 workers start")


def leave_a_lock(found: Aftermath) -> None:
    found.locks.append("wal/0/.lock")


def leave_a_file(found: Aftermath) -> None:
    found.files.append("store/batches/x/.tmp-1")


DOCTORED: dict[Callable[[Aftermath], None], str] = {
    lose_a_result: "1 requests have no result: ['b']",
    answer_twice: "1 requests have two results: ['b']",
    answer_and_fail: "1 requests have two results: ['d']",
    answer_what_nobody_asked: "1 results are of no request: ['e']",
    swap_output: "the lines of output.jsonl are not in input order",
    swap_errors: "the lines of errors.jsonl are not in input order",
    name_another_index: "ids in output.jsonl do not tell batch and index",
    name_another_batch: "ids in output.jsonl do not tell batch and index",
    change_an_answer: "1 answers are not those of a run without faults: ['a']",
    fail_with_another_code: "c failed with engine_crash, not timeout",
    fail_what_should_not: "d failed with timeout, not None",
    answer_what_should_fail: "c has an answer, and should have failed",
    end_otherwise: "the status is cancelled, not completed",
    end_otherwise_in_the_summary: "the summary says expired, the status completed",
    miscount_the_status: "the status counts",
    miscount_the_summary: "the summary counts",
    leave_ready: "queue infer.m.1 holds 1 ready, 0 unacked",
    leave_unacked: "queue infer.m.1.node holds 0 ready, 1 unacked",
    leave_a_key: "key left in Redis: bm:lease:chunk_1",
    leave_a_process: "process left: 123",
    leave_a_lock: "lock held: wal/0/.lock",
    leave_a_file: "file left: store/batches/x/.tmp-1",
}


@pytest.mark.parametrize("doctor", DOCTORED, ids=lambda doctor: doctor.__name__)
def test_a_doctored_aftermath_is_found_out(doctor: Callable[[Aftermath], None]) -> None:
    found = sound()
    doctor(found)
    wrong = faults(found)
    assert any(DOCTORED[doctor] in text for text in wrong), wrong


def test_any_request_may_fail_with_the_code_of_a_cut_and_no_other() -> None:
    found = sound()
    one = found.outcomes[0]
    one.failed, one.may_fail, one.final = {}, "batch_cancelled", ("completed", "cancelled")
    one.status["status"] = one.summary["status"] = "cancelled"
    one.errors = [error(2, "batch_cancelled")]
    assert faults(found) == []
    one.errors = [error(2, "timeout")]
    assert faults(found) == [f"{BATCH}: c failed with timeout, not None"]


def test_the_cost_of_a_fault() -> None:
    events = [
        Event("+", 1.0, "a"),
        Event("+", 1.0, "b"),
        Event("=", 2.0, "a"),
        Event("+", 6.5, "b"),
        Event("+", 7.0, "c"),
        Event("+", 9.0, "c"),  # A second copy of what the fault never touched: run twice, but nothing to recover.
    ]
    assert measure(events, began=3.0, ended=5.0, progress_at=5.2) == Measured(2, 1.5)
    assert measure(events, began=3.0, ended=5.0, progress_at=8.0) == Measured(2, 3.0)
    assert measure(events, began=3.0, ended=7.0, progress_at=6.0) == Measured(2, 2.0)
    assert measure(events[:3], began=3.0, ended=5.0, progress_at=4.0) == Measured(0, 0.0)


def test_the_page_gets_the_table_and_keeps_the_rest() -> None:
    rows = [Row("1", "kill -9", "redis", 64, 5.25, "held"), Row("18", "submit", "redis", None, None, "held")]
    table = markdown(rows)
    assert table.splitlines()[2:] == [
        "| 1 | kill -9 | redis | 64 | 5.2 | held |",
        "| 18 | submit | redis |  |  | held |",
    ]
    page = "before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nafter\n"
    kept = {"machine": "2 cores", "rows": [row._asdict() for row in rows]}
    made = splice(page, kept)
    assert made.startswith("before\n")
    assert made.endswith("\nafter\n")
    assert table in made
    assert "old" not in made
    assert splice(made, kept) == made
