"""Batchmill against what a user would pick instead: `python -m benchmarks.vs_peers` (`make bench-vs-peers`).

Files of several kinds (`benchmarks.peers.files`) go, one after the other, through a fleet whose engine is up and
through its peers, in turn, on one machine, with the same model folder and engine arguments; each round has prompts of
its own. Printed: the raw seconds, and the medians of the rounds' ratios. Every answer is counted, and so are its
tokens: a peer that did other work is named. Engines that are up and not asked stand still. `--into FILE` adds the
rounds to those that FILE holds, so that a long table can be measured in parts, each with the fleet beside the peers it
is compared with; `--show FILE` prints them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers import files, run
from benchmarks.peers.alone import Engines
from benchmarks.warm_fleet import MODEL, Fleet, demo_entry
from common.interrupts import terminated_like_interrupted
from tests.support.brokers import redis_server

FLEET = "the fleet"

#: What one peer did with one round's file.
Record = dict[str, Any]


def measure(
    words: list[str],
    rounds: int,
    peers: list[str],
    ray_python: str | None,
    limit: int | None,
    keep: Callable[[Record], None],
) -> None:
    """Run kinds of files that want the same engine through the fleet and the peers, `rounds` times.

    `keep` gets each record as it comes.
    """
    kind = files.KINDS[words[0]]
    entry = demo_entry()
    engine = entry.engine | {"kv_cache_memory_bytes": int(entry.hardware.cpu_kv_gb * (1 << 30))} | kind.engine
    with tempfile.TemporaryDirectory(prefix="bm-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        for part in ("broker", "cache", "peers"):
            (folder / part).mkdir()
        broker = stack.enter_context(redis_server(folder / "broker"))
        cache = stack.enter_context(redis_server(folder / "cache"))
        url = f"redis://127.0.0.1:{broker.port}"
        fleet = Fleet(
            folder,
            f"{url}/0",
            cache_url=f"redis://127.0.0.1:{cache.port}/0",
            engine=kind.engine,
            settings=kind.settings,
        )
        stack.callback(fleet.processes.close)
        engines = Engines()
        engines.note(FLEET)
        place = run.Place(
            fleet.processes, folder / "peers", fleet.model_folder, MODEL, engine, f"{url}/1", ray_python, kind.chunk
        )
        up = []
        for word in peers:
            up.append(stack.enter_context(contextlib.closing(run.make(word, place))))
            engines.note(up[-1].name)
        warm = folder / "warm.jsonl"
        files.write(warm, files.KINDS["unique"], -1, MODEL, 16)
        fleet.submit(warm)
        # Numbers of rounds never come again, so neither do prompts, whatever a peer's engine keeps.
        first = int(time.time())
        for number, (_, word) in enumerate(itertools.product(range(rounds), words)):
            kind, round_ = files.KINDS[word], first + number
            source = folder / f"{round_}.jsonl"
            requests, tokens = files.write(source, kind, round_, MODEL, limit)
            wanted = {"file": word, "round": round_, "requests": requests, "tokens": tokens, "start_s": fleet.start_s}
            # Each time another one begins, so that nobody always runs on a machine that has just started an engine.
            turn = round_ % (len(up) + 1)
            order: list[run.Peer | None] = [None, *up]
            for peer in order[turn:] + order[:turn]:
                with engines.only(FLEET if peer is None else peer.name):
                    record = _fleet(fleet, kind, wanted, source) if peer is None else _peer(peer, kind, wanted, source)
                keep(record)


def _fleet(fleet: Fleet, kind: files.Kind, wanted: Record, source: Path) -> Record:
    for _ in range(2 if kind.twice else 1):
        took, out = fleet.submit(source, "--cache", kind.cache)
    return _record(wanted, FLEET, run.Took(took, took), out / "output.jsonl")


def _peer(peer: run.Peer, kind: files.Kind, wanted: Record, source: Path) -> Record:
    target = source.with_suffix(".peer.jsonl")
    # Who starts anew for every file has nothing that a first time could leave behind.
    for _ in range(2 if kind.twice and peer.keeps else 1):
        target.unlink(missing_ok=True)
        took = peer.answer(source, target)
    return _record(wanted, peer.name, took, target)


def _record(wanted: Record, who: str, took: run.Took, output: Path) -> Record:
    answers, tokens = files.answered(output)
    record = wanted | {
        "who": who,
        "run_s": round(took.run_s, 3),
        "whole_s": round(took.whole_s, 3),
        "answers": answers,
        "answer_tokens": tokens,
    }
    print(f"{wanted['file']} {wanted['round']}: {who}: {took.run_s:.1f} s, with start-up {took.whole_s:.1f} s; "
          f"{answers} answers, {tokens} tokens", flush=True)  # fmt: skip
    return record


def show(records: list[Record]) -> None:
    """Print a table for each kind of file: raw seconds, medians, and medians of the rounds' ratios."""
    for word, kind in files.KINDS.items():
        rounds: dict[int, dict[str, Record]] = {}
        for record in records:
            if record["file"] == word:
                rounds.setdefault(record["round"], {})[record["who"]] = record
        rounds = {number: found for number, found in rounds.items() if FLEET in found and len(found) > 1}
        if not rounds:
            continue
        first = next(iter(rounds.values()))[FLEET]
        print(f"\n{kind.title}: {first['requests']} requests, {first['tokens']} answer tokens; goal {kind.goal:g} x")
        print(f"  {'':<28}{'run s':>8}{'whole s':>9}{'fleet is':>10}{'whole':>9}  raw run s")
        names = [FLEET, *dict.fromkeys(who for found in rounds.values() for who in found if who != FLEET)]
        best = float("inf")
        for who in names:
            pairs = [(found[who], found[FLEET]) for found in rounds.values() if who in found]
            run_s, whole_s = (statistics.median([p[name] for p, _ in pairs]) for name in ("run_s", "whole_s"))
            line = f"  {who:<28}{run_s:>8.1f}{whole_s:>9.1f}"
            if who == FLEET:
                line += " " * 19
            else:
                ratio = statistics.median([peer["run_s"] / ours["run_s"] for peer, ours in pairs])
                whole = statistics.median([peer["whole_s"] / ours["run_s"] for peer, ours in pairs])
                best = min(best, whole if kind.whole else ratio)
                line += f"{ratio:>8.2f} x{whole:>7.2f} x"
            line += "  " + ", ".join(f"{p['run_s']:.1f}" for p, _ in pairs)
            odd = [p for p, _ in pairs if (p["answers"], p["answer_tokens"]) != (p["requests"], p["tokens"])]
            if odd:
                line += f"  (other work: {odd[0]['answers']} answers, {odd[0]['answer_tokens']} tokens)"
            print(line)
        word_ = "met" if best >= kind.goal else "missed"
        print(f"  against the best peer: {best:.2f} x, goal {kind.goal:g} x: {word_}")


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", choices=files.KINDS, default=list(files.KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="+", choices=run.WORDS, default=list(run.WORDS))
    parser.add_argument("--ray-python", help="an interpreter with ray[data] and vLLM; else Ray Data LLM is left out")
    parser.add_argument("--limit", type=int, help="only the first so many requests of each file (a trial)")
    parser.add_argument("--into", type=Path, help="add the rounds to those in this file")
    parser.add_argument("--show", type=Path, help="run nothing, print the rounds in this file")
    options = parser.parse_args()
    if options.show is not None:
        show(json.loads(options.show.read_text("utf-8")))
        return
    peers = list(options.peers)
    if "ray" in peers and options.ray_python is None:
        print("Ray Data LLM is left out: no --ray-python (`make bench-peers-ray` makes one)", file=sys.stderr)
        peers.remove("ray")
    into: Path | None = options.into
    records: list[Record] = json.loads(into.read_text("utf-8")) if into is not None and into.exists() else []

    def keep(record: Record) -> None:
        records.append(record)
        if into is not None:
            into.write_text(json.dumps(records, indent=1))

    with terminated_like_interrupted():
        for words in files.together(options.files):
            measure(words, options.rounds, peers, options.ray_python, options.limit, keep)
    show(records)


if __name__ == "__main__":
    main()
