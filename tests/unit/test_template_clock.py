"""Chat templates that print the date: yesterday's answer is not today's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from common.messages import Chunk, Slice
from common.urls import URL_CODE
from tests.unit.test_cache_memory import Cache, Work
from workers.cache.key import Space
from workers.cache.memory import Memory
from workers.cache.result_cache import ResultCache
from workers.cache.template_clock import Clock, clock_in, clock_of

CHAT = URL_CODE["/v1/chat/completions"]
LLAMA = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}'
    "{%- endif %}{%- endif %}Today Date: {{ date_string }}"
)


@pytest.mark.parametrize(
    ("template", "clock"),
    [
        ("{{ messages }}", Clock.NONE),
        (LLAMA, Clock.DAY),
        ("{{ strftime_now('%-d. %B %Y, %A') }}", Clock.DAY),
        ("{{ strftime_now ( '%Y-%m-%d' ) }} at {{ strftime_now('%H:%M') }}", Clock.MOMENT),
        ("{{ strftime_now('%x %Z') }}", Clock.MOMENT),
        ("{{ strftime_now(format) }}", Clock.MOMENT),
        ("{% set now = strftime_now %}{{ now('%Y') }}", Clock.MOMENT),
        ("{{ strftime_now('%Y\\u0025H') }}", Clock.MOMENT),
    ],
)
def test_what_a_template_tells_of_the_time(template: str, clock: Clock) -> None:
    assert clock_in(template) is clock


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", LLAMA),
        ("tokenizer_config.json", json.dumps({"chat_template": LLAMA})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "tool_use", "template": LLAMA}]})),
        ("chat_template.json", json.dumps({"chat_template": LLAMA})),
        ("additional_chat_templates/rag.jinja", LLAMA),
    ],
)
def test_templates_are_found_where_models_have_them(tmp_path: Path, name: str, content: str) -> None:
    assert clock_of(tmp_path / "not there", {}) is Clock.NONE
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    assert clock_of(tmp_path, {"max_num_seqs": 4}) is Clock.DAY
    for value in (str(tmp_path), str(tmp_path / name), {"inner": [LLAMA]}):
        assert clock_of(tmp_path / "not there", {"argument": value}) is Clock.DAY


def key(space: Space, url: int = CHAT, **fields: Any) -> bytes | None:
    return space.key("t", url, json.dumps({"temperature": 0} | fields).encode())


def test_each_day_has_its_own_answer_where_the_date_is_printed() -> None:
    day = ["2026-11-30"]
    dated, plain = (Space("m@1", "f", clock=clock, today=lambda: day[0]) for clock in (Clock.DAY, Clock.NONE))
    completions = URL_CODE["/v1/completions"]

    def keys() -> list[bytes | None]:
        return [
            key(dated),
            key(plain, chat_template=LLAMA),
            key(plain),
            key(plain, chat_template="{{ messages }}"),
            key(dated, completions),
        ]

    before = keys()
    day[0] = "2026-12-01"
    after = keys()
    assert None not in before + after
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, False, True, True, True]


def test_what_changes_within_the_day_has_no_key() -> None:
    space = Space("m@1", "f", clock=Clock.MOMENT)
    assert key(space) is None
    assert key(space, URL_CODE["/v1/completions"]) is not None
    everything = Space("m@1", "f", clock=Clock.MOMENT, everything=True)
    assert key(everything) is not None
    assert not everything.determined(CHAT, b'{"temperature": 0}'), "kept, and computed each for itself"


def test_an_answer_of_another_day_has_no_key_where_the_date_is_printed() -> None:
    space = Space("m@1", "f", today=None)
    assert key(space, chat_template=LLAMA) is None
    assert key(space) == key(Space("m@1", "f"))


def test_what_was_asked_before_midnight_and_answered_after_it_is_not_kept() -> None:
    day = ["2026-11-30"]
    cache, work = Cache(), Work()
    chunk = Chunk(1, "c", "m@1", "results.0", 1, 0.0, 0.0, 60.0, "on", [Slice("b", 0, 2, 1, b"", "t")] * 2)
    space = Space("m@1", "f", clock=Clock.DAY, today=lambda: day[0])
    mine = Memory(cast(ResultCache, cache), space, chunk, share=True)
    mine.recall(work)
    day[0] = "2026-12-01"
    mine.keep([work.done(0)])
    assert cache.held == {}
