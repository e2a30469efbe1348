"""Following a batch of the embedded fleet: what it waits for is said, what cannot get better ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import Unreachable
from common.store import LocalStore
from producers.attendant import LOOK_S, PROBLEM_S, Attendant
from producers.batch_view import BatchView, view
from producers.cli.fleet import until_ready
from producers.embedded import WorkerState
from tests.support import stored


class Fleet:
    """A fleet that says what it is told to."""

    def __init__(self) -> None:
        self.killed = False
        self.trouble: str | None = None
        self.worker = WorkerState(model=stored.MODEL, state="starting")

    def tend(self) -> bool:
        killed, self.killed = self.killed, False
        return killed

    def problem(self, model: str | None = None) -> str | None:
        assert model in (None, stored.MODEL)
        return self.trouble

    def worker_state(self, model: str | None = None) -> WorkerState:
        return self.worker


class Scene:
    """A batch, its fleet, a clock, and what was said."""

    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder)
        self.batch = stored.batch(self.store)
        self.fleet, self.said, self.now = Fleet(), list[str](), 0.0
        self.attend = Attendant(self.fleet, self.said.append, lambda: self.now)

    def see(self, status: str = "queued", done: int = 0, reason: str | None = None) -> BatchView:
        self.now += LOOK_S
        return self.attend(view(self.batch, stored.status(self.store, self.batch, status, done), reason))


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_the_workers_state_is_the_reason_until_answers_come(scene: Scene) -> None:
    assert scene.see().reason == "starting_worker"
    scene.fleet.worker.state = "loading"
    assert scene.see(reason="no_workers").reason == "loading_model"
    assert scene.see("in_progress", 3).reason is None
    scene.fleet.worker.state, scene.fleet.worker.detail = "restarting", "the worker ended: killed by signal 9"
    assert scene.see("in_progress", 3, "no_workers").reason == "the worker ended: killed by signal 9"
    scene.fleet.worker = WorkerState(model=stored.MODEL, state="ready")
    assert scene.see("in_progress", 4).reason is None
    assert scene.see("in_progress", 4, "disk_full").reason == "disk_full"
    # Not a person's to start here: the fleet does.
    assert scene.see("in_progress", 4, "no_coordinator").reason == "starting_coordinator"


def test_a_killed_fleet_is_brought_up_and_that_is_said(scene: Scene) -> None:
    scene.fleet.killed = True
    scene.see()
    scene.see()
    assert scene.said == ["the embedded fleet had ended and was brought up again"]


def test_a_problem_that_lasts_ends_following_and_a_passing_one_does_not(scene: Scene) -> None:
    scene.fleet.trouble = "the worker cannot start: no vllm; log: /x"
    scene.see()
    scene.fleet.trouble = None
    scene.now += 2 * PROBLEM_S
    scene.see()
    scene.fleet.trouble = "the worker cannot start: no vllm; log: /x"
    scene.see()
    scene.now += PROBLEM_S
    with pytest.raises(Unreachable, match=f"no vllm; log: /x; {scene.batch.id} is kept"):
        scene.see()


def test_the_end_of_the_batch_is_not_judged(scene: Scene) -> None:
    scene.fleet.trouble = "the fleet was stopped"
    scene.see()
    scene.now += 2 * PROBLEM_S
    assert scene.see("completed", 10).reason is None


def test_fleet_up_waits_until_ready_and_tells_each_state_once(scene: Scene) -> None:
    states = iter(["starting", "starting", "loading", "loading", "ready"])
    said: list[str] = []

    def pause(_seconds: float) -> None:
        scene.fleet.worker.state = next(states)

    until_ready(scene.fleet, said.append, lambda: scene.now, pause)
    assert said == [f"starting a worker of {stored.MODEL}", f"loading a worker of {stored.MODEL}"]


def test_fleet_up_gives_up_on_what_cannot_start(scene: Scene) -> None:
    scene.fleet.trouble = "the worker cannot start: no vllm"
    scene.fleet.worker.state = "failed"

    def pause(seconds: float) -> None:
        scene.now += seconds

    with pytest.raises(Unreachable, match="no vllm"):
        until_ready(scene.fleet, pytest.fail, lambda: scene.now, pause)
    assert PROBLEM_S <= scene.now < PROBLEM_S + 1
