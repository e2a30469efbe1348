"""The commands with no broker configured: the embedded fleet comes, serves, is shared, and goes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import make_fleet_env
from tests.e2e.conftest import Shell, chat
from tests.support import oracle
from tests.support.ports import wait_until
from tests.support.processes import Processes


@pytest.fixture
def shell(tmp_path: Path, short_tmp: Path, processes: Processes) -> Iterator[Shell]:
    """Commands with a home folder of their own and no broker; whatever fleet they bring up is ended."""
    folder = tmp_path / "here"
    folder.mkdir()
    env = make_fleet_env(tmp_path, "", "")
    for name in ("BROKER_URL", "STATE_URL", "STORE_URL", "STORE_WAL_DIR", "SECURITY_DISPATCH_KEY_FILE"):
        del env[f"BATCHMILL_{name}"]
    del env["BATCHMILL_SECURITY_RESULTS_KEY_FILE"]
    shell = Shell(
        env | {"BATCHMILL_FLEET_LINGER_S": "120"},
        folder,
        processes,
    )
    shell.env["BATCHMILL_ECHO_FAULTS"] = f"HELD=until:{shell.let_go_file}"
    yield shell
    shell.run("fleet", "down", "--now", code=None)


def worker_states(shell: Shell) -> list[str]:
    return [w["state"] for w in shell.run("fleet", "status", "--json").json["workers"]]


def test_submit_brings_the_fleet_up_and_the_next_one_finds_it(shell: Shell) -> None:
    assert shell.run("fleet", "status", "--json", code=3).json["state"] == "stopped"
    path = shell.write("in.jsonl", [chat(f"c{i}", f"n {i}") for i in range(50)])
    first = shell.run("submit", str(path), "--json", "-o", "one")
    assert "starting the embedded fleet" in first.err
    oracle.check(shell.folder / "one", first.json["id"], oracle.input_ids(path), failed=[])
    # Status looks when it is asked, and a worker is ready before it is given anything. Only a Redis that has not
    # answered for seconds could keep that from it.
    wait_until(lambda: worker_states(shell) == ["ready"], 60, "the worker is shown as ready")
    up = shell.run("fleet", "status", "--json").json
    assert up["state"] == "up"
    second = shell.run("submit", str(path), "--json", "-o", "two")
    assert "starting" not in second.err
    oracle.check(shell.folder / "two", second.json["id"], oracle.input_ids(path), failed=[])
    assert shell.run("fleet", "status", "--json").json["pid"] == up["pid"]
    assert "coordinator-0" in shell.run("fleet", "status").out
    assert shell.run("fleet", "down", "--json").json == {"ended": True}
    assert shell.run("fleet", "down", "--json").json == {"ended": False}
    # The store outlives it.
    assert [b["id"] for b in shell.run("list", "--json").json["data"]] == [second.json["id"], first.json["id"]]


def test_other_settings_reach_an_idle_fleet_and_a_busy_one_of_another_store_is_left(shell: Shell) -> None:
    path = shell.write("in.jsonl", [chat("a", "x")])
    shell.run("submit", str(path), "-o", "one")
    first = shell.run("fleet", "status", "--json").json
    shell.env["BATCHMILL_SCHEDULER_RETRY_TIMES"] = "7"
    again = shell.run("submit", str(path), "-o", "two")
    assert "the running fleet has other settings; starting it anew" in again.err
    assert "busy" not in again.err
    second = shell.run("fleet", "status", "--json").json
    assert (second["pid"] != first["pid"], second["store"]) == (True, first["store"])
    shell.env["BATCHMILL_STORE_URL"] = str(shell.folder / "other")
    in_other = shell.run("submit", str(shell.write("held.jsonl", [chat("b", "HELD")])), "--detach").out.strip()
    assert shell.run("fleet", "status", "--json").json["store"] == str(shell.folder / "other")
    del shell.env["BATCHMILL_STORE_URL"]
    refused = shell.run("submit", str(path), "-o", "three", code=3)
    assert f"runs batches of another store, {shell.folder / 'other'}" in refused.err
    assert len(shell.run("list", "--json").json["data"]) == 2, "nothing was enqueued where nobody would run it"
    shell.env["BATCHMILL_STORE_URL"] = str(shell.folder / "other")
    shell.run("cancel", in_other)


def test_ctrl_c_leaves_the_fleet_at_work(shell: Shell) -> None:
    path = shell.write("in.jsonl", [chat("a", "quick"), chat("b", "HELD")])
    command = shell.start("submit", str(path))
    batch_id = command.wait_line(r"(batch_\w+) in progress")[1]
    command.signal(signal.SIGINT)
    assert command.wait() == 130
    shell.let_go()
    shell.run("watch", batch_id, "--output", "out")
    oracle.check(shell.folder / "out", batch_id, ["a", "b"], failed=[])


def test_resume_brings_back_what_was_killed(shell: Shell) -> None:
    path = shell.write("in.jsonl", [chat("a", "quick"), chat("b", "HELD")])
    batch_id = shell.run("submit", str(path), "--detach").out.strip()
    os.kill(shell.run("fleet", "status", "--json").json["pid"], signal.SIGKILL)
    wait_until(lambda: shell.run("fleet", "status", code=None).code == 3, 30, "the fleet is gone")
    shell.let_go()
    done = shell.run("resume", "--output", "out", "--json")
    assert f"1 unfinished batch:\n  {batch_id} " in done.err
    assert [(b["id"], b["status"]) for b in done.json["data"]] == [(batch_id, "completed")]
    oracle.check(shell.folder / "out" / batch_id, batch_id, ["a", "b"], failed=[])
    assert "nothing to resume" in shell.run("resume").err


def test_no_model_is_loaded_before_a_batch_may_run(shell: Shell) -> None:
    path = shell.write("in.jsonl", [chat("a", "x")])
    batch_id = shell.run("submit", str(path), "--detach", "--not-before", "1h").out.strip()
    status = ("status", batch_id, "--json")
    wait_until(lambda: shell.run(*status).json["reason"] == "scheduled", 60, "the coordinator has it")
    assert shell.run("fleet", "status", "--json").json["workers"] == []
    # Another batch gets its worker all the same.
    oracle_of = shell.run("submit", str(path), "--json", "-o", "out").json["id"]
    oracle.check(shell.folder / "out", oracle_of, ["a"], failed=[])
    shell.run("cancel", batch_id)
    assert shell.run("watch", batch_id, "--json", code=4).json["status"] == "cancelled"


def test_a_paused_batch_keeps_no_fleet_and_going_on_brings_it_back(shell: Shell) -> None:
    shell.env["BATCHMILL_FLEET_LINGER_S"] = "1"
    path = shell.write("in.jsonl", [chat("a", "x")])
    batch_id = shell.run("submit", str(path), "--detach", "--not-before", "1h").out.strip()
    shell.run("pause", batch_id)
    wait_until(lambda: shell.run("fleet", "status", code=None).code == 3, 60, "the fleet has ended by itself")
    told = shell.run("status", batch_id).out
    assert "paused: nothing is sent" in told
    assert "does not run" not in told
    shell.run("resume-dispatch", batch_id)
    status = ("status", batch_id, "--json")
    wait_until(lambda: shell.run(*status).json["reason"] == "scheduled", 60, "it goes on, and the fleet with it")
    assert shell.run("fleet", "status", "--json").json["workers"] == []
    shell.run("cancel", batch_id)
    assert shell.run("watch", batch_id, "--json", code=4).json["status"] == "cancelled"


def test_partial_results_find_the_log_of_the_embedded_fleet(shell: Shell) -> None:
    path = shell.write("in.jsonl", [chat("a", "quick"), chat("b", "HELD")])
    batch_id = shell.run("submit", str(path), "--detach").out.strip()
    status = ("status", batch_id, "--json")
    wait_until(lambda: shell.run(*status).json["request_counts"]["completed"] == 1, 60, "one is answered")
    shell.run("results", batch_id, "--partial", "--output", "part")
    checked = oracle.check(shell.folder / "part", batch_id, ["a", "b"], partial=True)
    assert [line["custom_id"] for line in checked.output] == ["a"]


def test_an_engine_that_cannot_start_ends_following_and_keeps_the_batch(shell: Shell) -> None:
    path = shell.write("in.jsonl", [chat("a", "x")])
    shell.extra["BATCHMILL_ECHO_FAULTS"] = "nonsense"
    done = shell.run("submit", str(path), code=3)
    last = done.err.splitlines()[-1]
    assert last.startswith("producers: error: the worker of echo-test@1 cannot start: ")
    assert "log: " in last
    (seen,) = shell.run("list", "--json").json["data"]
    assert f"producers watch {seen['id']}" in last
    # Put right, it goes on where it was.
    del shell.extra["BATCHMILL_ECHO_FAULTS"]
    shell.run("fleet", "down")
    shell.run("watch", seen["id"], "--output", "out")
    oracle.check(shell.folder / "out", seen["id"], ["a"], failed=[])


def test_fleet_up_returns_when_the_model_is_ready(shell: Shell) -> None:
    shown = shell.run("fleet", "up", "--json").json
    assert (shown["state"], [w["state"] for w in shown["workers"]]) == ("up", ["ready"])
    # To stay: it does not end by itself.
    assert shown["ends_at"] is None


def test_a_bad_file_starts_no_fleet(shell: Shell) -> None:
    shell.run("submit", str(shell.write("in.jsonl", [{"custom_id": "a"}])), code=2)
    assert shell.run("fleet", "status", "--json", code=3).json["state"] == "stopped"


def test_fleet_up_refuses_beside_a_configured_broker(shell: Shell) -> None:
    shell.extra["BATCHMILL_BROKER_URL"] = "redis://127.0.0.1:1/0"
    assert "broker.url is set" in shell.run("fleet", "up", code=2).err
