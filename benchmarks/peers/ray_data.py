"""Ray Data LLM, as its own batch-inference guide has it: `python ray_data.py ENGINE_JSON INPUT OUTPUT MODEL`.

Runs under an interpreter that has `ray[data]` and vLLM (`make bench-peers-ray`), and imports nothing of the project
but `lines.py` beside it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import lines  # type: ignore[import-not-found]  # run as a file, see the module

#: Rows of a batch, as in the benchmark that Ray ships (`ray.llm._internal.batch.benchmark`).
BATCH_SIZE = 64


def main() -> None:
    """See the module."""
    engine, source, target, model = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    # A pretended GPU, or the engine's actor is never placed on a machine without one.
    ray.init(num_cpus=8, num_gpus=1, include_dashboard=False, logging_level="warning")
    config = vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs=engine | {"disable_log_stats": True},
        runtime_env={"env_vars": {n: v for n, v in os.environ.items() if n.startswith(("HF_", "VLLM_"))}},
        concurrency=1,
        batch_size=BATCH_SIZE,
        accelerator_type=None,
        log_engine_metrics=False,
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "messages": json.loads(row["messages"]),
            "sampling_params": json.loads(row["sampling"]),
        },
        postprocess=lambda row: {
            "custom_id": row["custom_id"],
            "text": row["generated_text"],
            "tokens": int(row["num_generated_tokens"]),
        },
    )
    rows: list[dict[str, Any]] = [
        {
            "custom_id": line["custom_id"],
            # As text: Arrow would make one type of differing messages.
            "messages": json.dumps(line["body"]["messages"]),
            "sampling": json.dumps(lines.sampling(line["body"])),
        }
        for line in lines.read(source)
    ]
    answers = processor(ray.data.from_items(rows)).take_all()
    with open(target, "w", encoding="utf-8") as file:
        for row in answers:
            file.write(lines.answer(row["custom_id"], row["text"], row["tokens"]))
    print("WRITTEN", flush=True)


if __name__ == "__main__":
    main()
