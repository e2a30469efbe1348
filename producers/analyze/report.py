"""What an analysis found, in its public shape, and what that comes to in time and money. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from common.registry import Registry


class Duplicates(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that ask what an earlier one asked already."""

    requests: int
    #: Of these: whose answer is determined (temperature 0, a seed, or nothing to sample), so that one computation does.
    determined: int
    #: Tokens of the determined ones.
    prompt_tokens: int
    output_tokens: int


class KvUse(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens that the simulated KV cache had, and those left to compute."""

    cached_tokens: int
    computed_tokens: int


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one worker, in seconds, by what is made use of."""

    arrival: float
    planned: float
    #: In planned order, and determined duplicates computed once, where the model's `cache` in models.yaml allows it.
    deduplicated: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Time and cost with one model version, by the rates in its entry. `cost` is as `seconds`, None without a price."""

    model: str
    seconds: Seconds
    cost: Seconds | None
    currency: str
    #: `cache` of its entry in models.yaml; with `off` every duplicate is computed.
    cache: str


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `producers analyze`. Token counts are of all valid requests but those that are too long."""

    file: str
    model: str
    requests: int
    invalid: int
    #: Valid ones whose prompts leave no room in the model's context (tokens; None: not known): the engine refuses them.
    too_long: int
    context: int | None
    #: How prompts were counted, and whether that is what the engine will count.
    counted: str
    exact: bool
    prompt_tokens: int
    #: At most: what the requests allow, or the default where they do not say.
    output_tokens: int
    #: Prompt tokens in full blocks that some earlier prompt begins with as well.
    shared_prefix_tokens: int
    duplicates: Duplicates
    #: `cache` of the model's entry in models.yaml.
    cache: str
    kv_tokens: int
    #: Where the size is from.
    kv_said: str
    block_tokens: int
    arrival: KvUse
    planned: KvUse
    forecasts: list[Forecast]


def forecasts(
    registry: Registry, use: Mapping[str, KvUse], duplicates: Duplicates, prompt_tokens: int, output_tokens: int
) -> list[Forecast]:
    """One for every model version that has rates."""
    found = []
    share = use["planned"].computed_tokens / prompt_tokens if prompt_tokens else 1.0
    for model, entry in sorted(registry.versions.items()):
        rates = entry.rates
        if rates is None:
            continue
        answers = output_tokens / rates.output_tokens_per_s
        planned = use["planned"].computed_tokens / rates.prompt_tokens_per_s + answers
        # Of a duplicate's prompt only what the KV cache would not have saved anyway.
        saved = duplicates.prompt_tokens * share / rates.prompt_tokens_per_s
        saved += duplicates.output_tokens / rates.output_tokens_per_s
        if entry.cache == "off":
            saved = 0.0
        seconds = Seconds(
            arrival=round(use["arrival"].computed_tokens / rates.prompt_tokens_per_s + answers, 3),
            planned=round(planned, 3),
            deduplicated=round(max(0.0, planned - saved), 3),
        )
        cost = None
        if rates.cost_per_hour is not None:
            hour = rates.cost_per_hour / 3600
            cost = Seconds(**{name: round(getattr(seconds, name) * hour, 4) for name in seconds.__struct_fields__})
        found.append(Forecast(model=model, seconds=seconds, cost=cost, currency=rates.currency, cache=entry.cache))
    return found
