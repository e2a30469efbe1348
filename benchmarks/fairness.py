"""How long small batches wait behind a large one, and how well a fleet is used: `make bench-fairness`.

A batch of 1,000,000 requests, and ten of 100 that come while it runs, on 1, 8 and 64 simulated workers: the
coordinator's own book, packing and fair queue in simulated time (`simulated_fleet.py`), no broker, no engine. Printed
per fleet: how long the small ones waited until all of their requests were in an engine, how long they took and how long
one takes alone, the window then and its time, and the time of everything against the ideal, in which every engine is
full from the first moment to the last.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.simulated_fleet import MODEL, SEQS, Fleet, step_s
from common.plan import Window
from common.settings import Scheduler
from producers.batch import Batch, Input

#: Tokens of an answer: log-normal with this median and spread, cut where `max_tokens` cuts.
MEDIAN_TOKENS, SPREAD, MAX_TOKENS = 160, 0.7, 1024
SMALL, SMALL_REQUESTS = 10, 100
#: Simulated seconds after the large batch at which the small ones come.
SMALL_AT_S = 100.0


def batch_of(name: str, requests: int, cost: int) -> Batch:
    """A batch of so many requests."""
    return Batch(
        id=name,
        model=MODEL,
        created_at=0.0,
        shard=0,
        input=Input(name, 0, ""),
        requests=requests,
        planned=requests,
        invalid=0,
        cost=cost,
        windows=[Window(0, requests, 0, requests)],
    )


def answers(rng: np.random.Generator, requests: int) -> npt.NDArray[np.int64]:
    """How many tokens each answer has."""
    drawn = rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, requests)
    return np.clip(drawn, 1, MAX_TOKENS).astype(np.int64)


def submit(fleet: Fleet, rng: np.random.Generator, name: str, requests: int) -> None:
    """A batch comes. The plan knows no more of an answer's length than `max_tokens` says."""
    costs = np.full(requests, MAX_TOKENS, dtype=np.int64)
    fleet.submit(batch_of(name, requests, int(costs.sum())), answers(rng, requests), costs)


def alone(scheduler: Scheduler, workers: int, seed: int) -> float:
    """Seconds that one small batch takes on an idle fleet."""
    fleet = Fleet(scheduler, [1.0] * workers)
    submit(fleet, np.random.default_rng(seed), "small", SMALL_REQUESTS)
    fleet.run(lambda: bool(fleet.ended_at))
    return fleet.now


def run(workers: int, requests: int, scheduler: Scheduler, slow: float | None, seed: int) -> dict[str, Any]:
    """One fleet's figures; `slow`: the speed of one of its workers."""
    began = time.monotonic()
    speeds = [1.0] * workers
    if slow is not None:
        speeds[-1] = slow
    rng = np.random.default_rng(seed)
    fleet = Fleet(scheduler, speeds)
    submit(fleet, rng, "large", requests)

    ahead: list[int] = []

    def come() -> None:
        ahead.append(fleet.out)
        for number in range(SMALL):
            submit(fleet, rng, f"small{number}", SMALL_REQUESTS)

    fleet.after(SMALL_AT_S, come)
    fleet.run(lambda: len(fleet.ended_at) == 1 + SMALL)
    rate = sum(speeds) * SEQS / step_s(SEQS)
    total = sum(int(t.sum()) for t in fleet.tokens.values())
    waited, small = (
        sorted(at - SMALL_AT_S for name, at in when.items() if name != "large")
        for when in (fleet.started_at, fleet.ended_at)
    )
    return {
        "workers": workers,
        "requests": requests,
        "slow_worker_speed": slow,
        "waited_first_s": waited[0],
        "waited_last_s": waited[-1],
        "small_first_s": small[0],
        "small_last_s": small[-1],
        "small_alone_s": alone(scheduler, workers, seed),
        "window_requests": ahead[0],
        "window_s": ahead[0] * total / sum(len(t) for t in fleet.tokens.values()) / rate,
        "makespan_s": fleet.now,
        "ideal_s": total / rate,
        "efficiency": total / rate / fleet.now,
        "copied": fleet.copied,
        "messages": fleet.messages,
        "took_s": time.monotonic() - began,
    }


def show(figures: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"{'workers':<18}{'waited s':>14}{'answered s':>14}{'alone':>7}{'window':>9}{'= s':>7}{'makespan s':>12}"
        f"{'ideal':>10}{'efficiency':>12}{'copied':>8}{'took s':>8}"
    )
    for f in figures:
        name = str(f["workers"]) + (f", one at {f['slow_worker_speed']:g} ×" if f["slow_worker_speed"] else "")
        waited = f"{f['waited_first_s']:.1f} / {f['waited_last_s']:.1f}"
        small = f"{f['small_first_s']:.1f} / {f['small_last_s']:.1f}"
        print(
            f"{name:<18}{waited:>14}{small:>14}{f['small_alone_s']:>7.1f}{f['window_requests']:>9,}{f['window_s']:>7.1f}"
            f"{f['makespan_s']:>12,.1f}{f['ideal_s']:>10,.1f}{f['efficiency']:>12.3f}{f['copied']:>8,}{f['took_s']:>8.0f}"
        )


def main() -> None:
    """Parse the command line, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the large batch")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--slow", type=float, help="speed of one worker of each fleet, such as 0.25")
    parser.add_argument("--no-copies", action="store_true", help="no second copies of what a slow worker keeps")
    parser.add_argument("--window", type=int, help="scheduler.queue_size")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    scheduler = Scheduler(queue_size=options.window)
    if options.no_copies:
        scheduler = Scheduler(queue_size=options.window, straggler_factor=0)
    figures = [run(w, options.requests, scheduler, options.slow, options.seed) for w in options.workers]
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
