"""Prompts in tokens: by the model's own tokenizer and chat template where its folder is here, else by their bytes."""

from __future__ import annotations

import datetime
import json
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from producers.analyze.prompts import Asked, Prompt, plain
from producers.planner import BYTES_PER_TOKEN

#: Prompts handed to the tokenizer at a time: what it gives back is many times their size.
_AT_ONCE = 128


class Blocks(NamedTuple):
    """A prompt as an engine's prefix cache sees it."""

    tokens: int
    #: Hashes of its full blocks, each of all tokens up to the block's end; an array, since a window's are many.
    chain: array[int]


class Counter(Protocol):
    """Counts tokens."""

    @property
    def exact(self) -> bool:
        """As the engine will, as far as counted by now."""
        ...

    @property
    def said(self) -> str:
        """How, for people, as far as counted by now."""
        ...

    def count(self, requests: Sequence[Asked], block: int) -> list[list[Blocks]]:
        """The prompts of each request, in blocks of `block` tokens."""
        ...


class ByBytes:
    """An estimate: so many bytes a token."""

    exact = False

    def __init__(self, why: str) -> None:
        self.said = f"estimated: {BYTES_PER_TOKEN} bytes a token ({why})"

    def count(self, requests: Sequence[Asked], block: int) -> list[list[Blocks]]:
        """See `Counter`."""
        return [[self._blocks(prompt, block) for prompt in self._prompts(asked)] for asked in requests]

    @staticmethod
    def _prompts(asked: Asked) -> list[Prompt]:
        if asked.messages is None:
            return asked.prompts
        tools = msgspec.json.encode(asked.tools).decode() if asked.tools else ""
        return [tools + plain(asked.messages)]

    @staticmethod
    def _blocks(prompt: Prompt, block: int) -> Blocks:
        if isinstance(prompt, list):
            return of_ids(prompt, block)
        data = prompt.encode("utf-8", "replace")
        return Blocks(-(-len(data) // BYTES_PER_TOKEN), _chain(data, block * BYTES_PER_TOKEN))


class ByTokenizer:
    """The model's `tokenizer.json` and chat template."""

    def __init__(self, model: str, tokenizer: Any, render: Callable[[Asked], str] | None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._render = render
        self._conversations = self._plain = 0
        self._why = ""

    @property
    def exact(self) -> bool:
        """See `Counter`."""
        return not self._plain

    @property
    def said(self) -> str:
        """See `Counter`."""
        said = f"by the tokenizer of {self._model}"
        if not self._plain:
            return said
        if self._render is None:
            return f"{said}, without its chat template"
        return (
            f"{said}, but {self._plain:,} of {self._conversations:,} conversations without its chat template, which "
            f"failed on them ({self._why}), as the engine may"
        )

    def count(self, requests: Sequence[Asked], block: int) -> list[list[Blocks]]:
        """See `Counter`."""
        found: list[list[Blocks]] = [[] for _ in requests]
        # Templates write the special tokens themselves.
        for special, wanted in ((False, True), (True, False)):
            texts: list[tuple[int, str]] = []
            for number, asked in enumerate(requests):
                if (asked.messages is not None) is not wanted:
                    continue
                for prompt in [self._rendered(asked)] if wanted else asked.prompts:
                    if isinstance(prompt, list):
                        found[number].append(of_ids(prompt, block))
                    else:
                        texts.append((number, prompt))
            for at in range(0, len(texts), _AT_ONCE):
                part = texts[at : at + _AT_ONCE]
                encoded = self._tokenizer.encode_batch_fast([text for _, text in part], add_special_tokens=special)
                for (number, _), one in zip(part, encoded, strict=True):
                    found[number].append(of_ids(one.ids, block))
        return found

    def _rendered(self, asked: Asked) -> str:
        assert asked.messages is not None
        self._conversations += 1
        if self._render is not None:
            try:
                return self._render(asked)
            except Exception as exc:
                # A template may refuse a conversation, as the engine will then, or need what only the engine has.
                self._why = self._why or f"{type(exc).__name__}: {exc}".splitlines()[0][:120]
        self._plain += 1
        return plain(asked.messages)


def of_ids(ids: Sequence[int], block: int) -> Blocks:
    """Token ids in blocks."""
    return Blocks(len(ids), _chain(np.asarray(ids, "<u4").tobytes(), 4 * block))


def _chain(data: bytes, size: int) -> array[int]:
    chain = array("Q")
    before = 0
    for start in range(0, len(data) - size + 1, size):
        before = xxh3_64_intdigest(data[start : start + size], seed=before)
        chain.append(before)
    return chain


def counter(model: str, folder: Path | None) -> Counter:
    """For a model whose files are in `folder`, if they are anywhere here."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return ByBytes(f"no tokenizer.json of {model} on this machine")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return ByBytes("the package tokenizers is not installed: pip install 'batchmill[analyze]'")
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as exc:
        return ByBytes(f"{folder}/tokenizer.json cannot be read: {type(exc).__name__}")
    # Truncation and padding are for training; engines do neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return ByTokenizer(model, tokenizer, _template(folder))


def _template(folder: Path) -> Callable[[Asked], str] | None:
    """The model's chat template as a function; None where there is none, or nothing to run it with."""
    try:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        return None
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        config = {}
    file = folder / "chat_template.jinja"
    source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = next((one.get("template") for one in source if one.get("name") == "default"), None)
    if not isinstance(source, str):
        return None

    def refuse(message: str) -> None:
        raise ValueError(message)

    # As transformers sets it up (utils/chat_template_utils.py).
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    special = {
        name: token if isinstance(token, str) else token.get("content", "")
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (token := config.get(name)) is not None
    }
    try:
        template = environment.from_string(source)
    except Exception:
        return None

    def render(asked: Asked) -> str:
        values = special | {"add_generation_prompt": True, "documents": None} | asked.options
        return template.render(messages=asked.messages, tools=asked.tools or None, **values)

    return render
