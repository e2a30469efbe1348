"""Settings and registry: every mistake is one line that names the place and the key."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from common import plain_yaml, registry, settings
from common.engine_arguments import argument
from common.errors import UsageError


def write(tmp_path: Path, text: str, name: str = "fleet.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, "utf-8")
    return path


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert settings.load(write(tmp_path, ""), env={}) == settings.Settings()


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    assert settings.load(write(tmp_path, "cache:\n"), env={}).cache == settings.Cache()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("foo: 1", ["fleet.yaml", "unknown key 'foo'"]),
        ("scheduler: {quue_size: 1}", ["fleet.yaml", "unknown key 'scheduler.quue_size'"]),
        ("scheduler: {queue_size: many}", ["fleet.yaml", "scheduler.queue_size", "expected int", "str"]),
        ("scheduler: {queue_size: 0}", ["scheduler.queue_size", "too small"]),
        ("inference: {chunks_in_flight: 1}", ["inference.chunks_in_flight", "too small"]),
        ("inference: {device_ids: [a]}", ["inference.device_ids[0]", "expected int"]),
        ("inference: {engine: gpt}", ["inference.engine", "vllm, echo"]),
        ("inference: {gpu_memory_utilization: 1.5}", ["inference.gpu_memory_utilization", "between 0 and 1"]),
        ("security: {dispatch_key: abc}", ["security.dispatch_key", "64 hex digits"]),
        ("security: {old_results_keys: {k0: abc}}", ["security.old_results_keys", "k0"]),
        ("broker: {url: http://secret@h}", ["fleet.yaml: broker.url", "must begin with", "redis://", "amqp://"]),
        ("broker: {url: secret}", ["broker.url", "must begin with"]),
        ("broker: {url: ''}", ["broker.url", "must begin with"]),
        ("broker: {url: 'redis://h:secret/0'}", ["broker.url", "host or port"]),
        ("broker: {url: 'amqp://u:secret/word@h:5672//'}", ["broker.url", "host or port", "%2F"]),
        ("broker: {url: 'amqp://u:secret@[::1'}", ["broker.url", "host or port"]),
        ("state: {url: 'amqp://secret@h'}", ["state.url", "must begin with"]),
        ("state: {url: 'redis://h:99999/secret'}", ["state.url", "host or port"]),
        ("cache: {url: secret}", ["cache.url", "must begin with"]),
        ("cache: [", ["fleet.yaml:1", "not valid YAML"]),
        ("[1]", ["mapping of sections"]),
        (
            "scheduler: {lease_s: 6}\ncache: {mode: off}\nscheduler:\n  shards: 2",
            ["fleet.yaml:3", "'scheduler' is given twice"],
        ),
        ("cache:\n  local_mb: 1\n  local_mb: 2", ["fleet.yaml:3", "'local_mb' is given twice"]),
        ("telemetry: {metrics_port: 65536}", ["telemetry.metrics_port", "too large", "65535"]),
        ("telemetry: {metrics_port: -1}", ["telemetry.metrics_port", "too small"]),
        ("scheduler: {tenants: {a: 1, b: many}}", ["scheduler.tenants.b", "expected float"]),
        ("scheduler: {tenants: {'': 2}}", ["scheduler.tenants", "1 to 64 letters"]),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        settings.load(write(tmp_path, text), env={})
    message = str(caught.value)
    assert "\n" not in message
    assert "secret" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("broker", "redis://"),
        ("broker", "rediss://:p%2Fw@h:6380/1"),
        ("broker", "redis+socket:///run/redis.sock?virtual_host=1"),
        ("broker", "amqp://guest:guest@127.0.0.1:5672//"),
        ("broker", "amqps://u:p@[::1]/vhost"),
        ("broker", "amqp://a:5672//;amqp://b:5672//"),
        ("state", "redis+socket:///run/redis.sock?virtual_host=1"),
        ("state", "unix:///run/redis.sock?db=1"),
        ("cache", "rediss://h"),
    ],
)
def test_urls_that_can_be_meant(key: str, url: str) -> None:
    loaded = settings.load(env={f"BATCHMILL_{key.upper()}_URL": url, "BATCHMILL_CONFIG": ""})
    assert getattr(loaded, key).url == url


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        settings.load(tmp_path / "none.yaml", env={})


def test_environment_beats_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "scheduler: {queue_size: 5}\nbroker: {url: redis://a}")
    env = {
        "BATCHMILL_SCHEDULER_QUEUE_SIZE": "7",
        "BATCHMILL_INFERENCE_DEVICE_IDS": "0,1",
        "BATCHMILL_SECURITY_INTAKE_URLS": "s3://bucket/in, /data/in",
        "BATCHMILL_BROKER_URL": "",
        "BATCHMILL_INFERENCE_GPU_MEMORY_UTILIZATION": "0.5",
    }
    loaded = settings.load(path, env=env)
    assert loaded.scheduler.queue_size == 7
    assert loaded.inference.device_ids == [0, 1]
    assert loaded.security.intake_urls == ["s3://bucket/in", "/data/in"]
    assert loaded.broker.url is None
    assert loaded.inference.gpu_memory_utilization == 0.5


def test_a_secret_comes_from_a_file(tmp_path: Path) -> None:
    secret = write(tmp_path, "ab" * 32 + "\n", "secret")
    loaded = settings.load(write(tmp_path, ""), env={"BATCHMILL_SECURITY_DISPATCH_KEY_FILE": str(secret)})
    assert loaded.security.dispatch_key == "ab" * 32


def test_a_mistake_in_the_environment_names_the_variable(tmp_path: Path) -> None:
    for name, value in (("SCHEDULER_QUEUE_SIZE", "many"), ("SCHEDULER_QUEUE_SIZE", "0"), ("INFERENCE_ENGINE", "x")):
        with pytest.raises(UsageError, match=f"BATCHMILL_{name}"):
            settings.load(write(tmp_path, ""), env={f"BATCHMILL_{name}": value})
    with pytest.raises(UsageError, match="BATCHMILL_BROKER_URL_FILE: cannot read"):
        settings.load(write(tmp_path, ""), env={"BATCHMILL_BROKER_URL_FILE": str(tmp_path / "none")})


def test_every_key_can_be_set_by_environment() -> None:
    """The variable of each key is found, and a value of the wrong type is refused by that variable's name."""
    for section in msgspec.structs.fields(settings.Settings):
        for field in msgspec.structs.fields(section.type):
            name = f"BATCHMILL_{section.encode_name}_{field.encode_name}".upper()
            mapping = getattr(field.type, "__origin__", None) is dict
            if str in getattr(field.type, "__args__", (field.type,)) and not mapping:
                loaded = settings.load(None, env={name: "vllm" if name.endswith("ENGINE") else _text(name)})
                assert getattr(getattr(loaded, section.encode_name), field.encode_name) is not None
            else:
                with pytest.raises(UsageError, match=name):
                    settings.load(None, env={name: "{a: [wrong]}"})


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf", "1.0e+999"])
def test_every_number_is_one(tmp_path: Path, number: str) -> None:
    for section in msgspec.structs.fields(settings.Settings):
        for field in msgspec.structs.fields(section.type):
            if not {int, float} & set(getattr(field.type, "__args__", (field.type,))):
                continue
            mapping = getattr(field.type, "__origin__", None) is dict
            text = f"{{a: {number}}}" if mapping else f"[{number}]" if field.type == list[int] else number
            with pytest.raises(UsageError, match=r"fleet.yaml:2.* is not a number"):
                settings.load(write(tmp_path, f"{section.encode_name}:\n  {field.encode_name}: {text}\n"), env={})
            name = f"BATCHMILL_{section.encode_name}_{field.encode_name}".upper()
            with pytest.raises(UsageError, match=f"{name}.* is not a number"):
                settings.load(write(tmp_path, ""), env={name: text})


def test_a_plain_word_is_a_word(tmp_path: Path) -> None:
    """YAML 1.1 reads booleans, sixty-based numbers, octal ones and dates out of these; YAML 1.2 does not."""
    for word in ("on", "off", "Yes", "no", "n", "1:30", "2026-11-30", "1_000", "0b11", "="):
        assert settings.read_yaml(write(tmp_path, f"a: {word}")) == {"a": word}
    numbers = "[010, 0o17, 0x1F, -3, 1e3, .5, true, False, null, ~, ]"
    assert plain_yaml.parse(numbers) == [10, 15, 31, -3, 1000.0, 0.5, True, False, None, None]
    assert plain_yaml.parse("{on: 1, ? , }") == {"on": 1, None: None}
    for mode in ("off", "on"):
        assert settings.load(write(tmp_path, f"cache: {{mode: {mode}}}"), env={}).cache.mode == mode
    models = registry.load(write(tmp_path, "models:\n  a@1:\n    source: /x\n    cache: off\n", "models.yaml"))
    assert models.get("a@1").cache == "off"
    with pytest.raises(UsageError, match="expected bool, got str; write true or false"):
        settings.load(write(tmp_path, "scheduler: {sticky_prefixes: off}"), env={})


def test_what_is_dumped_is_read_as_it_was() -> None:
    """By this reader and by one of YAML 1.1: each text that either takes for something else is quoted."""
    texts = [
        "off",
        "on",
        "y",
        "1e5",
        "0o17",
        "010",
        "1:30",
        "1_000",
        "2026-11-30",
        "",
        "~",
        "null",
        ".5",
        "<<",
        "=",
        "é",
    ]
    value = {"texts": texts, "numbers": [1, -0.5, 1e20, 1e-7], "others": [True, None], **dict.fromkeys(texts, 1)}
    assert plain_yaml.parse(plain_yaml.dump(value)) == value
    assert yaml.safe_load(plain_yaml.dump(value)) == value


@pytest.mark.parametrize("text", ["a: !!int x", "a: !!float x", f"a: {'9' * 5000}", f"a: {'[' * 5000}"])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="is not valid YAML"):
        settings.load(write(tmp_path, text), env={})


def test_a_key_may_stand_above_what_is_merged(tmp_path: Path) -> None:
    text = "cache: &c {local_mb: 1, mode: read}\nscheduler: {}\n"
    assert settings.load(write(tmp_path, text.replace("{}", "{shards: 2}")), env={}).scheduler.shards == 2
    merged = write(tmp_path, "a: &a {x: 1}\nb: {<<: *a, x: 2}\n")
    assert settings.read_yaml(merged)["b"] == {"x": 2}


def test_a_variable_that_names_no_key_is_refused(tmp_path: Path) -> None:
    for name in ("BATCHMILL_SCHEDULER_LEASE", "BATCHMILL_STORE_URLS", "BATCHMILL_BROKER_URL_FILES"):
        with pytest.raises(UsageError, match=f"{name}: there is no key"):
            settings.load(write(tmp_path, ""), env={name: "1"})
    others = ("HOME", "CONFIG", "ECHO_START_S", "TEST_MARK", "FLEET_LINGER_S", "SECRETS_DIR", "STORE", "MODEL")
    services = ("BROKER_SERVICE_HOST", "STORE_PORT", "BROKER_PORT_6379_TCP_ADDR", "CACHE_SERVICE_PORT_REDIS")
    assert settings.load(write(tmp_path, ""), env={f"BATCHMILL_{n}": "x" for n in others + services})


def test_weights_are_checked() -> None:
    loaded = settings.load(None, env={"BATCHMILL_SCHEDULER_TENANTS": "{a: 3, b: 0.5}"})
    assert loaded.scheduler.tenants == {"a": 3.0, "b": 0.5}
    with pytest.raises(UsageError, match="BATCHMILL_SCHEDULER_TENANTS: the weight of 'a' is 0; it must be above 0"):
        settings.load(None, env={"BATCHMILL_SCHEDULER_TENANTS": "{a: 0}"})
    with pytest.raises(UsageError, match="'hasty' is no priority; they are low, normal, high, urgent"):
        settings.load(None, env={"BATCHMILL_SCHEDULER_PRIORITY_WEIGHTS": "{hasty: 5}"})


def _text(name: str) -> str:
    choices = {"CACHE_MODE": "on", "TELEMETRY_LOG_LEVEL": "info", "TELEMETRY_LOG_FORMAT": "json"}
    if name.endswith(("DISPATCH_KEY", "RESULTS_KEY")):
        return "ab" * 32
    if name.endswith(("BROKER_URL", "STATE_URL", "CACHE_URL")):
        return "redis://h"
    return choices.get(name.removeprefix("BATCHMILL_"), "text")


MODELS = """
default: tiny
current: {tiny: "2"}
models:
  tiny@1: {source: /models/tiny-1}
  tiny@2: {source: /models/tiny-2, engine: {max_num_seqs: 8}}
  other@a: {source: "hf:org/other@abc"}
"""


def test_the_registry_resolves_names(tmp_path: Path) -> None:
    models = registry.load(write(tmp_path, MODELS, "models.yaml"))
    assert models.resolve(None) == "tiny@2"
    assert models.resolve("tiny") == "tiny@2"
    assert models.resolve("tiny@1") == "tiny@1"
    assert models.resolve("other") == "other@a"
    assert models.get("tiny@2").engine == {"max_num_seqs": 8}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: {Tiny@1: {source: /x}}", ["'Tiny@1'", "name@version"]),
        ("models: {tiny: {source: /x}}", ["'tiny'", "name@version"]),
        ("models: {tiny@1: {}}", ["models", "source"]),
        ("models: {tiny@1: {source: /x, sorce: 1}}", ["unknown key 'models.tiny@1.sorce'"]),
        ("models: {a@1: {source: /x}, b@1: {source: /x, cache: true}}", ["models.b@1.cache", "got bool"]),
        ("models: {a@1: {source: /x, warm_up: [hello, 3]}}", ["models.a@1.warm_up[1]", "got int"]),
        ("models: {a@1: {source: /x}, b@1: {source: /x}}\ncurrent: {a: '1', b: 1}", ["current.b: ", "quotes"]),
        ("models: {a@1: {source: /x}}\ncurrent: {1: '1'}", ["models.yaml: current: a key is no text", "quotes"]),
        ("models: {tiny@1: {source: /x}}\ncurrent: {tiny: '3'}", ["current.tiny", "tiny@3"]),
        ("models: {tiny@1: {source: /x}}\ndefault: big", ["unknown model 'big'", "tiny@1"]),
        *(
            (f"models: {{tiny@1: {{source: /x, engine: {{{said}}}}}}}", [f"models.tiny@1.engine.{key}: ", words])
            for said, key, words in (
                ("max_model_len: abc", "max_model_len", "'abc' is not a number above 0"),
                ("max_model_len: 0", "max_model_len", "'0' is not"),
                ("max_model_len: [1]", "max_model_len", "'[1]' is not a number"),
                ("max-num-seqs: 1.5", "max-num-seqs", "'1.5' is not a whole number of at least 1"),
                ("max_num_seqs: true", "max_num_seqs", "'True' is not a whole number"),
                ("gpu_memory_utilization: 90", "gpu_memory_utilization", "'90' is not a number between 0 and 1"),
                ("enforce_eager: 'yes'", "enforce_eager", "'yes' is neither true nor false"),
                ("kv_offloading_size: -4", "kv_offloading_size", "'-4' is not a number above 0 (GiB)"),
                ("kv-offloading-size: much", "kv-offloading-size", "'much' is not a number above 0"),
                ("kv_offloading_size: true", "kv_offloading_size", "'True' is not a number"),
                ("kv_offloading_backend: gpu", "kv_offloading_backend", "'gpu' is not one of native, lmcache"),
                ("kv_transfer_config: Offload", "kv_transfer_config", "'Offload' is not a mapping"),
                ("kv_transfer_config: '[1]'", "kv_transfer_config", "is not a mapping"),
                ("dtype: 16", "dtype", "'16' is not a word"),
                ("served-model-name: x", "served-model-name", "it is set by the worker"),
                ("port: 80", "port", "it is set by the worker"),
                ("enable_log_requests: true", "enable_log_requests", "it is set by the worker"),
                ("model: null", "model", "it is set by the worker"),
            )
        ),
        *(
            (f"models: {{a@1: {{source: /x, hardware: {{{key}: {value}}}}}}}", [f"hardware.{key}", "expected"])
            for key, value in (("gpus", -1), ("gpu_memory_gb", -0.5), ("cpu_kv_gb", 0), ("disk_gb", -1))
        ),
    ],
)
def test_a_mistake_in_the_registry_is_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        registry.load(write(tmp_path, text, "models.yaml"))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_engine_arguments_that_can_be_meant(tmp_path: Path) -> None:
    said = "max_model_len: auto, max-num-batched-tokens: 8k, max_num_seqs: 8, seed: 0, dtype: half, anything_else: [1]"
    text = f"models: {{a@1: {{source: /x, engine: {{{said}}}}}, b@1: {{source: /x, engine: {{max_model_len: -1}}}}}}"
    models = registry.load(write(tmp_path, text, "models.yaml"))
    assert argument(models.get("a@1").engine, "max_num_batched_tokens") == "8k"
    assert argument(models.get("b@1").engine, "max_num_seqs") is None


def test_a_bare_name_with_several_versions_needs_a_current_one(tmp_path: Path) -> None:
    models = registry.load(write(tmp_path, "models: {a@1: {source: /x}, a@2: {source: /y}}", "models.yaml"))
    with pytest.raises(UsageError, match="a@1, a@2"):
        models.resolve("a")
    with pytest.raises(UsageError, match="no model named"):
        models.resolve(None)
