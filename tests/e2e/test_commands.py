"""The commands as a user types them, against a whole fleet on each broker."""

from __future__ import annotations

import gzip
import json
import re
import signal
from pathlib import Path

import pytest
import zstandard

from common.store import LocalStore
from tests.e2e.conftest import Shell, chat, on_one_broker
from tests.support import oracle
from tests.support.processes import ROOT, Process

DEMO = ROOT / "examples" / "demo.jsonl"


def test_the_demo_is_answered_but_for_the_one_that_is_refused(fleet: Shell) -> None:
    done = fleet.run("submit", str(DEMO), "--name", "demo", "--metadata", "team=docs", code=1)
    found = re.search(r"batch_[0-9a-z]{26}", done.out)
    assert found is not None
    batch_id = found[0]
    folder = fleet.folder / "batchmill-out" / batch_id
    checked = oracle.check(folder, batch_id, oracle.input_ids(DEMO), failed=["too-long"])
    assert checked.code("too-long") == 400
    assert checked.content("twin-a") == checked.content("twin-b") == "echo: Give me one fact about the Moon."
    assert "東京" in checked.content("unicode")
    assert f"{len(checked.output)} answered, 1 failed" in done.out
    assert str(folder / "output.jsonl") in done.out
    # Progress and everything else for people is on stderr.
    assert batch_id in done.err
    assert "completed" in done.err
    # What was put is what the store has, and the other commands tell the same story.
    shown = fleet.run("status", batch_id, "--json").json
    assert shown["status"] == "completed"
    assert shown["request_counts"] == {k: checked.summary[k] for k in ("total", "completed", "failed")}
    assert shown["usage"] == checked.summary["usage"]
    assert (shown["name"], shown["metadata"]) == ("demo", {"team": "docs"})
    assert fleet.run("list", "--json").json["data"] == [shown]
    assert batch_id in fleet.run("list").out
    again = fleet.run("watch", batch_id, "--output", "again", "--json", code=1).json
    assert again == shown | {"outputs": again["outputs"]}
    oracle.check(fleet.folder / "again", batch_id, oracle.input_ids(DEMO))
    lines = fleet.run("results", batch_id, "--output", "-", code=1).out.splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == oracle.input_ids(DEMO)


@on_one_broker
@pytest.mark.parametrize("how", ["stdin", "gz", "zst"])
def test_other_ways_in(fleet: Shell, how: str) -> None:
    raw = "".join(json.dumps(chat(f"c{i}", f"Number {i}")) + "\n" for i in range(300)).encode()
    path = fleet.folder / f"in.jsonl.{how}"
    if how == "gz":
        path.write_bytes(gzip.compress(raw))
    elif how == "zst":
        path.write_bytes(zstandard.compress(raw))
    done = fleet.run("submit", "-" if how == "stdin" else str(path), "--json", "-o", "out", stdin=raw)
    shown = done.json
    checked = oracle.check(fleet.folder / "out", shown["id"], oracle.input_ids(raw), failed=[])
    assert shown["request_counts"] == {"total": 300, "completed": 300, "failed": 0}
    assert shown["outputs"]["output"] == str(fleet.folder / "out" / "output.jsonl")
    assert checked.content("c7") == "echo: Number 7"


@on_one_broker
def test_a_bad_line_refuses_the_file_and_enqueues_nothing(shell: Shell) -> None:
    shell.processes.coordinator(shell.env).wait_line("leads|leader|epoch")
    path = shell.write("in.jsonl", [chat("a", "x"), {"custom_id": "b"}, chat("a", "y")])
    done = shell.run("submit", str(path), code=2)
    assert done.out == ""
    assert f"{path}:2: body: " in done.err
    assert f"{path}:3: custom_id: " in done.err
    assert done.err.splitlines()[-1].startswith("producers: error: ")
    store = LocalStore(Path(shell.env["BATCHMILL_STORE_URL"]))
    assert store.list("batches") == []
    assert store.list("active/0") == []
    refused = shell.run("submit", str(path), "--json", code=2).json
    assert refused == shell.run("validate", str(path), "--json", code=2).json
    assert [e["line"] for e in refused["errors"]] == [2, 3]
    assert not (shell.folder / "batchmill-out").exists()


@on_one_broker
def test_skip_invalid_makes_bad_lines_error_results(fleet: Shell) -> None:
    path = fleet.write("in.jsonl", [chat("a", "x"), {"custom_id": "b"}, chat("a", "y"), chat("c", "z"), {"x": 1}])
    shown = fleet.run("submit", str(path), "--skip-invalid", "--json", "-o", "out", code=1).json
    checked = oracle.check(fleet.folder / "out", shown["id"], ["a", "b", "a", "c", None], failed=["b", "a", None])
    assert {line["error"]["code"] for line in checked.errors} == {"invalid_request"}


def _until_all_but_one(process: Process, total: int) -> str:
    """Wait until everything but the request that hangs is answered; the batch's id."""
    match = process.wait_line(rf"(batch_\w+) in progress, {total - 1}/{total} done")
    return match[1]


@on_one_broker
def test_ctrl_c_detaches_and_watch_comes_back(fleet: Shell) -> None:
    path = fleet.write("in.jsonl", [*(chat(f"c{i}", "quick") for i in range(20)), chat("last", "HELD")])
    command = fleet.start("submit", str(path), "--output", "out")
    batch_id = command.wait_line(r"(batch_\w+) in progress")[1]
    command.signal(signal.SIGINT)
    assert command.wait() == 130
    assert f"producers watch {batch_id} --output out" in command.text
    assert "Traceback" not in command.text
    assert not (fleet.folder / "out").exists()
    fleet.let_go()
    shown = fleet.run("watch", batch_id, "--output", "out", "--json").json
    assert shown["status"] == "completed"
    oracle.check(fleet.folder / "out", batch_id, oracle.input_ids(path), failed=[])


@on_one_broker
def test_sigterm_detaches_as_ctrl_c_does(fleet: Shell) -> None:
    command = fleet.start("submit", str(fleet.write("in.jsonl", [chat("a", "HANG")])))
    batch_id = command.wait_line(r"(batch_\w+) in progress")[1]
    assert command.stop() == 130
    assert f"producers watch {batch_id}" in command.text
    assert fleet.run("status", batch_id, "--json").json["status"] == "in_progress"


def test_partial_results_and_cancel_in_mid_run(fleet: Shell) -> None:
    path = fleet.write("in.jsonl", [*(chat(f"c{i}", f"n {i}") for i in range(20)), chat("stuck", "HANG")])
    command = fleet.start("submit", str(path), "--output", "out")
    batch_id = _until_all_but_one(command, 21)
    fleet.run("results", batch_id, code=2)
    shown = fleet.run("results", batch_id, "--partial", "--output", "part", "--json").json
    assert shown["outputs"]["summary"] is None
    checked = oracle.check(fleet.folder / "part", batch_id, oracle.input_ids(path), partial=True)
    assert [line["custom_id"] for line in checked.output] == [f"c{i}" for i in range(20)]
    assert len(fleet.run("results", batch_id, "--partial", "-o", "-").out.splitlines()) == 20
    assert fleet.run("cancel", batch_id, "--json").json == {"id": batch_id, "asked": True, "status": "in_progress"}
    assert command.wait() == 4
    checked = oracle.check(fleet.folder / "out", batch_id, oracle.input_ids(path), failed=["stuck"])
    assert checked.code("stuck") == "batch_cancelled"
    assert "nothing to cancel" in fleet.run("cancel", batch_id).out
    assert fleet.run("results", batch_id, "--json", code=4).json["status"] == "cancelled"


@on_one_broker
def test_the_same_idempotency_key_is_the_same_batch(fleet: Shell) -> None:
    path = fleet.write("in.jsonl", [chat("a", "x")])
    first = fleet.run("submit", str(path), "--idempotency-key", "k", "--json").json
    again = fleet.run("submit", str(path), "--idempotency-key", "k", "--json")
    assert again.json["id"] == first["id"]
    assert "submitted before" in again.err
    assert len(fleet.run("list", "--json").json["data"]) == 1


@on_one_broker
def test_an_output_folder_that_cannot_be_written_is_found_first(shell: Shell) -> None:
    # Who has made the store.
    shell.processes.coordinator(shell.env).wait_line("leads|leader|epoch")
    (shell.folder / "file").touch()
    path = shell.write("in.jsonl", [chat("a", "x")])
    for bad in ("file", "file/below", "/proc/out"):
        done = shell.run("submit", str(path), "--output", bad, code=2)
        assert done.err.startswith("producers: error: output folder")
        assert done.err.count("\n") == 1
    assert shell.run("list", "--json").json["data"] == []


@on_one_broker
def test_an_output_folder_that_goes_bad_later_loses_nothing(fleet: Shell) -> None:
    path = fleet.write("in.jsonl", [chat("a", "HELD")])
    command = fleet.start("submit", str(path), "--output", "out")
    batch_id = command.wait_line(r"(batch_\w+) in progress")[1]
    (fleet.folder / "out").write_text("a file where the folder should be")
    fleet.let_go()
    assert command.wait() == 2
    assert f"producers results {batch_id} --output DIR" in command.text
    fleet.run("results", batch_id, "--output", "else")
    oracle.check(fleet.folder / "else", batch_id, ["a"], failed=[])


def test_detached_and_without_a_coordinator(shell: Shell) -> None:
    path = shell.write("in.jsonl", [chat("a", "x")])
    # Where its outputs could not go is no matter to who has not asked for them yet: a container's command, say.
    (shell.folder / "batchmill-out").touch()
    done = shell.run("submit", str(path), "--detach")
    (shell.folder / "batchmill-out").unlink()
    batch_id = done.out.strip()
    assert "no coordinator" in done.err
    assert f"producers watch {batch_id}" in done.err
    shown = shell.run("status", batch_id, "--json").json
    assert (shown["status"], shown["reason"]) == ("queued", "no_coordinator")
    # Whoever comes later runs it.
    shell.processes.coordinator(shell.env)
    command = shell.start("watch", batch_id)
    command.wait_line("no worker serves")
    shell.processes.worker(shell.env, "echo-test@1")
    assert command.wait() == 0
    oracle.check(shell.folder / "batchmill-out" / batch_id, batch_id, ["a"], failed=[])


def test_a_broker_that_is_not_there_is_three_and_enqueues_nothing(shell: Shell) -> None:
    path = shell.write("in.jsonl", [chat("a", "x")])
    scheme = shell.env["BATCHMILL_BROKER_URL"].partition(":")[0]
    shell.extra["BATCHMILL_BROKER_URL"] = f"{scheme}://127.0.0.1:1/0"
    done = shell.run("submit", str(path), code=3)
    assert done.err.startswith("producers: error: broker ")
    assert done.err.count("\n") == 1
    assert shell.run("list", "--json").json["data"] == []
