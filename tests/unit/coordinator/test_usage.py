"""What results used: of a whole part by its worker, of some of its lines by the coordinator; the same by both."""

from __future__ import annotations

import msgspec
import numpy as np

from common.messages import Kind, Row, Usage
from producers.coordinator.usage import add_usage, usage_of_part
from workers.attempt import Tried
from workers.outcome import judge
from workers.results import Done, Source, marks, parts

BODY = msgspec.json.encode(
    {
        "choices": [{"finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
    }
)


def test_every_figure_is_summed() -> None:
    names = Usage.__struct_fields__
    total = Usage(*range(1, len(names) + 1))
    add_usage(total, Usage(*(10 * n for n in range(1, len(names) + 1))))
    assert list(msgspec.structs.astuple(total)) == [11 * n for n in range(1, len(names) + 1)]


def test_a_line_says_what_its_worker_counted_of_it() -> None:
    """Also of those that the result cache answered, lacked, or that shared an answer: by the marks outside its body."""
    sources = [*Source, Source.CACHE, Source.MISSED, Source.SHARED, Source.CACHE]
    done = [
        Done(0, Row(pos, pos, b'"c"', 0, b"{}"), Tried(200, BODY, judge(0, 200, BODY)), source)
        for pos, source in enumerate(sources)
    ]
    [part] = parts(done, ["batch_a"], [marks("m@1", 1, "f")], 60.0)
    assert part.kind == bytes([Kind.OUTPUT] * len(done))
    size = len(BODY)
    assert part.usage == Usage(56, 24, 16, cache_hits=3, cache_misses=2, cache_bytes=3 * size, shared=2)
    some = np.array([True, True, True, True, False, False, False, False])
    assert usage_of_part(part, some) == Usage(28, 12, 8, cache_hits=1, cache_misses=1, cache_bytes=size, shared=1)
    assert usage_of_part(part, np.ones(8, dtype=bool)) is part.usage
