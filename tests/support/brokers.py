"""Real brokers for tests: a private Redis and a private RabbitMQ on free loopback ports, with temporary folders.

A `Broker` is what a test sees: one isolated corner (a Redis database, a RabbitMQ vhost with a Redis database for live
state) of a server that lives as long as the test session. `kill`, `start` and `restart` act on the whole server, which
every test gets back running.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import redis

from tests.support.ports import free_port, port_open, wait_until

#: The wrapper in /usr/sbin changes to another user, who cannot write our folders.
RABBITMQ = (Path("/usr/lib/rabbitmq/bin/rabbitmq-server"), Path("/opt/rabbitmq/sbin/rabbitmq-server"))


def missing(what: str, install: str) -> None:
    """Fail in CI, skip on a laptop."""
    text = f"{what} is missing; install it: {install}"
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    pytest.skip(text)


def die_with_parent(argv: list[str]) -> list[str]:
    """The command, ended by the kernel when the test run is killed; setpriv belongs to every Debian."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--", *argv] if setpriv else argv


def end(process: subprocess.Popen[bytes], sig: int = signal.SIGKILL, timeout: float = 120) -> None:
    """End a process of ours and all below it."""
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(sig)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout)
    for child in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


class RedisServer:
    """A redis-server with an append-only file, so that a killed one comes back with what it had."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = itertools.count(1)

    def start(self) -> None:
        """Start it (again) and wait until it answers."""
        binary = shutil.which("redis-server")
        if binary is None:
            missing("redis-server", "apt-get install redis-server")
            raise AssertionError
        argv = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        argv += ["--save", "", "--appendonly", "yes", "--maxmemory-policy", "noeviction", "--databases", "4096"]
        with open(self.folder / "redis.log", "ab") as log:
            self._process = subprocess.Popen(die_with_parent(argv), stdout=log, stderr=subprocess.STDOUT)
        client = redis.Redis(port=self.port, socket_timeout=10)
        with contextlib.closing(client):
            wait_until(lambda: _pings(client), 15, f"redis-server answers (log: {self.folder}/redis.log)", 0.02)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            end(self._process)
            self._process = None

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing, as a hanging machine does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def alive(self) -> bool:
        """True while it runs."""
        return self._process is not None and self._process.poll() is None

    def database(self) -> int:
        """The number of a database nobody has used yet."""
        return next(self._databases)

    def client(self, database: int) -> redis.Redis:
        """A client of one database."""
        return redis.Redis(port=self.port, db=database, socket_timeout=30)


class RabbitServer:
    """A RabbitMQ node with its own epmd, cookie and folders, and the management plugin for asking about queues."""

    def __init__(self, folder: Path, conf: str = "", login: str = "guest:guest") -> None:
        self.folder = folder
        self._login = base64.b64encode(login.encode()).decode()
        self.port, self.management_port = free_port(), free_port()
        self._dist_port, self._epmd_port = free_port(), free_port()
        self._node = f"bm{secrets.token_hex(4)}@localhost"
        self._process: subprocess.Popen[bytes] | None = None
        self._epmd: subprocess.Popen[bytes] | None = None
        self._vhosts = itertools.count(1)
        self._retired: list[str] = []
        self._started_at = 0.0
        (folder / "home").mkdir()
        (folder / "plugins").write_text("[rabbitmq_management].\n")
        # Numbers of unacked messages are refreshed by ticks, deliveries checked for their timeout by others; tests
        # should not wait 5 and 60 s for each.
        (folder / "advanced.config").write_text(
            "[{rabbit,[{quorum_tick_interval,300},{collect_statistics_interval,500},"
            "{channel_tick_interval,1000},"
            '{loopback_users,[<<"guest">>]},{disk_free_limit,10000000}]},'
            f'{{rabbitmq_management,[{{tcp_config,[{{port,{self.management_port}}},{{ip,"127.0.0.1"}}]}}]}}].\n'
        )
        (folder / "rabbitmq.conf").write_text(f"log.console = true\nlog.console.level = warning\n{conf}")

    def start(self) -> None:
        """Start it (again) and wait until it serves; about 14 s on two cores."""
        script = next((p for p in RABBITMQ if p.exists()), None)
        if script is None:
            missing("RabbitMQ", "apt-get install rabbitmq-server")
            raise AssertionError
        env = self.environment()
        epmd = shutil.which("epmd") or "epmd"
        with open(self.folder / "rabbitmq.log", "ab") as log:
            if self._epmd is None or self._epmd.poll() is not None:
                argv = [epmd, "-address", "127.0.0.1", "-port", str(self._epmd_port)]
                self._epmd = subprocess.Popen(die_with_parent(argv), stdout=log, stderr=subprocess.STDOUT, env=env)
                wait_until(lambda: port_open(self._epmd_port), 10, "epmd listens", 0.02)
            self._process = subprocess.Popen(
                die_with_parent(["sh", str(script)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        wait_until(self._serves, 240, f"RabbitMQ serves (log: {self.folder}/rabbitmq.log)", 0.2)
        self._started_at = time.monotonic()

    def environment(self) -> dict[str, str]:
        """For the server, and for RabbitMQ's own tools on it."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RABBITMQ_", "ERL_"))}
        return kept | {
            "HOME": str(self.folder / "home"),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.folder / "advanced.config"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "none"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script then becomes the server, instead of its parent
            "LC_ALL": "C.UTF-8",
        }

    def _serves(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            text = (self.folder / "rabbitmq.log").read_text("utf-8", "replace")
            raise AssertionError(f"RabbitMQ ended with {self._process.returncode}:\n{text[-3000:]}")
        try:
            # The listener for AMQP opens last but one; this answers only when the node is whole.
            return port_open(self.port) and bool(self.api("GET", "overview"))
        except (OSError, urllib.error.URLError):
            return False

    def kill(self) -> None:
        """SIGKILL (epmd stays: it belongs to the machine, not to the node)."""
        if self._process is not None:
            end(self._process)
            self._process = None

    def stop(self) -> None:
        """End everything, epmd too."""
        self.kill()
        if self._epmd is not None:
            end(self._epmd)
            self._epmd = None

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def alive(self) -> bool:
        """True while it runs."""
        return self._process is not None and self._process.poll() is None

    def memory_alarm(self, raised: bool) -> None:
        """Let it find its memory used up (it blocks who publishes then), or not any more."""
        tool = next(p.with_name("rabbitmqctl") for p in RABBITMQ if p.exists())
        argv = [str(tool), "set_vm_memory_high_watermark", *(["absolute", "1"] if raised else ["0.9"])]
        subprocess.run(argv, env=self.environment(), check=True, capture_output=True, timeout=60)

    def vhost(self) -> str:
        """A fresh vhost."""
        name = f"test{next(self._vhosts)}"
        self.api("PUT", f"vhosts/{name}", {})
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        self.api("PUT", f"permissions/{name}/guest", everything)
        return name

    def retire(self, vhost: str) -> None:
        """Delete a vhost that nobody uses any more, once the node has been up for a while.

        RabbitMQ 3.10 starts what dead-letters for each quorum queue as it comes up. A queue that is deleted meanwhile
        makes that crash over and over, until its supervisor ends with it, and from then on no quorum queue with dead
        lettering can be declared on the node.
        """
        self._retired.append(vhost)
        if time.monotonic() - self._started_at > 60:
            there = {found["name"] for found in self.api("GET", "vhosts")}
            for name in there.intersection(self._retired):
                self.api("DELETE", f"vhosts/{name}")
            self._retired.clear()

    def api(self, method: str, path: str, body: Any = None) -> Any:
        """One call of the management API; None when the answer has no body."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.management_port}/api/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Basic {self._login}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None


def _pings(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


class Depth(NamedTuple):
    """Messages of a queue: waiting, and delivered but not acked."""

    ready: int
    unacked: int


class Broker(ABC):
    """One test's corner of a broker. `url` is a broker URL, `state_url` the Redis for live state."""

    kind: str
    url: str
    state_url: str

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL the broker's server."""

    @abstractmethod
    def start(self) -> None:
        """Start the server again with what it had on disk."""

    @abstractmethod
    def pause(self) -> None:
        """Stop the server's process without ending it (SIGSTOP)."""

    @abstractmethod
    def resume(self) -> None:
        """Let a paused server go on."""

    def restart(self) -> None:
        """`kill` and `start`: what was confirmed is still there."""
        self.kill()
        self.start()

    @abstractmethod
    def wait_saved(self, *queues: str) -> None:
        """Wait until a kill cannot make the broker forget these queues, or any that there is."""

    @abstractmethod
    def wipe(self) -> None:
        """Lose everything at once: all queues, and all live state."""

    @abstractmethod
    def purge(self, queue: str) -> None:
        """Lose the messages that wait in one queue."""

    @abstractmethod
    def queues(self) -> list[str]:
        """Names of the queues that hold something (Redis) or exist (RabbitMQ), without Celery's own."""

    @abstractmethod
    def depth(self, queue: str) -> Depth:
        """How many messages wait and are out; zeros for a queue that does not exist."""

    def wait_depth(
        self, queue: str, *, ready: int | None = None, unacked: int | None = None, timeout: float = 30
    ) -> None:
        """Wait until the queue has these numbers."""
        wait_until(
            lambda: _fits(self.depth(queue), ready, unacked),
            timeout,
            lambda: f"{queue} has ready={ready} unacked={unacked}; it has {self.depth(queue)}",
        )

    @property
    def state(self) -> redis.Redis:
        """A client of the live state's database."""
        return redis.Redis.from_url(self.state_url, socket_timeout=30)

    def wipe_state(self) -> None:
        """Lose the live state alone (on Redis as broker that is everything)."""
        with contextlib.closing(self.state) as client:
            client.flushdb()


def _fits(depth: Depth, ready: int | None, unacked: int | None) -> bool:
    return (ready is None or depth.ready == ready) and (unacked is None or depth.unacked == unacked)


class RedisBroker(Broker):
    """A database of the Redis server; live state shares it, as it does by default."""

    kind = "redis"

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self._database = server.database()
        self.url = self.state_url = f"redis://127.0.0.1:{server.port}/{self._database}"

    def kill(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start()

    def pause(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    def wait_saved(self, *queues: str) -> None:
        """Nothing to wait for: every write is in Redis' append-only file before it is answered."""

    def wipe(self) -> None:
        self.wipe_state()

    def purge(self, queue: str) -> None:
        with contextlib.closing(self.state) as client:
            client.delete(queue)

    def queues(self) -> list[str]:
        with contextlib.closing(self.state) as client:
            names = [k.decode() for k in client.scan_iter(_type="list", count=1000)]
        return sorted(n for n in names if not _is_celerys(n))

    def depth(self, queue: str) -> Depth:
        with contextlib.closing(self.state) as client:
            ready = client.llen(queue)
            held: Any = client.hvals("unacked")
        # kombu keeps a delivered message as [message, exchange, routing key].
        return Depth(int(ready), sum(1 for h in held if json.loads(h)[2] == queue))


class RabbitBroker(Broker):
    """A vhost of the RabbitMQ node, and a database of the Redis server for live state."""

    kind = "rabbitmq"

    def __init__(self, server: RabbitServer, state: RedisServer) -> None:
        self.server = server
        self.state_server = state
        self.vhost = server.vhost()
        self.url = f"amqp://guest:guest@127.0.0.1:{server.port}/{self.vhost}"
        self.state_url = f"redis://127.0.0.1:{state.port}/{state.database()}"

    def kill(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start()

    def pause(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    def wait_saved(self, *queues: str) -> None:
        # Its directory of quorum queues is a dets table that is saved a while after a change, 500 ms when the machine
        # has time: a younger queue comes back empty, and no event tells.
        wanted = [f"{self.vhost}_{name}".encode() for name in queues or self._quorum_queues()]
        (table,) = (self.server.folder / "mnesia").glob("*/quorum/*/names.dets")

        def saved() -> bool:
            known = table.read_bytes()
            return all(name in known for name in wanted) and time.time() - table.stat().st_mtime > 1

        wait_until(saved, 30, f"RabbitMQ has saved that there are {wanted}")

    def wipe(self) -> None:
        for name in self._names():
            self.server.api("DELETE", f"queues/{self.vhost}/{urllib.parse.quote(name, safe='')}")
        self.wipe_state()

    def purge(self, queue: str) -> None:
        self.server.api("DELETE", f"queues/{self.vhost}/{urllib.parse.quote(queue, safe='')}/contents")

    def _names(self) -> list[str]:
        found = self.server.api("GET", f"queues/{self.vhost}?disable_stats=true&enable_queue_totals=true")
        return [q["name"] for q in found]

    def _quorum_queues(self) -> list[str]:
        return [q["name"] for q in self.server.api("GET", f"queues/{self.vhost}") if q.get("type") == "quorum"]

    def queues(self) -> list[str]:
        return sorted(n for n in self._names() if not _is_celerys(n))

    def depth(self, queue: str) -> Depth:
        found = self.server.api("GET", f"queues/{self.vhost}?disable_stats=true&enable_queue_totals=true")
        for q in found:
            if q["name"] == queue:
                return Depth(q.get("messages_ready", 0), q.get("messages_unacknowledged", 0))
        return Depth(0, 0)


def _is_celerys(name: str) -> bool:
    return name.startswith(("celeryev", "_kombu", "unacked")) or "pidbox" in name


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """A running Redis, ended with the block."""
    server = RedisServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def rabbit_server(folder: Path, conf: str = "", login: str = "guest:guest") -> Iterator[RabbitServer]:
    """A running RabbitMQ (with lines of `conf` besides), ended with the block, its epmd too."""
    server = RabbitServer(folder, conf, login)
    try:
        server.start()
        yield server
    finally:
        server.stop()
