"""Whatever goes wrong becomes an exit code and one line; `--help` stays light."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import exits, say
from common.command import guard
from common.errors import InvalidInput, Unreachable, UsageError
from common.ids import new_batch_id
from common.store import LocalStore
from producers.batch_view import look
from producers.cli.handler import run
from producers.cli.watch import way_back
from producers.embedded import record
from producers.embedded.layout import layout
from tests.support import stored

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings, and a home folder of one's own."""
    monkeypatch.setenv("BATCHMILL_HOME", str(tmp_path / "home"))
    # Empty means unset; options that set these are undone after the test.
    monkeypatch.setenv("BATCHMILL_CONFIG", "")
    monkeypatch.setenv("BATCHMILL_MODELS", "")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """The store that the commands see."""
    return LocalStore(tmp_path / "home" / "store")


def _fail(exc: BaseException) -> int:
    def call() -> None:
        raise exc

    return guard("producers", call)


@pytest.mark.parametrize(
    ("exc", "code"),
    [
        (UsageError("no such thing;\nuse another"), exits.INVALID),
        (InvalidInput("line 3"), exits.INVALID),
        (Unreachable("nobody there"), exits.UNREACHABLE),
    ],
)
def test_a_users_error_is_one_line(exc: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert _fail(exc) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"producers: error: {' '.join(str(exc).split())}\n"


def test_a_bug_is_short_and_says_how_to_see_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _fail(RuntimeError("boom")) == exits.BUG
    short = capsys.readouterr().err
    assert "Traceback" not in short
    assert "BATCHMILL_DEBUG=1" in short
    monkeypatch.setenv("BATCHMILL_DEBUG", "1")
    assert _fail(RuntimeError("boom")) == exits.BUG
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("exc", "where"),
    [
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/home/u/fleet/fleet.lock"),
            "/home/u/fleet/fleet.lock",
        ),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), b"/full/x"), "/full/"),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "this machine"),
    ],
)
def test_what_the_machine_refuses_is_no_bug(exc: OSError, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _fail(exc) == exits.UNREACHABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"producers: error: {where}")
    assert f": {exc.strerror}; " in line
    assert _fail(OSError(errno.EBADF, os.strerror(errno.EBADF))) == exits.BUG, "what we did wrong stays our own"


@pytest.mark.parametrize("argv", [["fleet", "status"], ["fleet", "down"], ["list"]])
def test_a_home_that_cannot_be_entered_is_three_and_one_line(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # What holds for root too.
    monkeypatch.setenv("BATCHMILL_HOME", f"/tmp/{'x' * 300}")
    assert run(argv) == exits.UNREACHABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert os.strerror(errno.ENAMETOOLONG) in line


def test_a_user_without_a_home_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def nobody(_uid: int) -> None:
        raise KeyError("a container's user")

    monkeypatch.setattr("pwd.getpwuid", nobody)
    for name in ("HOME", "XDG_DATA_HOME", "BATCHMILL_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert run(["list"]) == exits.INVALID
    assert capsys.readouterr().err == ("producers: error: no home folder is known for this user; set BATCHMILL_HOME\n")
    file = tmp_path / "in.jsonl"
    file.write_text('{"custom_id": "a", "body": {"prompt": "x"}}\n')
    for name in ("BATCHMILL_HOME", "BATCHMILL_STORE_URL", "BATCHMILL_INFERENCE_MODELS_DIR"):
        with monkeypatch.context() as patch:
            patch.setenv("BATCHMILL_HOME", str(tmp_path / "home"))
            patch.setenv("BATCHMILL_MODELS", str(ROOT / "config" / "models.yaml"))
            patch.setenv(name, "~nobody-of-this-name/x")
            assert run(["analyze", str(file)] if name.endswith("DIR") else ["list"]) == exits.INVALID
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("producers: error: ~nobody-of-this-name/x: no such home folder is known")


def test_a_working_folder_that_has_gone_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("BATCHMILL_HOME", "relative")
    assert run(["list"]) == exits.INVALID
    assert capsys.readouterr().err == ("producers: error: the working folder has gone; change into one that is there\n")


def test_other_ends_have_their_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert _fail(KeyboardInterrupt()) == 130
    assert _fail(say.PipeClosed()) == 141
    assert _fail(SystemExit(5)) == 5
    assert guard("producers", lambda: 3) == 3
    assert guard("producers", lambda: None) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "failed", "code"),
    [("completed", 0, 0), ("completed", 1, 1), ("failed", 0, 1), ("cancelled", 9, 4), ("expired", 0, 4)],
)
def test_the_outcome_of_a_batch_is_the_code(status: str, failed: int, code: int) -> None:
    assert exits.of_batch(status, failed) == code


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["submit"], "missing argument"),
        (["submit", "x", "--nonsense"], "no such option '--nonsense'"),
        (["nonsense"], "nonsense"),
        (["list", "-n", "0"], "'--limit'"),
        (["status", "batch_1"], "is not a batch id"),
        (["status", "../../etc"], "is not a batch id"),
        (["cancel", "batch_01k00000000000000000000000"], "no batch"),
        (["watch", "batch_01k00000000000000000000000"], "no batch"),
        (["--config", "/nonexistent.yaml", "list"], "/nonexistent.yaml: cannot be read"),
        (["submit", "x", "--priority"], "requires an argument (see producers submit --help)"),
        (["submit", "x", "--output", ""], "'-o': is empty"),
        (["submit", "x", "--output", "-"], "'-o': must be a folder"),
        (["watch", "batch_01k00000000000000000000000", "-o", ""], "'-o': is empty"),
        (["watch", "batch_01k00000000000000000000000", "-o", "-"], "'-o': must be a folder"),
    ],
)
def test_wrong_usage_is_two_and_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == exits.INVALID
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("producers: error: ")
    assert shown.err.count("\n") == 1
    assert says in shown.err


@pytest.mark.parametrize("argv", [[], ["fleet"]])
def test_a_missing_command_is_named_below_the_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == exits.INVALID
    shown = capsys.readouterr()
    assert "Commands" in shown.out
    assert shown.err == f"producers: error: a command is missing (see {' '.join(['producers', *argv])} --help)\n"


def test_an_empty_output_is_no_folder_for_results(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    batch = stored.batch(store)
    stored.status(store, batch, "completed", 10)
    stored.outputs(store, batch, set())
    assert run(["results", batch.id, "--output", ""]) == exits.INVALID
    assert "--output is empty" in capsys.readouterr().err


def test_a_narrow_terminal_gets_whole_ids(
    store: LocalStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = stored.batch(store, requests=1_000_000, name="name " * 20)
    stored.status(store, batch, "in_progress", 999_999, 1)
    for columns in ("1", "40", "79", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert run(["list"]) == exits.ANSWERED
        shown = capsys.readouterr().out.splitlines()[1].split()
        assert shown[:6] == [batch.id, "in", "progress", "100%", "1.0M", "1"]


def test_the_way_back_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("out", "my out", "$(reboot)", "it's"):
        way_back("batch_1", Path(folder))
        told = next(line for line in capsys.readouterr().err.splitlines() if "come back" in line)
        assert shlex.split(told)[2:] == ["producers", "watch", "batch_1", "--output", folder]


def test_a_store_that_cannot_be_opened_is_three(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATCHMILL_STORE_URL", str(tmp_path / "file" / "store"))
    assert run(["list"]) == exits.UNREACHABLE
    assert "there is no store at" in capsys.readouterr().err


def test_status_and_list_as_json_are_stable(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    of = stored.batch(store, name="n", metadata={"k": "v"})
    stored.status(store, of, "in_progress", 4, 1, started_at=stored.NOW, in_flight=2, resent=3)
    assert run(["status", of.id, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {
        "id": of.id,
        "object": "batch",
        "status": "in_progress",
        "reason": "no_coordinator",
        "model": of.model,
        "name": "n",
        "metadata": {"k": "v"},
        "request_counts": {"total": 10, "completed": 4, "failed": 1},
        "in_flight": 2,
        "work_done": 0.0,
        "resent": 3,
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 200,
            "cached_tokens": 30,
            "cache_hits": 4,
            "cache_misses": 0,
            "cache_bytes": 0,
            "shared": 0,
        },
        "cache": None,
        "input": {"name": "in.jsonl", "bytes": 1234, "digest": "0" * 64},
        "created_at": of.created_at,
        "started_at": stored.NOW,
        "finished_at": None,
        "updated_at": 0.0,
        "tenant": "default",
        "priority": "normal",
        "paused": False,
        "expires_at": None,
        "not_before": None,
        "run_between": None,
        "opens_at": None,
        "retry_of": None,
    }
    stored.heartbeat(store, time.time())
    newer = stored.batch(store)
    assert run(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed == {"object": "list", "data": [listed["data"][0], shown | {"reason": None}]}
    assert listed["data"][0]["id"] == newer.id
    assert run(["list", "--json", "-n", "1"]) == 0
    assert len(json.loads(capsys.readouterr().out)["data"]) == 1


def test_cancel_leaves_a_command_and_never_for_what_has_ended(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    of = stored.batch(store)
    assert run(["cancel", of.id, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"id": of.id, "asked": True, "status": "queued"}
    assert "no coordinator runs" in shown.err
    (command,) = store.list(f"control/{of.id}")
    assert json.loads(store.read(f"control/{of.id}/{command}"))["command"] == "cancel"
    stored.status(store, of, "completed", 10)
    assert run(["cancel", of.id]) == 0
    assert "nothing to cancel" in capsys.readouterr().out
    assert len(store.list(f"control/{of.id}")) == 1


@pytest.mark.parametrize(
    ("argv", "command", "priority"),
    [
        (["pause"], "pause", None),
        (["resume-dispatch"], "resume", None),
        (["reprioritize", "--priority", "urgent"], "reprioritize", "urgent"),
    ],
)
def test_commands_are_left_for_the_coordinator_and_only_while_they_mean_something(
    store: LocalStore, capsys: pytest.CaptureFixture[str], argv: list[str], command: str, priority: str | None
) -> None:
    of = stored.batch(store)
    assert run([argv[0], of.id, *argv[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": of.id, "asked": True, "status": "queued"}
    (name,) = store.list(f"control/{of.id}")
    left = json.loads(store.read(f"control/{of.id}/{name}"))
    assert (left["command"], left["priority"]) == (command, priority)
    assert run([argv[0], of.id, *argv[1:]]) == 0
    assert of.id in capsys.readouterr().out
    for status in ("completed", "cancelling"):
        stored.status(store, of, status)
        assert run([argv[0], of.id, *argv[1:]]) == exits.INVALID
        assert capsys.readouterr().err.startswith(f"producers: error: {of.id} is {status}: there is nothing to ")
    assert run([argv[0], new_batch_id(), *argv[1:]]) == exits.INVALID
    assert "no batch batch_" in capsys.readouterr().err
    assert len(store.list(f"control/{of.id}")) == 2


def test_a_priority_that_is_none_is_refused(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    of = stored.batch(store)
    assert run(["reprioritize", of.id, "--priority", "huge"]) == exits.INVALID
    assert "'huge' is not one of low, normal, high, urgent" in capsys.readouterr().err
    assert run(["reprioritize", of.id]) == exits.INVALID
    assert store.list("control") == []


def test_only_what_has_ended_with_outputs_can_be_retried(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    of = stored.batch(store)
    for status, said in (("in_progress", "retry it when it has ended"), ("failed", "failed as a whole")):
        stored.status(store, of, status)
        assert run(["retry", of.id]) == exits.INVALID
        assert said in capsys.readouterr().err
    stored.status(store, of, "completed", 10)
    stored.outputs(store, of, set())
    assert run(["retry", of.id]) == exits.INVALID
    assert "nothing to retry, every request is answered" in capsys.readouterr().err
    assert run(["results", of.id, "--merged"]) == exits.INVALID
    assert "retries no other batch" in capsys.readouterr().err


def test_a_wrong_linger_time_is_told_before_anything_is_enqueued(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.jsonl").write_text('{"custom_id":"a","body":{"prompt":"x"}}\n')
    (tmp_path / "models.yaml").write_text("default: m@1\nmodels:\n  m@1:\n    source: x\n")
    monkeypatch.setenv("BATCHMILL_MODELS", "models.yaml")
    for wrong in ("abc", "nan"):
        monkeypatch.setenv("BATCHMILL_FLEET_LINGER_S", wrong)
        assert run(["submit", "in.jsonl", "-d"]) == exits.INVALID
        assert f"BATCHMILL_FLEET_LINGER_S: '{wrong}' is not a number of seconds" in capsys.readouterr().err
    assert store.list("batches") == []


def test_resume_with_nothing_to_do_says_so(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    paused = stored.batch(store)
    stored.status(store, paused, "queued", paused=True, reason="paused")
    assert run(["resume"]) == 0
    assert "nothing to resume" in capsys.readouterr().err
    store.create_exclusive(f"active/0/{paused.id}", b"")
    assert run(["resume", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"object": "list", "data": []}
    assert "1 unfinished batch:" in shown.err
    assert f"{paused.id} stays paused" in shown.err


def test_where_batches_wait_is_told_in_a_row_each(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    stored.heartbeat(store, time.time())
    for reason in (None, "disk_full", "disk_full", "no_workers", "paused"):
        of = stored.batch(store)
        store.create_exclusive(f"active/0/{of.id}", b"")
        stored.status(store, of, "in_progress", reason=reason)
    assert run(["list"]) == 0
    listed = capsys.readouterr().out
    assert listed.count("waiting: the disk of the store or its log is full") == 2
    assert "waiting: no worker serves echo-test@1" in listed
    assert "start one" not in listed
    where = layout()
    where.create()
    record.write(where.record, record.Record(state="stopped", pid=0, store=store.url))
    assert run(["fleet", "status", "--json"]) == exits.UNREACHABLE
    shown = json.loads(capsys.readouterr().out)
    assert (shown["batches"], shown["reasons"]) == (5, {"disk_full": 2, "no_workers": 1, "paused": 1})
    assert run(["fleet", "status"]) == exits.UNREACHABLE
    shown = capsys.readouterr().out
    for part in ("5 unfinished", "2 × waiting: the disk of the store or its log is full", "1 × no workers"):
        assert part in shown


def test_a_full_disk_is_told_although_its_coordinator_cannot(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = stored.batch(store)
    stored.heartbeat(store, time.time() - 60)
    assert look(store, of.id).reason == "no_coordinator"
    monkeypatch.setattr(LocalStore, "is_full", lambda _self: True)
    assert look(store, of.id).reason == "disk_full"


@pytest.mark.parametrize(
    ("status", "failed", "code"), [("completed", set[int](), 0), ("completed", {1}, 1), ("cancelled", {1, 2}, 4)]
)
def test_watch_and_results_put_the_outputs_and_exit_by_the_outcome(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: str, failed: set[int], code: int
) -> None:
    of = stored.batch(store)
    made = stored.outputs(store, of, failed)
    stored.status(store, of, status, 10 - len(failed), len(failed), started_at=1.0, finished_at=3.0)
    for argv in (["watch", of.id], ["results", of.id]):
        assert run([*argv, "--json"]) == code
        shown = json.loads(capsys.readouterr().out)
        folder = tmp_path / "batchmill-out" / of.id
        assert shown["outputs"] == {
            "output": str(folder / "output.jsonl"),
            "errors": str(folder / "errors.jsonl"),
            "summary": str(folder / "summary.json"),
        }
        assert shown["status"] == status
        assert (folder / "output.jsonl").read_bytes().count(b"\n") == 10 - len(failed)
        (folder / "output.jsonl").unlink()
    assert run(["results", of.id, "--output", "elsewhere"]) == code
    assert (tmp_path / "elsewhere" / "errors.jsonl").exists()
    assert f"{10 - len(failed)} answered" in capsys.readouterr().out
    assert run(["results", of.id, "--output", "-"]) == code
    assert capsys.readouterr().out.encode() == b"".join(made)


def test_a_batch_that_failed_as_a_whole_says_why(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    of = stored.batch(store)
    stored.status(store, of, "failed", reason="rows are damaged; submit the file again")
    assert run(["watch", of.id]) == exits.SOME_FAILED
    assert "rows are damaged; submit the file again" in capsys.readouterr().out
    assert run(["results", of.id, "--json"]) == exits.SOME_FAILED
    shown = json.loads(capsys.readouterr().out)
    assert (shown["outputs"], shown["reason"]) == (None, "rows are damaged; submit the file again")
    assert run(["results", of.id, "--output", "-"]) == exits.SOME_FAILED
    assert capsys.readouterr().err.startswith(f"producers: error: {of.id} has no output.jsonl")


def test_results_of_a_running_batch_need_partial(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    of = stored.batch(store)
    stored.status(store, of, "in_progress", 4)
    assert run(["results", of.id]) == exits.INVALID
    assert "is in progress (4 of 10 done)" in capsys.readouterr().err


def test_coordinate_ends_by_its_reason(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import producers.coordinator
    from producers.coordinator.core import Ousted

    # Logging is the process's, and would keep the stream of this test.
    monkeypatch.setattr("common.logs.configure", lambda *_: None)
    assert run(["coordinate", "--shard", "1"]) == exits.INVALID
    assert "scheduler.shards is 1" in capsys.readouterr().err
    assert run(["coordinate"]) == exits.INVALID  # no message keys
    assert "security.dispatch_key is not set" in capsys.readouterr().err

    def ousted(*_: object) -> None:
        raise Ousted

    monkeypatch.setattr(producers.coordinator, "run", ousted)
    assert run(["coordinate"]) == exits.OUSTED
    assert "stands by" in capsys.readouterr().err


def _python(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, encoding="latin-1", timeout=60, env=base | env, check=False
    )


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from producers.cli.handler import run; code = run(sys.argv[1:]);"
        "heavy = {'vllm', 'torch', 'celery', 'kombu', 'redis', 'numpy', 'fsspec', 'workers'} & set(sys.modules);"
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    for argv in (["--help"], ["submit", "--help"], ["fleet", "--help"]):
        done = _python("-c", script, *argv)
        assert done.returncode == 0, done.stderr
        assert "Usage" in done.stdout


@pytest.mark.parametrize(
    "locale",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1:strict"},
        {"PYTHONIOENCODING": "utf-8:strict"},
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_any_locale_will_do(tmp_path: Path, store: LocalStore, locale: dict[str, str]) -> None:
    of = stored.batch(store, name="naïve 你好")
    stored.outputs(store, of, set())
    stored.status(store, of, "completed", 10)
    env = {"BATCHMILL_HOME": str(tmp_path / "home"), **locale}
    folder = tmp_path / "caf\udce9"
    for argv in (["--help"], ["list"], ["status", of.id], ["results", of.id, "-o", str(folder)]):
        done = _python("-m", "producers", *argv, **env)
        assert (done.returncode, done.stderr) == (0, ""), argv
    assert {entry.name for entry in folder.iterdir()} == {"output.jsonl", "errors.jsonl", "summary.json"}
    done = _python("-m", "producers", "results", of.id, "-o", str(folder), "--json", **env)
    assert json.loads(done.stdout)["outputs"]["output"] == str(folder / "output.jsonl")


def test_help_is_quick() -> None:
    # Its own CPU time, the best of three: a busy machine makes any command wait.
    took = []
    for _ in range(3):
        before = os.times()
        assert _python("-m", "producers", "--help").returncode == 0
        after = os.times()
        spent = after.children_user - before.children_user + after.children_system - before.children_system
        took.append(spent)
    assert min(took) < 0.5


def test_a_reader_that_goes_away_ends_the_command_quietly(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "home" / "store")
    of = stored.batch(store, requests=20_000)
    stored.outputs(store, of, set())
    stored.status(store, of, "completed", 20_000)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "producers", "results", of.id, "--output", "-"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b'{"id":"batch_req_')
        process.stdout.close()
        assert process.wait(60) == exits.PIPE_CLOSED
        assert process.stderr.read() == b""


@pytest.mark.parametrize(
    "argv", [["list"], ["status", "ID"], ["results", "ID", "-o", "-"], ["list", "--json"], ["list", "--help"]]
)
@pytest.mark.parametrize(
    ("streams", "code"),
    [(">/dev/full", 2), (">&-", 2), ("2>&-", 0), (">&- 2>&-", 2), ("2>/dev/full", 0), (">/dev/full 2>&-", 2)],
)
def test_streams_that_take_nothing(tmp_path: Path, store: LocalStore, argv: list[str], streams: str, code: int) -> None:
    of = stored.batch(store)
    stored.outputs(store, of, set())
    stored.status(store, of, "completed", 10)
    line = shlex.join([sys.executable, "-m", "producers", *(of.id if a == "ID" else a for a in argv)])
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", f"{line} {streams}"], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == code
    if streams == ">/dev/full":
        assert done.stderr == "producers: error: standard output cannot be written: No space left on device\n"
    if streams == ">&-":
        assert done.stderr == "producers: error: standard output cannot be written: it is closed\n"


def test_errors_are_told_by_the_code_where_stderr_takes_nothing(tmp_path: Path) -> None:
    line = shlex.join([sys.executable, "-m", "producers", "submit", "none.jsonl"])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "BATCHMILL_MODELS": str(ROOT / "config" / "models.yaml")}
    for streams in ("2>/dev/full", "2>&-"):
        assert subprocess.run(["sh", "-c", f"{line} {streams}"], env=env, check=False).returncode == exits.INVALID


def test_any_number_in_a_stored_batch_can_be_shown(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    for at in (253402349400.0, 1e308, -1e308):
        of = stored.batch(store, created_at=at, not_before=at, expires_at=at, run_between="22:00-06:00 Asia/Tokyo")
        stored.status(store, of, "queued", reason="scheduled", opens_at=at)
        assert run(["status", of.id]) == 0
    assert run(["list"]) == 0
    assert "this is a bug" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["batch.json", "status.json"])
def test_a_damaged_batch_is_named_and_the_others_are_listed(
    store: LocalStore, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    fine, broken = stored.batch(store), stored.batch(store)
    store.put_atomic(f"batches/{broken.id}/{name}", b"garbage")
    for command in ("status", "results", "retry", "watch", "cancel"):
        assert run([command, broken.id]) == exits.UNREACHABLE
        shown = capsys.readouterr()
        assert f"{broken.id}/{name}: is damaged" in shown.err
        assert shown.err.count("\n") == 1
    assert run(["list", "--json"]) == 0
    shown = capsys.readouterr()
    assert [b["id"] for b in json.loads(shown.out)["data"]] == [fine.id]
    assert f"{broken.id}/{name}: is damaged" in shown.err


def test_retry_of_damaged_errors_names_them(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    of = stored.batch(store, requests=4)
    stored.status(store, of, "completed", 3, 1)
    stored.outputs(store, of, {1})
    store.put_atomic(f"batches/{of.id}/errors.jsonl", b"garbage\n")
    assert run(["retry", of.id, "-d"]) == exits.UNREACHABLE
    assert f"{of.id}/errors.jsonl in the store is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"garbage"])
def test_a_lost_status_is_told_by_the_summary(
    store: LocalStore, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    of = stored.batch(store, requests=2)
    summary = {
        "id": of.id,
        "status": "completed",
        "completed": 1,
        "failed": 1,
        "resent": 0,
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 3, "cache_hits": 4},
        "timings": {"created_at": 1.0, "started_at": 2.0, "finished_at": 3.0, "requests_per_s": None},
    }
    store.put_atomic(f"batches/{of.id}/summary.json", json.dumps(summary).encode())
    if content is not None:
        store.put_atomic(f"batches/{of.id}/status.json", content)
    assert run(["status", of.id, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["status"], told["request_counts"]["failed"], told["finished_at"]) == ("completed", 1, 3.0)
    assert (told["usage"]["completion_tokens"], told["usage"]["shared"]) == (2, 0)
    assert "status.json is missing or damaged" in told["reason"]
    # While its marker is there, the coordinator has the last word.
    store.put_atomic(f"active/0/{of.id}", b"")
    assert run(["status", of.id, "--json"]) == (0 if content is None else exits.UNREACHABLE)


def test_a_command_that_reads_makes_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Where nothing is named, there is nothing yet.
    assert run(["list"]) == 0
    assert run(["resume"]) == 0
    assert not (tmp_path / "home").exists()
    capsys.readouterr()
    monkeypatch.setenv("BATCHMILL_STORE_URL", str(tmp_path / "stor"))
    batch_id = new_batch_id()
    for argv in (
        ["list"],
        ["resume"],
        *([c, batch_id] for c in ("status", "watch", "results", "retry", "cancel", "pause")),
    ):
        assert run(argv) == exits.UNREACHABLE
        assert f"there is no store at {tmp_path / 'stor'}" in capsys.readouterr().err
    assert not (tmp_path / "stor").exists()
