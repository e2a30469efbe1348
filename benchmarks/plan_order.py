"""What the order of the plan saves of prompts, against the file's own, by simulated prefix caches: `make bench-plan`.

Files of requests in random order, each a prefix and some tokens of its own, are read and planned as `producers submit`
does it, window by window; what an engine's prefix cache of each size finds is simulated as in `producers analyze`
(blocks of 16 tokens of 4 bytes; answers of 128 tokens). Printed: the share of all prompt tokens that is found, in the
order of the file and as planned, and `best`, which is what a cache without end finds.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.pieces import whole
from common.registry import ModelVersion, Registry
from common.settings import Settings
from producers.analyze.kv_cache import KvCache
from producers.analyze.prompts import asked
from producers.analyze.tokens import Blocks, ByBytes
from producers.intake.reading import Reading
from producers.intake.rules import Rules
from producers.intake.source import open_source
from producers.plan_file import WindowRow
from producers.planner import Planner

#: What each file's requests begin with, and in how many ways: tokens and number, of what all begin with first.
FILES = {
    "48 prefixes of 400 tokens": [(400, 48)],
    "1,000 prefixes of 400 tokens": [(400, 1000)],
    "4,000 prefixes of 300 tokens": [(300, 4000)],
    "4 of 500 tokens, then 1,000 of 300": [(500, 4), (300, 1000)],
    "1,000 documents of 4,000 tokens": [(4000, 1000)],
}
#: Of files with prompts so long, as many requests as make a prompt of 1,000 tokens for each.
USUAL_TOKENS = 1000
OWN_TOKENS, ANSWER, BLOCK = 51, 128, 16
SIZES = (20_000, 100_000, 400_000, 1_000_000)
WITHOUT_END = 1 << 50


def prompts(levels: list[tuple[int, int]], requests: int, seed: int) -> Iterator[str]:
    """The prompts of a file, four bytes a token."""
    rng = random.Random(seed)
    texts = [["".join(rng.choices("abcdefgh", k=4 * tokens)) for _ in range(count)] for tokens, count in levels]
    for _ in range(requests):
        chosen = rng.randrange(len(texts[-1]))
        # The same ending always follows the same beginning.
        stem = "".join(level[chosen % len(level)] for level in texts)
        yield stem + "".join(rng.choices("ijklmnop", k=4 * OWN_TOKENS))


class Caches:
    """Takes windows (`intake.reading.Windows`) and lets their requests pass through a cache of each size, both ways."""

    def __init__(self) -> None:
        self._planner = Planner()
        self._counter = ByBytes("simulated")
        self.caches = {
            (way, size): KvCache(size // BLOCK) for way in ("file", "plan") for size in (*SIZES, WITHOUT_END)
        }
        self.found = dict.fromkeys(self.caches, 0)
        self.tokens = self.windows = 0

    def add(self, rows: Sequence[WindowRow], _start: int, _end: int, /) -> None:
        """A window."""
        self.windows += 1
        _, _, _, urls, bodies, keys, costs, outputs = zip(*rows, strict=True)
        counted = self._counter.count([asked(u, whole(b)) for u, b in zip(urls, bodies, strict=True)], BLOCK)
        self.tokens += sum(prompt.tokens for (prompt,) in counted)
        planned = self._planner.order(keys, bodies, costs, outputs).places
        for (way, size), cache in self.caches.items():
            for at in range(len(rows)) if way == "file" else planned:
                self.found[way, size] += _enter(cache, counted[at][0]) * BLOCK


def _enter(cache: KvCache, prompt: Blocks) -> int:
    answer = -(-(prompt.tokens + ANSWER) // BLOCK) - len(prompt.chain)
    return cache.enter(prompt.chain, (prompt.tokens - 1) // BLOCK, answer)


def run(levels: list[tuple[int, int]], requests: int, seed: int = 1) -> Caches:
    """One file's figures."""
    caches = Caches()
    registry = Registry({"m@1": ModelVersion(source="x")}, {}, "m")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.jsonl"
        with path.open("w") as file:
            for number, prompt in enumerate(prompts(levels, requests, seed)):
                body = {"prompt": prompt, "max_tokens": ANSWER}
                file.write(json.dumps({"custom_id": str(number), "body": body}) + "\n")
        with (
            open_source(str(path)) as source,
            Reading(source, Rules(Settings(), registry, None, None), folder=folder) as reading,
        ):
            reading.run(caches)
    return caches


def main() -> None:
    """Parse the command line, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"{'':36}{'windows':>8}" + "".join(f"{f'{size:,}':>14}" for size in SIZES) + f"{'best':>7}")
    for name, levels in FILES.items():
        longest = sum(tokens for tokens, _ in levels)
        seen = run(levels, options.requests * USUAL_TOKENS // max(USUAL_TOKENS, longest), options.seed)

        def share(way: str, size: int, seen: Caches = seen) -> float:
            return 100 * seen.found[way, size] / seen.tokens

        cells = "".join(f"{share('file', size):>8.1f}{share('plan', size):>6.1f}" for size in SIZES)
        print(f"{name:36}{seen.windows:>8}{cells}{share('file', WITHOUT_END):>7.1f}", flush=True)


if __name__ == "__main__":
    main()
