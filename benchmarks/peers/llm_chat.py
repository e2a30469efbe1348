"""`LLM.chat` on a whole file at once, vLLM's offline interface: `python -m benchmarks.peers.llm_chat ENGINE_JSON`.

Prints `UP` when the engine is ready; then, for each line `INPUT<tab>OUTPUT` on stdin, answers the file and prints
`DONE` with the seconds from opening the input to the closed output.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers import lines


def answer_file(llm: Any, source: Path, target: Path) -> None:
    """One call for all requests, in the order of the file."""
    from vllm import SamplingParams

    asked = lines.read(source)
    params = [SamplingParams(**lines.sampling(line["body"])) for line in asked]
    outputs = llm.chat([line["body"]["messages"] for line in asked], params, use_tqdm=False)
    with open(target, "w", encoding="utf-8") as file:
        for line, output in zip(asked, outputs, strict=True):
            first = output.outputs[0]
            file.write(lines.answer(line["custom_id"], first.text, len(first.token_ids)))


def main() -> None:
    """See the module."""
    from vllm import LLM

    llm = LLM(**json.loads(sys.argv[1]))
    print("UP", flush=True)
    for line in sys.stdin:
        source, target = line.rstrip("\n").split("\t")
        started = time.monotonic()
        answer_file(llm, Path(source), Path(target))
        print(f"DONE {time.monotonic() - started:.3f}", flush=True)


if __name__ == "__main__":
    main()
