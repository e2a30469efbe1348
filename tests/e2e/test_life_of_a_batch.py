"""Deadlines, pauses, retries and what follows a crash, as a user types them."""

from __future__ import annotations

import json

from tests.e2e.conftest import Shell, chat, on_one_broker
from tests.support import oracle
from tests.support.ports import wait_until


@on_one_broker
def test_what_expires_is_retried_and_merged(fleet: Shell) -> None:
    ids = [f"c{i}" for i in range(60)]
    stuck = {"c7", "c30", "c59"}
    path = fleet.write("in.jsonl", [chat(i, f"HANG {i}" if i in stuck else f"hello {i}") for i in ids])
    done = fleet.run("submit", str(path), "--completion-window", "5s", "--tenant", "lab", "--json", code=4).json
    assert (done["status"], done["tenant"]) == ("expired", "lab")
    checked = oracle.check(fleet.folder / "batchmill-out" / done["id"], done["id"], ids)
    # How far it came in five seconds is the machine's affair.
    failed = [line["custom_id"] for line in checked.errors]
    assert stuck <= set(failed)
    assert {checked.code(i) for i in failed} == {"batch_expired"}
    assert done["request_counts"] == {"total": 60, "completed": 60 - len(failed), "failed": len(failed)}
    # Some prompts hang still, so the retry expires as well, and says so of all.
    again = fleet.run("retry", done["id"], "--completion-window", "3s", "--json", "--merged", "-o", "all", code=4).json
    assert (again["retry_of"], again["request_counts"]["total"]) == (done["id"], len(failed))
    assert fleet.run("retry", done["id"], "--json", code=4).json["id"] == again["id"]
    lines = fleet.run("results", again["id"], "--merged", "-o", "-", code=4).out.splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == ids
    summary = json.loads((fleet.folder / "all" / "summary.json").read_text())
    assert summary["merged"] == [done["id"], again["id"]]
    assert summary["completed"] == done["request_counts"]["completed"] + again["request_counts"]["completed"]


@on_one_broker
def test_a_batch_is_paused_changed_and_let_go_on(fleet: Shell) -> None:
    path = fleet.write("in.jsonl", [chat("a", "x")])
    batch_id = fleet.run("submit", str(path), "-d", "--not-before", "1h").out.strip()

    def shown() -> dict[str, object]:
        return fleet.run("status", batch_id, "--json").json

    wait_until(lambda: shown()["reason"] == "scheduled", 30, "it waits for its hour")
    assert "waiting until " in fleet.run("list").out
    assert "paused" not in fleet.run("pause", batch_id).err
    fleet.run("reprioritize", batch_id, "--priority", "urgent")
    wait_until(lambda: (shown()["reason"], shown()["priority"]) == ("paused", "urgent"), 30, "it is paused and urgent")
    assert "producers resume-dispatch" in fleet.run("status", batch_id).out
    fleet.run("resume-dispatch", batch_id)
    wait_until(lambda: shown()["reason"] == "scheduled", 30, "it goes on")
    fleet.run("cancel", batch_id)
    assert fleet.run("watch", batch_id, "--json", code=4).json["status"] == "cancelled"
    assert "there is nothing to pause" in fleet.run("pause", batch_id, code=2).err


@on_one_broker
def test_a_window_that_is_over_when_the_fleet_comes_up(shell: Shell) -> None:
    """No coordinator ran at the deadline, and none ever sent anything."""
    path = shell.write("in.jsonl", [chat("a", "x"), chat("b", "y")])
    batch_id = shell.run("submit", str(path), "-d", "--completion-window", "1s").out.strip()
    shell.processes.coordinator(shell.env)
    assert shell.run("watch", batch_id, "--json", code=4).json["status"] == "expired"
    oracle.check(shell.folder / "batchmill-out" / batch_id, batch_id, ["a", "b"], failed=["a", "b"])
