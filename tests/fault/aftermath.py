"""The oracle of the fault suite: what must hold when a batch has ended and its fleet is gone, whatever happened.

`Aftermath` is what was found, `faults` says what is wrong with it. Pure, so that a test can show for each property that
a doctored aftermath fails (tests/unit/test_fault_oracle.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.ids import result_id
from tests.support.brokers import Depth


@dataclass
class Outcome:
    """One batch: what was asked, what should have come of it, what came."""

    batch: str
    #: custom_ids in input order.
    custom_ids: Sequence[str]
    #: custom_id → the answer's body in a run without faults.
    expected: Mapping[str, Any]
    #: The parsed lines of both files.
    output: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    summary: dict[str, Any]
    #: The object of `producers status`.
    status: dict[str, Any]
    #: custom_id → code of the error that it must have (an HTTP status, or the code of what never got an answer).
    failed: Mapping[str, str | int] = field(default_factory=dict)
    #: Where a cancel or a deadline decides: any request that has no answer may have an error of this code.
    may_fail: str | None = None
    #: The statuses it may end with: more than one where two things race.
    final: tuple[str, ...] = ("completed",)


@dataclass
class Aftermath:
    """What is left once the batches have ended and the fleet was told to end."""

    outcomes: list[Outcome]
    #: Queues that hold messages while the fleet still runs with nothing to do, and after it has ended.
    messages: dict[str, Depth] = field(default_factory=dict)
    #: Redis keys that should not be there.
    keys: list[str] = field(default_factory=list)
    #: Living processes of the fleet.
    processes: list[str] = field(default_factory=list)
    #: Lock files that somebody holds.
    locks: list[str] = field(default_factory=list)
    #: Temporary files, and entries in folders of the store that are empty when there is no work.
    files: list[str] = field(default_factory=list)


def faults(found: Aftermath) -> list[str]:
    """What is wrong, in words; empty when all is well."""
    wrong = [f"{one.batch}: {text}" for one in found.outcomes for text in _outcome(one)]
    wrong += [f"queue {name} holds {d.ready} ready, {d.unacked} unacked" for name, d in found.messages.items()]
    wrong += [f"key left in Redis: {key}" for key in found.keys]
    wrong += [f"process left: {process}" for process in found.processes]
    wrong += [f"lock held: {lock}" for lock in found.locks]
    wrong += [f"file left: {file}" for file in found.files]
    return wrong


def _outcome(one: Outcome) -> list[str]:
    return [*_once(one), *_order(one), *_answers(one), *_errors(one), *_counts(one)]


def _once(one: Outcome) -> list[str]:
    seen: dict[str, int] = {}
    for line in (*one.output, *one.errors):
        seen[line["custom_id"]] = seen.get(line["custom_id"], 0) + 1
    missing = [name for name in one.custom_ids if name not in seen]
    twice = [name for name, times in seen.items() if times > 1]
    known = set(one.custom_ids)
    foreign = [name for name in seen if name not in known]
    wrong = []
    if missing:
        wrong.append(f"{len(missing)} requests have no result: {missing[:5]}")
    if twice:
        wrong.append(f"{len(twice)} requests have two results: {twice[:5]}")
    if foreign:
        wrong.append(f"{len(foreign)} results are of no request: {foreign[:5]}")
    return wrong


def _order(one: Outcome) -> list[str]:
    place = {name: index for index, name in enumerate(one.custom_ids)}
    wrong = []
    for name, lines in (("output", one.output), ("errors", one.errors)):
        places = [place.get(line["custom_id"], -1) for line in lines]
        if places != sorted(places):
            wrong.append(f"the lines of {name}.jsonl are not in input order")
        strays = [line["id"] for line, index in zip(lines, places, strict=True) if not _names(line["id"], one, index)]
        if strays:
            wrong.append(f"ids in {name}.jsonl do not tell batch and index: {strays[:3]}")
    return wrong


def _names(line_id: str, one: Outcome, index: int) -> bool:
    return line_id == result_id(one.batch, index)


def _answers(one: Outcome) -> list[str]:
    other = [
        line["custom_id"]
        for line in one.output
        if line["response"]["status_code"] != 200 or line["response"]["body"] != one.expected.get(line["custom_id"])
    ]
    return [f"{len(other)} answers are not those of a run without faults: {other[:5]}"] if other else []


def _errors(one: Outcome) -> list[str]:
    found = {line["custom_id"]: _code(line) for line in one.errors}
    wrong = [
        f"{name} failed with {code}, not {one.failed.get(name)}"
        for name, code in found.items()
        if one.failed.get(name, one.may_fail) != code
    ]
    wrong += [f"{name} has an answer, and should have failed" for name in one.failed if name not in found]
    return wrong[:5]


def _code(line: dict[str, Any]) -> str | int:
    code: str | int = line["response"]["status_code"] if line["response"] is not None else line["error"]["code"]
    return code


def _counts(one: Outcome) -> list[str]:
    wrong = []
    if one.status["status"] not in one.final:
        wrong.append(f"the status is {one.status['status']}, not {' or '.join(one.final)}")
    if one.summary.get("status") != one.status["status"]:
        wrong.append(f"the summary says {one.summary.get('status')}, the status {one.status['status']}")
    there = {"total": len(one.custom_ids), "completed": len(one.output), "failed": len(one.errors)}
    if one.status["request_counts"] != there:
        wrong.append(f"the status counts {one.status['request_counts']}, the files hold {there}")
    said = {key: one.summary.get(key) for key in there}
    if said != there:
        wrong.append(f"the summary counts {said}, the files hold {there}")
    return wrong
