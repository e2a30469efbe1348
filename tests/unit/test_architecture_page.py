"""docs/architecture.md: every invariant names tests, and those tests are there."""

from __future__ import annotations

import re

from tests.support.processes import ROOT


def test_every_invariant_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    invariants = re.findall(r"^(\d)\. \*\*", page, re.MULTILINE)
    rows = {row[0]: re.findall(r"`(test_\w+)`", row) for row in re.findall(r"^\| (\d .*)$", page, re.MULTILINE)}
    assert sorted(rows) == invariants
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for named in rows.values():
        assert named
        missing = [name for name in named if f"def {name}(" not in sources]
        assert missing == []
