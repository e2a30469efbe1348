"""What a worker makes of its model's `cache`, of the chunk's, and of its own settings. No broker, no Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from common import metrics, registry
from common.messages import VERSION, Kind, Part, Results, Row, Usage, decode_rows
from common.settings import load
from tests.support.chunks import chat, make_chunk
from workers.cache.template_clock import Clock
from workers.node import Node

MODEL = "m@1"
#: Nothing listens there; a worker goes on without.
NOBODY = "redis://127.0.0.1:1/0"

StartNode = Callable[..., Node]


@pytest.fixture
def start_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartNode]:
    """Makes workers whose engine is up; `cache`: of the model in models.yaml; `url`: of the result cache."""
    # An engine that takes a time for each request, as real ones do.
    monkeypatch.setenv("BATCHMILL_ECHO_LATENCY_MS", "1")
    nodes: list[Node] = []

    def start(cache: str = "determined", url: str = NOBODY) -> Node:
        models = tmp_path / "models.yaml"
        models.write_text(f"models: {{{MODEL}: {{source: {tmp_path}, cache: {cache}}}}}\n")
        env = {
            "BROKER_URL": NOBODY,
            "STATE_URL": NOBODY,
            "CACHE_URL": url,
            "INFERENCE_ENGINE": "echo",
            "SECURITY_DISPATCH_KEY": "cd" * 32,
            "SECURITY_RESULTS_KEY": "ab" * 32,
        }
        settings = load(env={f"BATCHMILL_{name}": value for name, value in env.items() if value})
        node = Node(settings, registry.load(models), MODEL, "n")
        nodes.append(node)
        node.thread.start()
        node.open_lane()
        return node

    yield start
    for node in nodes:
        if node._cache is not None:
            node._cache.close()
        assert node.thread.stop(60)


class Rows:
    """Two equal requests; which of them may share an answer."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self.sharing: list[int] = []

    def rows(self) -> list[tuple[int, Row]]:
        return [(0, row) for row in self._rows]

    def answered(self, row: int, body: bytes) -> bool:
        raise AssertionError

    def missed(self, row: int) -> None:
        pass

    def may_share(self, row: int, flight: bytes) -> None:
        self.sharing.append(row)


def kept_and_shared(node: Node, temperature: float, mode: str = "on") -> tuple[bool, bool]:
    """Of two equal requests: are their answers kept, and do they share one?"""
    chunk = make_chunk([chat("same", temperature=temperature)] * 2, MODEL, cache=mode)
    memory = node._memory_for(chunk)
    if memory is None:
        return False, False
    rows = Rows(decode_rows(chunk.slices[0].rows))
    memory.recall(rows)
    return bool(memory._keys), rows.sharing == [0, 1]


def clock(node: Node) -> Clock:
    """What it knows of its chat template."""
    return node._space._clock


@pytest.mark.parametrize(
    ("cache", "determined", "sampled", "not_asked"),
    [
        ("determined", (True, True), (False, False), (False, True)),
        ("all", (True, True), (True, False), (False, True)),
        ("off", (False, False), (False, False), (False, False)),
    ],
)
def test_what_is_kept_and_shared_is_the_models_and_the_batchs_word(
    start_node: StartNode,
    cache: str,
    determined: tuple[bool, bool],
    sampled: tuple[bool, bool],
    not_asked: tuple[bool, bool],
) -> None:
    node = start_node(cache)
    assert kept_and_shared(node, 0.0) == determined
    assert kept_and_shared(node, 1.0) == sampled
    assert kept_and_shared(node, 0.0, "off") == not_asked


def test_equal_requests_share_where_there_is_no_cache(start_node: StartNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node = start_node(url="")
    noted: list[str] = []
    monkeypatch.setattr(node._uncached, "note", lambda chunk: noted.append(chunk.cache))
    assert kept_and_shared(node, 0.0) == (False, True)
    assert kept_and_shared(node, 0.0, "off") == (False, True)
    assert noted == ["on"], "who asked for it is told"


def test_a_template_that_prints_the_date_is_found_in_the_models_folder(start_node: StartNode, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    node = start_node()
    assert clock(node) == Clock.NONE, "the echo engine has no template"
    node.settings = msgspec.structs.replace(
        node.settings, inference=msgspec.structs.replace(node.settings.inference, engine="vllm")
    )
    node.open_lane()
    assert clock(node) == Clock.DAY


def test_a_worker_that_ends_lets_its_cache_write_the_rest(start_node: StartNode) -> None:
    node = start_node()
    assert node._cache is not None
    assert node._cache._writer.is_alive()
    node.close()
    assert not node._cache._writer.is_alive()


def test_what_the_cache_gave_and_requests_shared_is_in_the_metrics(start_node: StartNode) -> None:
    node = start_node()
    counters = metrics.CACHE_SERVED, metrics.REQUESTS_SHARED.labels(model=MODEL)
    before = [counter._value.get() for counter in counters]
    usage = Usage(cache_hits=2, cache_bytes=700, shared=3)
    part = Part(batch="b", pos=b"", kind=bytes([Kind.OUTPUT] * 5), length=b"", lines=b"", usage=usage)
    node._count(Results(v=VERSION, chunk="c", model=MODEL, node="n", seq=0, done=False, parts=[part]))
    assert [counter._value.get() - was for counter, was in zip(counters, before, strict=True)] == [700, 3]
