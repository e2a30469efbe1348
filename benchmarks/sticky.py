"""What it saves to keep a prefix with one worker, in simulated time: `make bench-sticky`.

Requests in groups that share a prefix, larger than a chunk, on 2, 8 and 64 simulated workers (`simulated_fleet.py`),
with `scheduler.sticky_prefixes` and without. Printed: prompt tokens that had to be computed against the least possible
(each prefix once), the share of prompt tokens that KV caches had, and the time of everything.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.fairness import answers, batch_of
from benchmarks.simulated_fleet import Fleet, Prompts
from common.settings import Scheduler

#: Tokens of a prefix and of what follows it; requests that share one; prefixes that a worker's KV cache holds.
PREFIX_TOKENS, OWN_TOKENS, GROUP, KEPT = 4000, 60, 600, 8


def run(
    workers: int, groups: int, *, sticky: bool, slow: float | None = None, group: int = GROUP, seed: int = 1
) -> dict[str, Any]:
    """One fleet's figures; `slow`: the speed of one of its workers."""
    rng = np.random.default_rng(seed)
    speeds = [1.0] * workers
    if slow is not None:
        speeds[-1] = slow
    fleet = Fleet(Scheduler(queue_size=131_072, sticky_prefixes=sticky), speeds)
    requests = groups * group
    prompts = Prompts(np.repeat(np.arange(groups), group), PREFIX_TOKENS, OWN_TOKENS, KEPT)
    fleet.prompts["a"] = prompts
    tokens = answers(rng, requests)
    fleet.submit(batch_of("a", requests, 1024 * requests), tokens, np.full(requests, 1024))
    fleet.run(lambda: bool(fleet.ended_at))
    every = requests * (PREFIX_TOKENS + OWN_TOKENS)
    return {
        "workers": workers,
        "requests": requests,
        "sticky": sticky,
        "slow_worker_speed": slow,
        "computed_tokens": fleet.computed,
        "least_tokens": groups * PREFIX_TOKENS + requests * OWN_TOKENS,
        "cached_share": 1 - fleet.computed / every,
        "makespan_s": fleet.now,
        "stolen": fleet.stolen,
        "copied": fleet.copied,
    }


def main() -> None:
    """Parse the command line, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--groups", type=int, default=20, help="groups a worker")
    parser.add_argument("--group", type=int, default=GROUP, help="requests that share a prefix")
    parser.add_argument("--slow", type=float, help="speed of one worker of each fleet, such as 0.25")
    options = parser.parse_args()
    print(
        f"{'workers':<10}{'sticky':>8}{'computed/least':>16}{'cached':>9}{'makespan s':>12}{'stolen':>8}{'copied':>8}"
    )
    for workers in options.workers:
        for sticky in (False, True):
            found = run(workers, options.groups * workers, sticky=sticky, slow=options.slow, group=options.group)
            print(
                f"{workers:<10}{sticky!s:>8}{found['computed_tokens'] / found['least_tokens']:>16.3f}"
                f"{found['cached_share']:>9.4f}{found['makespan_s']:>12,.1f}{found['stolen']:>8,}{found['copied']:>8,}"
            )


if __name__ == "__main__":
    main()
