"""vLLM asked directly, without anything of ours: `python -m tests.engine.direct` reads and prints JSON.

Stdin: `{"model": folder, "engine": {…}, "chats": [messages, …], "max_tokens": n}`; stdout: the greedy
answers in order.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    from vllm import LLM, SamplingParams

    wanted = json.loads(sys.stdin.read())
    llm = LLM(model=wanted["model"], **wanted["engine"])
    params = SamplingParams(temperature=0, max_tokens=wanted["max_tokens"])
    outputs = llm.chat(wanted["chats"], params, use_tqdm=False)
    print(json.dumps([output.outputs[0].text for output in outputs]), flush=True)


if __name__ == "__main__":
    main()
