"""vLLM asked directly, without anything of ours: `python -m tests.engine.direct` reads and prints JSON.

Stdin: `{"model": folder, "engine": {…}, "chats": [messages, …], "max_tokens": n}`; stdout's last line: the greedy
answers in order.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM, SamplingParams

    wanted = json.loads(sys.stdin.read())
    llm = LLM(model=wanted["model"], **wanted["engine"])
    params = SamplingParams(temperature=0, max_tokens=wanted["max_tokens"])
    # One at a time, as the other side asks: rounding depends on what shares a step.
    answers = [llm.chat(chat, params, use_tqdm=False)[0].outputs[0].text for chat in wanted["chats"]]
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
