"""Default places follow the environment and give way to settings."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from common import places
from common.settings import Settings


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"BATCHMILL_HOME": "/a/b", "XDG_DATA_HOME": "/c"}, Path("/a/b")),
        ({"XDG_DATA_HOME": "/c"}, Path("/c/batchmill")),
        ({}, Path("~/.local/share/batchmill").expanduser()),
    ],
)
def test_home_by_environment(env: dict[str, str], expected: Path) -> None:
    assert places.home(env) == expected


def test_settings_win_over_the_home_folder() -> None:
    env = {"BATCHMILL_HOME": "/h"}
    assert places.store_url(Settings(), env) == "/h/store"
    assert places.models_dir(Settings(), env) == Path("/h/models")
    assert places.fleet_dir(env) == Path("/h/fleet")
    named = msgspec.convert({"store": {"url": "s3://b/p"}, "inference": {"models_dir": "/m"}}, Settings)
    assert places.store_url(named, env) == "s3://b/p"
    assert places.models_dir(named, env) == Path("/m")
