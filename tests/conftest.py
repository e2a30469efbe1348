"""Fixtures that all tests share: real brokers, a fleet's settings, subprocesses that never outlive their test."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import structlog

from common import settings as settings_module
from common.settings import Settings
from tests.fault import table
from tests.support.brokers import (
    Broker,
    RabbitBroker,
    RabbitServer,
    RedisBroker,
    RedisServer,
    rabbit_server,
    redis_server,
)
from tests.support.processes import Processes

ARTIFACTS = Path(__file__).parent / "artifacts"

#: The model version that `fleet_env` serves with the echo engine.
ECHO_MODEL = "echo-test@1"


def pytest_configure(config: pytest.Config) -> None:
    """A person's own settings must not reach the tests, nor a busy machine's pace those that Hypothesis makes."""
    hypothesis.settings.register_profile(
        "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("patient")
    # Begun in the background of a script, or by nohup: commands under test would inherit what is ignored.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    for name in [n for n in os.environ if n.startswith("BATCHMILL_") and not n.startswith("BATCHMILL_TEST_")]:
        # Where pulled models lie is a property of the machine; everything else is a test's own business.
        if name != "BATCHMILL_INFERENCE_MODELS_DIR":
            del os.environ[name]


#: The longest tests, the longest first: whichever came last would keep one process alone at work.
LONGEST = ("test_a_coordinator_killed_at_any_point", "test_requests_that_kill[", "test_chaos", "killed_again_and_again")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, where several processes share them.

    `--dist worksteal` cuts the list into a part for each; who has done its own takes from the end of another's. So each
    part gets the same share of long tests, which it begins with, and ends with short ones.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes == 1:
        return

    def rank(item: pytest.Item) -> tuple[int, int, int]:
        longest = next((n for n, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST))
        if "/unit/" in item.nodeid:
            return longest, 1, 0
        # Mixed, so that the heaviest ones do not all run at the same time; but modules stay together, since what their
        # fixtures start is ended at the first test of another one.
        mixed = item.nodeid if "/fault/" in item.nodeid else item.nodeid.partition("::")[0]
        return longest, 0, zlib.crc32(mixed.encode())

    ordered = sorted(items, key=rank)
    # The first parts are the shorter ones where the list does not divide evenly.
    items[:] = [item for part in reversed(range(processes)) for item in ordered[part::processes]]


@pytest.fixture(autouse=True)
def loggers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that runs a command in this process sets up its logs; no other test's output may go where they went."""
    configure = structlog.configure
    monkeypatch.setattr(structlog, "configure", lambda **how: configure(**how | {"cache_logger_on_first_use": False}))
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def short_tmp() -> Iterator[Path]:
    """A folder with a short path, for Unix sockets (108 bytes at most)."""
    with tempfile.TemporaryDirectory(prefix="bm-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The session's Redis server."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def rabbit_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """The session's RabbitMQ node."""
    with rabbit_server(tmp_path_factory.mktemp("rabbit")) as server:
        yield server


@pytest.fixture
def redis_broker(redis_process: RedisServer) -> Iterator[RedisBroker]:
    """An unused database of the Redis server; the server runs again afterwards, whatever the test did to it."""
    broker = RedisBroker(redis_process)
    yield broker
    _revive(redis_process)
    broker.wipe_state()


@pytest.fixture
def rabbit_broker(rabbit_process: RabbitServer, redis_process: RedisServer) -> Iterator[RabbitBroker]:
    """An unused vhost of the RabbitMQ node, with an unused Redis database for live state."""
    broker = RabbitBroker(rabbit_process, redis_process)
    yield broker
    _revive(redis_process)
    _revive(rabbit_process)
    rabbit_process.retire(broker.vhost)
    broker.wipe_state()


def _revive(server: RedisServer | RabbitServer) -> None:
    if server.alive:
        server.resume()
    else:
        server.start()


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> Broker:
    """The same test on both brokers."""
    found: Broker = request.getfixturevalue("redis_broker" if request.param == "redis" else "rabbit_broker")
    return found


def make_fleet_env(folder: Path, broker_url: str, state_url: str) -> dict[str, str]:
    """Environment of a fleet with the echo engine: own store, own keys, one model version, no file of this project."""
    config = folder / "fleet-config"
    config.mkdir(exist_ok=True)
    (config / "fleet.yaml").write_text("")
    (config / "models.yaml").write_text(
        f"default: {ECHO_MODEL}\nmodels:\n  {ECHO_MODEL}:\n    source: {folder}/no-weights\n"
        "    engine: {max_num_seqs: 64, max_model_len: 4096}\n    hardware: {gpus: 0}\n"
    )
    env = {
        "BATCHMILL_CONFIG": str(config / "fleet.yaml"),
        "BATCHMILL_MODELS": str(config / "models.yaml"),
        "BATCHMILL_HOME": str(folder / "home"),
        "BATCHMILL_BROKER_URL": broker_url,
        "BATCHMILL_STATE_URL": state_url,
        "BATCHMILL_STORE_URL": str(folder / "store"),
        "BATCHMILL_STORE_WAL_DIR": str(folder / "wal"),
        "BATCHMILL_INFERENCE_ENGINE": "echo",
        "BATCHMILL_INFERENCE_DRAIN_S": "5",
    }
    for name in ("dispatch", "results"):
        file = config / f"{name}.key"
        if not file.exists():
            file.touch(mode=0o600)
            file.write_text(secrets.token_hex(32))
        env[f"BATCHMILL_SECURITY_{name.upper()}_KEY_FILE"] = str(file)
    return env


@pytest.fixture
def fleet_env(tmp_path: Path, broker: Broker) -> dict[str, str]:
    """Environment for commands of a fleet on `broker` (so the test runs on both); see `make_fleet_env`."""
    return make_fleet_env(tmp_path, broker.url, broker.state_url)


@pytest.fixture
def fleet_settings(fleet_env: dict[str, str]) -> Settings:
    """The settings those commands see."""
    return settings_module.load(env=fleet_env)


@pytest.fixture
def processes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Processes]:
    """Starts subprocesses; none is left afterwards. On failure their logs are in the report and tests/artifacts/."""
    folder = tmp_path / "processes"
    folder.mkdir()
    manager = Processes(folder)
    request.node.stash[_PROCESSES] = manager
    try:
        yield manager
    finally:
        manager.close()


_PROCESSES = pytest.StashKey[Processes]()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table of the fault suite, where cases of it ran. Here, since xdist loads no other conftest in the process
    that prints.
    """
    table.summarise(terminalreporter)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show and keep the logs of a failed test's processes."""
    report: Any = yield
    if report.skipped and os.environ.get("CI") == "true":
        # What a test needs must be there where the result counts.
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"skipped in CI: {reason}"
    manager = item.stash.get(_PROCESSES, None)
    if manager is not None and report.failed and report.when != "setup":
        kept = ARTIFACTS / "logs" / re.sub(r"[^\w.-]+", "-", item.nodeid)
        with contextlib.suppress(OSError):
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(manager.folder, kept)
        for process in manager.started:
            text = "\n".join(process.lines[-40:])
            report.sections.append((f"log of {process.name} ({kept / process.log.name})", text))
    return report  # type: ignore[no-any-return]
