"""Turn one GGUF file into an ordinary model folder: bf16 safetensors, config, tokenizer with chat template.

Runs as a process of its own (`python -m workers.models.convert FILE FOLDER`), so that torch and the weights in memory
are gone when it ends. De-quantising here, once, keeps every engine to one plain code path.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write the folder; it is made, and must not hold anything else."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16)
    # A fresh model of the same shape: the loaded one still says that it is quantised, and engines would believe it.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in loaded.state_dict().items()}
    fresh.load_state_dict(state)
    fresh.tie_weights()
    fresh.save_pretrained(str(folder), safe_serialization=True)
    tokenizer.save_pretrained(str(folder))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
