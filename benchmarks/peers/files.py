"""The files of `benchmarks.vs_peers`: chat requests whose answers have exactly as many tokens as they say.

`min_tokens` equals `max_tokens` in each, so every peer has the same work, whatever its sampling says. No prompt of one
round is met in another, so nothing an engine kept from an earlier round helps.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOPICS = ("rivers", "bridges", "bread", "lighthouses", "glaciers", "violins", "maps", "bees")
#: Of which shared prefixes are made; a word is a token or two of any English tokenizer.
_WORDS = ("the", "clerk", "reads", "every", "letter", "twice", "and", "files", "it", "by", "date", "before", "lunch")

#: A request before it is written: prompt, system prompt or None, answer tokens.
Asked = tuple[str, str | None, int]


@dataclass(frozen=True)
class Kind:
    """One row of the table."""

    title: str
    #: The requests of a round.
    make: Callable[[int], Iterator[Asked]]
    #: Times the best peer that the fleet has to be.
    goal: float
    #: Engine arguments of this file, for every peer, beside the model's entry.
    engine: dict[str, Any] = field(default_factory=dict)
    #: Requests of a naive client's chunk: as many as the demo model's engine runs at once.
    chunk: int = 128
    #: What the fleet is told beside its defaults.
    settings: dict[str, str] = field(default_factory=dict)
    #: The fleet's result cache.
    cache: str = "off"
    #: The file goes through everything twice, and the second time counts.
    twice: bool = False
    #: The fleet's time against the peers' whole time, their start included.
    whole: bool = False


def _unique(requests: int, tokens: int, round_: int) -> Iterator[Asked]:
    for number in range(requests):
        yield f"Note {round_}-{number}: write a short paragraph about {TOPICS[number % len(TOPICS)]}.", None, tokens


def _prefixes(requests: int, prefixes: int, tokens: int, round_: int) -> Iterator[Asked]:
    """`prefixes` system prompts of 420 words, `requests` questions, shuffled."""
    draw = random.Random(round_)
    systems = [f"Handbook {round_}-{n}. {' '.join(draw.choices(_WORDS, k=420))}" for n in range(prefixes)]
    asked = [(f"Question {n}: what does the clerk do?", systems[n % prefixes], tokens) for n in range(requests)]
    draw.shuffle(asked)
    yield from asked


def _duplicates(requests: int, tokens: int, round_: int) -> Iterator[Asked]:
    """Half of the requests repeat another one; shuffled."""
    asked = list(_unique(requests // 2, tokens, round_)) * 2
    random.Random(round_).shuffle(asked)
    yield from asked


def _mixed(requests: int, round_: int) -> Iterator[Asked]:
    """Mostly short answers, some long: 8 to 512 tokens, evenly spread over the logarithm."""
    draw = random.Random(round_)
    for number, (prompt, system, _) in enumerate(_unique(requests, 0, round_)):
        tokens = 512 if number == requests // 2 else round(8 * 64 ** draw.random())
        yield prompt, system, tokens


MIXED = Kind(
    "256 requests of 8 to 512 answer tokens, small chunks",
    lambda r: _mixed(256, r),
    1.0,
    chunk=32,
    settings={"BATCHMILL_SCHEDULER_CHUNK_REQUESTS": "32"},
)

KINDS: dict[str, Kind] = {
    "unique": Kind("256 unique requests", lambda r: _unique(256, 64, r), 1.0),
    "prefixes": Kind(
        "240 requests, 48 prefixes of 420 words, shuffled; KV cache of 70 blocks",
        lambda r: _prefixes(240, 48, 16, r),
        2.0,
        # 8,960 tokens of some 22,000 in all prefixes.
        engine={"block_size": 128, "num_gpu_blocks_override": 70},
    ),
    "small-blocks": Kind(
        "the same in blocks of 32 tokens, as small as this CPU's attention takes them; a KV cache of 280 blocks",
        lambda r: _prefixes(240, 48, 16, r),
        2.0,
        engine={"block_size": 32, "num_gpu_blocks_override": 280},
    ),
    "duplicates": Kind("256 requests, half of them duplicates, temperature 0", lambda r: _duplicates(256, 64, r), 1.9),
    "again": Kind("the same file a second time", lambda r: _unique(256, 64, r), 20.0, cache="on", twice=True),
    "mixed": MIXED,
    "start": Kind(
        "128 requests, the engine up, against start-up and run", lambda r: _unique(128, 64, r), 3.0, whole=True
    ),
}


def together(words: Sequence[str]) -> list[list[str]]:
    """The words in groups of kinds that differ in nothing a fleet or an engine is started with."""
    groups: list[list[str]] = []
    for word in words:
        kind = KINDS[word]
        for group in groups:
            other = KINDS[group[0]]
            if (kind.engine, kind.chunk, kind.settings) == (other.engine, other.chunk, other.settings):
                group.append(word)
                break
        else:
            groups.append([word])
    return groups


def write(path: Path, kind: Kind, round_: int, model: str, limit: int | None = None) -> tuple[int, int]:
    """Write a round's file; how many requests and answer tokens it has. `limit`: only the first so many requests."""
    requests = tokens = 0
    with open(path, "w", encoding="utf-8") as file:
        for number, (prompt, system, count) in enumerate(kind.make(round_)):
            if limit is not None and number >= limit:
                break
            messages = [{"role": "user", "content": prompt}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            body = {
                "model": model,
                "messages": messages,
                "max_tokens": count,
                "min_tokens": count,
                "temperature": 0,
            }
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
            requests += 1
            tokens += count
    return requests, tokens


def answered(path: Path) -> tuple[int, int]:
    """Answers in an output file (lines with a 200), and their tokens."""
    answers = tokens = 0
    with open(path, encoding="utf-8") as file:
        for line in file:
            response = json.loads(line)["response"]
            if response["status_code"] == 200:
                answers += 1
                tokens += response["body"]["usage"]["completion_tokens"]
    return answers, tokens
