"""Warm-up prompts of a model: asked once when its engine starts, so that shared prefixes are in the KV cache and what
is compiled at first use is compiled before the worker says that it is ready.

models.yaml, `warm_up`: a list of texts, lists of messages, request bodies (with `tools`, say, which a template puts
first), requests as in a batch (`url` and `body`), and `file: PATH` for a file of such, one JSON value a line. Each asks
for one token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from common import logs
from common.errors import BatchmillError, UsageError
from common.messages import Kind
from common.registry import ModelVersion
from common.urls import URL_CODE
from workers.engine import refusal
from workers.engine.base import Engine, EngineDead
from workers.outcome import judge

#: Prompts of one model and bytes of a file of them, at most: all of them are asked before the worker is ready.
MOST = 1024
MOST_BYTES = 8 << 20

_ENDPOINT_OF = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/embeddings"}
#: What makes an answer short, by endpoint.
_SHORT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/completions": {"max_tokens": 1},
    "/v1/messages": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1},
}
#: What is left out of a body: other limits, several answers, streams and budgets contradict one token in one piece, and
#: none of them is in the prompt.
_CONTRADICT = frozenset(
    {"background", "best_of", "max_completion_tokens", "min_tokens", "n", "stream", "stream_options", "use_beam_search"}
    | {"thinking", "thinking_token_budget"}
)

log = logs.get(__name__)


class Ask(NamedTuple):
    """One request."""

    url: str
    body: bytes


#: Requests that are tried one after the other until one is answered: which a model can do shows when it is asked.
Prompt = tuple[Ask, ...]


def prompts(model_version: str, entry: ModelVersion, where: str) -> list[Prompt]:
    """The prompts of an entry of the file `where`, beside which files that it names lie; `UsageError` for a bad one."""
    found: list[Prompt] = []
    for number, given in enumerate(entry.warm_up, 1):
        at = f"{where}: models.{model_version}.warm_up, entry {number}"
        if isinstance(given, dict) and "file" in given:
            found += _file(given, Path(where).parent, at)
        else:
            found.append(_prompt(given, at))
    if len(found) > MOST:
        raise UsageError(f"{where}: models.{model_version}.warm_up: {len(found):,} prompts, at most {MOST:,} are taken")
    return found


async def run(engine: Engine, model_version: str, asked: Sequence[Prompt], timeout_s: float) -> None:
    """Ask them all, as many at a time as the engine runs; each gets `timeout_s` seconds.

    Some without an answer are a warning; `BatchmillError` when none has one, or the engine ended.
    """
    if not asked:
        return
    began = time.monotonic()
    places = asyncio.Semaphore(engine.facts().max_num_seqs)

    async def ask(prompt: Prompt) -> str | None:
        async with places:
            return await _ask(engine, prompt, timeout_s)

    try:
        outcomes = await asyncio.gather(*(ask(prompt) for prompt in asked))
    except EngineDead as exc:
        raise BatchmillError(f"model {model_version}: the engine ended during its warm-up: {exc}") from None
    failed = [(number, why) for number, why in enumerate(outcomes, 1) if why is not None]
    if len(failed) == len(asked):
        raise UsageError(
            f"model {model_version}: not one of its {len(asked)} warm_up prompts got an answer ({failed[0][1]}); "
            "correct warm_up in models.yaml, or send one of them as a request to see all that the engine says"
        )
    for number, why in failed[:10]:
        log.warning("a warm-up prompt got no answer", prompt=number, reason=why)
    seconds = round(time.monotonic() - began, 2)
    log.info("warmed up", model=model_version, prompts=len(asked), failed=len(failed), seconds=seconds)


async def _ask(engine: Engine, prompt: Prompt, timeout_s: float) -> str | None:
    """None, or why there is no answer."""
    why, cannot = "no endpoint takes it", True
    for url, body in prompt:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await engine.infer(url, body)
        except TimeoutError:
            return f"no answer within {timeout_s:g} s"
        except EngineDead:
            raise
        except Exception as exc:
            return type(exc).__name__
        if judge(URL_CODE[url], answer.status, answer.body).kind is Kind.OUTPUT:
            return None
        # That a model cannot do the one thing says nothing where it refused the other.
        if cannot:
            said = refusal.reason(body, answer.body)
            why = f"status {answer.status} on {url}" + (f": {said}" if said else "")
            cannot = b'"unsupported"' in answer.body
    return why


def _prompt(given: Any, at: str) -> Prompt:
    if isinstance(given, str) and given:
        return _ask_for("/v1/completions", {"prompt": given}, at), _ask_for("/v1/embeddings", {"input": given}, at)
    if isinstance(given, list) and given and all(isinstance(message, dict) for message in given):
        return (_ask_for("/v1/chat/completions", {"messages": given}, at),)
    if isinstance(given, dict):
        url, body = given.get("url"), given.get("body")
        if isinstance(url, str) and url in URL_CODE and isinstance(body, dict):
            return (_ask_for(url, body, at),)
        for name, endpoint in _ENDPOINT_OF.items():
            if name in given:
                return (_ask_for(endpoint, given, at),)
    raise UsageError(
        f"{at}: is no warm-up prompt; write a text, a list of messages, a request body (with messages, prompt or "
        "input), a request (with url and body), or file: PATH"
    )


def _ask_for(url: str, body: dict[str, Any], at: str) -> Ask:
    short = _SHORT.get(url)
    if short is not None:
        body = {name: value for name, value in body.items() if name not in _CONTRADICT} | short
    try:
        return Ask(url, msgspec.json.encode(body))
    except (TypeError, ValueError, RecursionError):
        raise UsageError(f"{at}: cannot be written as JSON: its keys must be text") from None


def _file(given: dict[str, Any], folder: Path, at: str) -> list[Prompt]:
    name = given["file"]
    if len(given) > 1 or not isinstance(name, str):
        raise UsageError(f"{at}: write file: PATH and nothing beside it")
    try:
        path = folder / Path(name).expanduser()
        if path.exists() and not path.is_file():
            raise UsageError(f"{at}: {path} is no file")
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{at}: {path} has more than {MOST_BYTES >> 20} MiB")
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise UsageError(f"{at}: cannot read {path}: {exc.strerror}") from None
    except (RuntimeError, ValueError):
        # `~nobody`, and a name with a NUL.
        raise UsageError(f"{at}: {name!a} names no file") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                value = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise UsageError(f"{path}, line {number}: is no JSON; write one prompt a line") from None
            found.append(_prompt(value, f"{path}, line {number}"))
    return found
