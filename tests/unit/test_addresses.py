"""URLs: what people see of them holds no secret, and what no client takes is refused before one is asked."""

from __future__ import annotations

import errno
import logging
import os
from typing import Any

import fsspec
import kombu
import pytest
import redis
import structlog

from common import addresses, logs, settings
from common.broker import connect
from common.errors import Unreachable, UsageError
from common.live import redis_url
from common.settings import Telemetry
from producers.coordinator.broker_calls import BrokerTrouble, broker_calls
from producers.intake.source import open_source


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0?password=hunter2", "redis://127.0.0.1:6379/0?password=***"),
        ("redis://h/0?db=1&Pass%77ord=hunter2&socket_timeout=3", "redis://h/0?db=1&Pass%77ord=***&socket_timeout=3"),
        ("rediss://user:hunter2@h:1/0", "rediss://***@h:1/0"),
        ("amqp://u:a@hunter2@h//", "amqp://***@h//"),
        ("amqp://u:hunter2/hunter2@h:5672//", "amqp://***@h:5672//"),
        ("redis://:hunter2?hunter2@h", "redis://***@h"),
        ("s3://AKIAX:hunter2/hunter2@bucket/prefix", "s3://***@bucket/prefix"),
        ("s3://bucket/users@home/in.jsonl", "s3://bucket/users@home/in.jsonl"),
        ("https://h:8443/a@b?X-Amz-Signature=hunter2&v=1", "https://h:8443/a@b?X-Amz-Signature=***&v=1"),
        ("https://account.example/x.jsonl?sv=1&sig=hunter2", "https://account.example/x.jsonl?sv=1&sig=***"),
        ("zip://a.jsonl::https://u:hunter2@h/a.zip?token=hunter2", "zip://a.jsonl::https://***@h/a.zip?token=***"),
        ("unix:///run/a@b.sock?db=1", "unix:///run/a@b.sock?db=1"),
        ("/srv/store?password=x", "/srv/store?password=x"),
    ],
)
def test_no_secret_of_a_url_is_shown(
    url: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert addresses.shown(url) == shown
    # The places where a person sees one: an error, and logs, ours and those of libraries.
    said = f"broker {url}: does not answer ('{url}')"
    assert str(Unreachable(said)) == f"broker {shown}: does not answer ('{shown}')"
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    try:
        for log_format in ("json", "console"):
            logs.configure(Telemetry(log_format=log_format), "test")
            logs.get("x").info("gone", error=said, url=url)
        logging.getLogger("celery").warning("lost %s", url)
    finally:
        root.setLevel(level)
        structlog.reset_defaults()
    err = capsys.readouterr().err
    assert err.count("gone") == 2
    assert err.count(shown) == 7
    assert "hunter2" not in err


def test_a_log_says_why_the_broker_is_away_and_quotes_nobody() -> None:
    gone = settings.load(env={"BATCHMILL_BROKER_URL": "amqp://u:hunter2@127.0.0.1:1//"})
    with pytest.raises(BrokerTrouble) as caught, broker_calls():
        connect(gone)
    assert caught.value.kind == "Unreachable"
    assert caught.value.reason.startswith("Unreachable: broker amqp://***@127.0.0.1:1// does not answer: ")
    assert os.strerror(errno.ECONNREFUSED) in caught.value.reason
    assert (
        logs.why(OSError(errno.EACCES, "Permission denied", "/srv/a")) == "PermissionError: Permission denied: /srv/a"
    )
    assert logs.why(ValueError("the prompt was: hello")) == "ValueError"
    assert logs.why(redis.ResponseError("unknown command 'hello'")) == "ResponseError"


def test_a_remote_input_is_named_without_its_key() -> None:
    with fsspec.open("memory://u:hunter2@in.jsonl", "wb") as file:
        file.write(b"{}\n")
    with open_source("memory://u:hunter2@in.jsonl") as source:
        assert source.name == "memory://***@in.jsonl"


#: URLs, and whether they can be meant; for the broker by kombu, for the others by redis-py.
_BROKERS = [
    ("redis://h:1/0", True),
    ("redis://h?rubbish=1", False),
    ("redis://h/0?socket_timeout=abc", False),
    ("redis://h/0?socket_timeout=3", False),
    ("redis://h/0?password=hunter2", False),
    ("redis://h/hunter2", False),
    ("rediss://u:p@h/0?ssl_cert_reqs=required&ssl_ca_certs=/ca.pem", True),
    ("rediss://h/0?ssl_cert_reqs=hunter2", False),
    ("redis+socket:///run/r.sock?virtual_host=1", True),
    ("redis+socket:///run/r.sock?virtual_host=a", False),
    ("amqp://u:p@h:5672//", True),
    ("amqp://u:p@h:5672/%2Fvhost?heartbeat=30", True),
    ("amqp://u:p@h//?heartbeat=abc", False),
    ("amqp://u:p@h//?hunter2@x", False),
]
_REDISES = [
    ("redis://h:1/0", True),
    ("unix:///run/r.sock?db=1", True),
    ("unix://?db=1", False),
    ("redis://h/0?rubbish=1", False),
    ("redis://h/0?socket_timeout=abc", False),
    ("redis://h/0?decode_responses=true", False),
    ("redis://h/0?ssl_cert_reqs=none", False),
    ("rediss://h/0?ssl_cert_reqs=none&ssl_check_hostname=false", True),
    (
        "redis://h/0?password=p&username=u&client_name=c&socket_timeout=1.5&socket_connect_timeout=1&protocol=3"
        "&socket_keepalive=true&retry_on_timeout=false&health_check_interval=5&max_connections=9&db=2",
        True,
    ),
    ("redis://h/0?max_connections=0", False),
]


@pytest.mark.parametrize(("url", "good"), _BROKERS)
def test_a_brokers_url_is_one_that_kombu_takes(url: str, good: bool) -> None:
    _check("BATCHMILL_BROKER_URL", url, good)
    if good:
        assert kombu.Connection(url).transport_cls


@pytest.mark.parametrize(("url", "good"), _REDISES)
@pytest.mark.parametrize("name", ["BATCHMILL_STATE_URL", "BATCHMILL_CACHE_URL"])
def test_a_redis_url_is_one_that_redis_py_takes(name: str, url: str, good: bool) -> None:
    _check(name, url, good)
    if good:
        made: Any = redis.Redis.from_url(redis_url(url), socket_timeout=1.0)
        assert made.connection_pool.make_connection()


def _check(name: str, url: str, good: bool) -> None:
    if good:
        assert settings.load(None, env={name: url})
        return
    with pytest.raises(UsageError, match=name) as caught:
        settings.load(None, env={name: url})
    assert "hunter2" not in str(caught.value)
