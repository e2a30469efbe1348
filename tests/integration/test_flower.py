"""Flower as a person sees it: worker, engine and tasks of a running batch, and no prompt anywhere."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

import pytest
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from tests.conftest import ARTIFACTS, ECHO_MODEL
from tests.support.brokers import Broker
from tests.support.browser import browser
from tests.support.ports import free_port, wait_until
from tests.support.processes import ROOT, Process, Processes

SECRET = "zanzibar"
NODE = f"echo-test.1.cpu0@{socket.gethostname()}"


@pytest.fixture
def flower(fleet_env: dict[str, str], processes: Processes) -> str:
    """Flower as `make flower` and the image start it; its address."""
    port = free_port()
    env = fleet_env | {"FLOWER_PORT": str(port)}
    conf = str(ROOT / "config" / "flowerconfig.py")
    process = processes.python("flower", "-m", "common.flower", f"--conf={conf}", env=env)
    process.wait_line(f"Visit me at http://127.0.0.1:{port}", 60)
    return f"http://127.0.0.1:{port}"


def submit(processes: Processes, env: dict[str, str], folder: Path, count: int) -> Process:
    path = folder / "in.jsonl"
    body = {"messages": [{"role": "user", "content": f"tell me of {SECRET}"}], "max_tokens": 5}
    path.write_text("".join(json.dumps({"custom_id": f"r{n}", "body": body}) + "\n" for n in range(count)))
    return processes.python("submit", "-m", "producers", "submit", str(path), "--output", str(folder / "out"), env=env)


def text_when(chrome: Chrome, url: str, *needles: str, timeout: float = 60) -> str:
    """The page's text without white space, once it has all of `needles`; the page is loaded again until then."""

    def look(driver: Chrome) -> str | None:
        # Long names are broken over lines.
        text = "".join(driver.find_element(By.TAG_NAME, "body").text.split())
        return text if all(n in text for n in needles) else None

    deadline = time.monotonic() + timeout
    while True:
        chrome.get(url)
        try:
            # Tables fill a moment after the page has come.
            found: str = WebDriverWait(chrome, 5, poll_frequency=0.2).until(look)
            return found
        except TimeoutException:
            if time.monotonic() > deadline:
                text = chrome.find_element(By.TAG_NAME, "body").text
                raise AssertionError(f"{url} does not show {needles}; it shows:\n{text}") from None


def test_flower_shows_workers_engines_and_tasks_but_no_prompt(
    broker: Broker, fleet_env: dict[str, str], flower: str, processes: Processes, tmp_path: Path
) -> None:
    env = fleet_env | {"BATCHMILL_ECHO_LATENCY_MS": "20"}
    processes.coordinator(env).wait_line("leads", 60)
    processes.worker(env, ECHO_MODEL).wait_line("ready", 60)
    ARTIFACTS.mkdir(exist_ok=True)
    with browser(tmp_path) as chrome:
        text_when(chrome, f"{flower}/workers", NODE)
        done = submit(processes, env, tmp_path, 600)
        assert done.wait(120) == 0, done.text

        tasks = text_when(chrome, f"{flower}/tasks", "chunk_", "requests=256batch=batch_", "SUCCESS", NODE)
        assert SECRET not in tasks
        chrome.save_screenshot(str(ARTIFACTS / f"flower-tasks-{broker.kind}.png"))
        # In one go: the table is drawn anew every now and then.
        link = chrome.execute_script("return document.querySelector('#tasks-table tbody a').href")
        assert "/task/chunk_" in link
        chunk_id = link.rpartition("/")[2]
        task = text_when(chrome, link, "batchmill.infer_chunk", f"chunk={chunk_id}", "requests=")
        assert SECRET not in task

        workers = text_when(chrome, f"{flower}/workers", NODE)
        assert SECRET not in workers
        chrome.save_screenshot(str(ARTIFACTS / f"flower-workers-{broker.kind}.png"))

        # Every row of the tab that opens first, as name and value.
        text_when(chrome, f"{flower}/worker/{NODE}", ECHO_MODEL, "Maxmodellen4096")
        rows = [r.text for r in chrome.find_elements(By.CSS_SELECTOR, "#tab-pool tr")]
        pool = "\n".join(rows)
        for shown in (f"Model {ECHO_MODEL}", "Device cpu", "Engine echo", "Max num seqs 64", "Max model len 4096"):
            assert shown in pool, pool
        chrome.save_screenshot(str(ARTIFACTS / f"flower-pool-{broker.kind}.png"))
        for tab in ("tasks", "queues", "config", "system"):
            chrome.find_element(By.ID, f"worker-tab-{tab}").click()
            assert SECRET not in chrome.page_source

        def queue_is_shown() -> bool:
            # Flower shows what the worker had answered by then; each load asks it again.
            chrome.get(f"{flower}/worker/{NODE}")
            return "infer.echo-test.1" in chrome.page_source

        wait_until(queue_is_shown, 60, "the worker's queue is shown", 1)
    assert all(SECRET not in p.text for p in processes.started)


def test_flower_listens_on_loopback_and_changes_nothing(
    redis_broker: Broker, processes: Processes, tmp_path: Path
) -> None:
    conf: dict[str, object] = {}
    exec((ROOT / "config" / "flowerconfig.py").read_text(), conf)
    assert conf["address"] == "127.0.0.1"
    assert conf["read_only"] is True
    assert conf["enable_events"] is False


def test_without_a_broker_or_a_fleet_it_says_so(processes: Processes, tmp_path: Path) -> None:
    env = {"BATCHMILL_HOME": str(tmp_path / "none")}
    process = processes.python("flower", "-m", "common.flower", env=env)
    assert process.wait(60) == 2
    assert re.fullmatch(r"flower: error: no broker is configured .*", process.text)


def test_a_port_that_is_taken_is_one_line(fleet_env: dict[str, str], processes: Processes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = fleet_env | {"FLOWER_PORT": str(taken.getsockname()[1])}
        process = processes.python("flower", "-m", "common.flower", f"--conf={ROOT}/config/flowerconfig.py", env=env)
        assert process.wait(60) == 2
    assert "Traceback" not in process.text
    assert process.text.splitlines()[-1].startswith("flower: error: cannot listen: Address already in use; ")
