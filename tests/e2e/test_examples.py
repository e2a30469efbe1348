"""The examples as their users run them."""

from __future__ import annotations

import json

from tests.e2e.conftest import Shell, on_one_broker
from tests.support import oracle
from tests.support.processes import ROOT

EXAMPLES = ROOT / "examples"


def test_the_demo_file_has_what_it_promises() -> None:
    requests = [json.loads(line) for line in (EXAMPLES / "demo.jsonl").read_text().splitlines()]
    assert len(requests) >= 24
    assert {r.get("url") for r in requests} == {"/v1/chat/completions", "/v1/completions", None}
    assert any("response_format" in r["body"] for r in requests)
    bodies = [json.dumps(r["body"], sort_keys=True) for r in requests]
    assert sum(bodies.count(body) == 2 for body in bodies) == 2
    prompts = [r["body"]["messages"][0]["content"] for r in requests if "messages" in r["body"]]
    assert max(prompts.count(prompt) for prompt in prompts) >= 8


@on_one_broker
def test_python_client(fleet: Shell) -> None:
    script = fleet.processes.python("client", str(EXAMPLES / "python_client.py"), env=fleet.env, cwd=fleet.folder)
    assert script.wait() == 0
    cities = ("Lisbon", "Nairobi", "Osaka", "Quito")
    said = [line for line in script.lines if line.startswith(cities)]
    assert said == [f"{city}: echo: Name one thing that {city} is known for." for city in cities]
    (seen,) = fleet.run("list", "--json").json["data"]
    assert (seen["name"], seen["metadata"]) == ("cities", {"example": "python_client"})


@on_one_broker
def test_show_answers(fleet: Shell) -> None:
    fleet.run("submit", str(EXAMPLES / "demo.jsonl"), "--output", "out", code=1)
    script = fleet.processes.python("show", str(EXAMPLES / "show_answers.py"), "out", cwd=fleet.folder)
    assert script.wait() == 0
    assert "support-1  echo: When do you open?" in script.text
    assert "too-long  refused: This model's maximum context length is 4096 tokens." in script.text


def test_submit_from_another_service(fleet: Shell) -> None:
    broker = {"BATCHMILL_BROKER_URL": fleet.env["BATCHMILL_BROKER_URL"]}
    script = fleet.processes.python("service", str(EXAMPLES / "submit_from_another_service.py"), env=broker)
    assert script.wait() == 0
    batch_id = script.lines[-1]
    shown = fleet.run("watch", batch_id, "--output", "out", "--json").json
    assert shown["name"] == "from a service"
    checked = oracle.check(fleet.folder / "out", batch_id, ["sky", "sea", "sun"], failed=[])
    assert checked.content("sea") == "echo: Why is the sea salty?"
