"""The catalogue of metrics: documented as it is, served where asked, refused in one line where not possible."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest

from common import metrics
from common.errors import UsageError
from common.settings import Telemetry
from tests.support.ports import free_port


def test_the_page_is_the_catalogue() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
    assert page.read_text("utf-8") == metrics.page(), "run: python -m common.metrics > docs/metrics.md"


def test_labels_cannot_carry_what_users_wrote() -> None:
    allowed = {"model", "kind", "type", "direction", "shard"}
    assert all(set(metric._labelnames) <= allowed for metric in metrics.CATALOGUE)


def test_metrics_are_served() -> None:
    port = metrics.serve(Telemetry(metrics_port=free_port()))
    metrics.CHUNKS_SENT.labels(model="m@1").inc()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert 'batchmill_chunks_sent_total{model="m@1"}' in text


def test_no_port_means_no_server() -> None:
    assert metrics.serve(Telemetry()) == 0


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match=r"telemetry\.metrics_port"):
            metrics.serve(Telemetry(metrics_port=taken.getsockname()[1]))
