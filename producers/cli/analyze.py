"""`producers analyze`: the table of what a file will cost."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from common import exits, say
from producers.analyze.analysis import analyze as look_at
from producers.analyze.report import Analysis, Forecast, Seconds
from producers.cli import surroundings, wording
from producers.cli.reading import reading


def analyze(
    source: str,
    *,
    model: str | None,
    kv_tokens: int | None,
    block_tokens: int | None,
    max_tokens_default: int | None,
    as_json: bool,
) -> int:
    """Analyse a file; that some of its requests are not valid is for `validate` to say in full."""
    settings = surroundings.load_settings()
    registry = surroundings.load_registry(settings)
    with reading(source) as progress:
        found = look_at(
            source,
            settings,
            registry,
            model=model,
            max_tokens_default=max_tokens_default,
            kv_tokens=kv_tokens,
            block_tokens=block_tokens,
            progress=progress,
        )
    if as_json:
        say.json(found)
    else:
        say.render(card(found))
        if found.forecasts:
            say.out("")
            say.render(table(found.forecasts))
        say.out("\n" + "\n".join(assumptions(found)))
    return exits.ANSWERED


def card(found: Analysis) -> Table:
    """Counts as rows of name and value."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    prompt, same = found.prompt_tokens, found.duplicates
    counted = found.requests - found.too_long
    invalid = f"; {found.invalid:,} more are not valid" if found.invalid else ""
    arrival, planned = found.arrival.cached_tokens, found.planned.cached_tokens
    rows: list[tuple[str, int, str]] = [
        ("requests", found.requests, f"for {found.model}{invalid}"),
        ("prompt tokens", prompt, f"{prompt / max(1, counted):,.0f} a request"),
        ("answer tokens", found.output_tokens, "at most"),
        ("shared prefixes", found.shared_prefix_tokens, f"{_share(found.shared_prefix_tokens, prompt)} of the prompts"),
        ("KV cache saves", arrival, f"{_share(arrival, prompt)}, in the order of the file"),
        ("", planned, f"{_share(planned, prompt)}, in planned order"),
        ("duplicates", same.requests, f"{same.determined:,} of them determined: {_once(found.cache)}"),
    ]
    if found.too_long:
        estimated = "" if found.exact else " by this estimate"
        refused = (
            f"for the context of {found.context:,} tokens{estimated}: the engine will refuse them; not counted below"
        )
        rows.insert(1, ("too long", found.too_long, refused))
    for name, value, remark in rows:
        grid.add_row(name, f"{value:,}", escape(remark))
    return grid


def _once(cache: str) -> str:
    return "each is computed (cache: off in models.yaml)" if cache == "off" else "computed once is enough"


def table(found: list[Forecast]) -> Table:
    """Time and cost of each model version that has rates."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    made.add_column("one worker of", no_wrap=True)
    for name in ("order of file", "planned", "duplicates once"):
        made.add_column(name, justify="right")
    for one in found:
        made.add_row(one.model, *_columns(one))
    return made


def _columns(one: Forecast) -> list[str]:
    def cell(name: str) -> str:
        spent = wording.took(getattr(one.seconds, name))
        if one.cost is None:
            return spent
        cost = getattr(one.cost, name)
        return f"{spent}, {cost:,.{2 if cost >= 1 else 4}f} {one.currency}"

    return [escape(cell(name)) for name in Seconds.__struct_fields__]


def assumptions(found: Analysis) -> list[str]:
    """What the figures rest on."""
    said = [
        f"Prompts: {found.counted}.",
        f"KV cache: {found.kv_tokens:,} tokens in blocks of {found.block_tokens} ({found.kv_said}); requests enter one "
        "after the other, an answer takes the room that it may.",
        "Answers: as long as each request allows.",
    ]
    if found.forecasts:
        said.append("Time: a full batch at the rates of models.yaml, all counted with this tokenizer.")
        off = [one.model for one in found.forecasts if one.cache == "off"]
        if off:
            said.append(f"Duplicates: computed each by {', '.join(off)} (cache: off in models.yaml).")
    else:
        said.append("Time and cost: put `rates` of a model version into models.yaml (docs/settings.md).")
    return said


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
