"""The scheduling as a whole, in simulated time: small batches behind a large one, and workers that are kept busy."""

from __future__ import annotations

from benchmarks.fairness import SMALL, SMALL_AT_S, alone, run
from common.settings import Scheduler

SCHEDULER = Scheduler(queue_size=131_072)


def test_small_batches_wait_no_longer_than_a_window_and_the_workers_stay_busy() -> None:
    found = run(8, 60_000, SCHEDULER, None, seed=1)
    assert found["waited_first_s"] <= found["window_s"]
    # The last one waits for the other small ones besides.
    assert found["waited_last_s"] <= 1.5 * found["window_s"]
    assert found["small_last_s"] < (found["makespan_s"] - SMALL_AT_S) * 0.75
    assert found["efficiency"] >= 0.95
    assert 0 < found["window_requests"] <= 8 * 4 * 141
    assert SMALL == 10


def test_the_simulation_is_the_same_each_time() -> None:
    first, again = (run(3, 5000, SCHEDULER, 0.25, seed=2) for _ in range(2))
    for name in ("waited_last_s", "small_last_s", "makespan_s", "messages"):
        assert first[name] == again[name]
    assert alone(SCHEDULER, 3, 2) == alone(SCHEDULER, 3, 2)
