"""Tiny models with random weights, made here: what they answer means nothing, how they are served does."""

from __future__ import annotations

from pathlib import Path

_WORDS = ["the", "a", "of", "to", "in", "is", "it", "you", "that", "for", "one", "this", "something", "else"]


def _tokenizer(folder: Path) -> int:
    """A BERT tokenizer with a few words, and every letter for the rest; its vocabulary's size."""
    from transformers import BertTokenizerFast

    letters = [chr(c) for c in range(33, 127)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters), *_WORDS]
    vocabulary = list(dict.fromkeys(vocabulary))
    file = folder / "vocab.txt"
    file.write_text("\n".join(vocabulary) + "\n")
    BertTokenizerFast(vocab_file=str(file), model_max_length=128).save_pretrained(str(folder))
    return len(vocabulary)


def _config(size: int) -> dict[str, int]:
    return {
        "vocab_size": size,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 128,
    }


def embedding_model(folder: Path) -> Path:
    """A BERT that gives a vector of 64 numbers."""
    import torch
    from transformers import BertConfig, BertModel

    folder.mkdir(parents=True)
    torch.manual_seed(1)
    BertModel(BertConfig(**_config(_tokenizer(folder)))).save_pretrained(str(folder))
    return folder


def ranking_model(folder: Path) -> Path:
    """A BERT cross-encoder that gives one score for a pair of texts."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    folder.mkdir(parents=True)
    torch.manual_seed(2)
    config = BertConfig(**_config(_tokenizer(folder)), num_labels=1)
    BertForSequenceClassification(config).save_pretrained(str(folder))
    return folder
