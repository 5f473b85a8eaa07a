from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gristmill.errors import InvalidArgumentError
from gristmill_service.settings import Settings, load_settings

Load = Callable[[Mapping[str, object], Mapping[str, str]], Settings]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads settings from these flags in this environment."""

    def loaded(flags: Mapping[str, object], environment: Mapping[str, str]) -> Settings:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return load_settings(flags)

    return loaded


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gristmill.yaml"
    path.write_text("max_waiters: 1\nmax_streams: 1\nlog_level: debug\nmax_message_bytes: 1MiB\n")
    return path


def test_flags_win_over_the_environment_over_the_file_over_defaults(load: Load, file: Path) -> None:
    environment = {"GRISTMILL_CONFIG_FILE": str(file), "GRISTMILL_MAX_WAITERS": "2", "GRISTMILL_MAX_STREAMS": "2"}
    settings = load({"max_waiters": 3, "max_streams": None}, environment)
    assert (settings.max_waiters, settings.max_streams, settings.log_level) == (3, 2, "debug")
    assert settings.max_message_bytes == 1 << 20
    assert settings.log_format == "human"


def test_the_file_of_the_flag_wins(load: Load, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("")
    assert load({"config_file": other}, {"GRISTMILL_CONFIG_FILE": str(file)}).max_waiters == 512


def test_nothing_listens_wider_than_this_machine_unasked(load: Load) -> None:
    settings = load({}, {})
    assert settings.grpc_address.startswith("127.0.0.1:")
    assert settings.http_address.startswith("127.0.0.1:")


def test_variables_that_kubernetes_sets_are_left_alone(load: Load) -> None:
    load({}, {"GRISTMILL_PORT": "tcp://10.0.0.1:50051", "GRISTMILL_SERVICE_HOST": "10.0.0.1"})


@pytest.mark.parametrize(
    ("flags", "stores"),
    [
        ({}, ("memory", "shared_memory")),
        ({"store": "memory"}, ("memory", "memory")),
        ({"journal_dir": "/j"}, ("journal", "shared_memory")),
        ({"journal_dir": "/j", "store": "memory"}, ("journal", "memory")),
        ({"store": "redis", "redis_url": "redis://a"}, ("redis", "redis")),
        ({"run_store": "redis", "shard_store": "redis", "redis_url": "redis://a"}, ("redis", "redis")),
        ({"store": "memory", "shard_store": "shared_memory"}, ("memory", "shared_memory")),
    ],
)
def test_store_names_the_stores_that_are_not_given(
    load: Load, flags: dict[str, object], stores: tuple[str, str]
) -> None:
    settings = load(flags, {})
    assert (settings.run_store, settings.shard_store) == stores


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ({"max_waiters": 0}, {}, "--max-waiters: max_waiters is 0: input should be greater than 0"),
        ({"max_message_bytes": "1GiB"}, {}, "max_message_bytes is '1GiB': input should be less than or equal to 9"),
        ({}, {"GRISTMILL_MAX_WAITERS": "many"}, "GRISTMILL_MAX_WAITERS: max_waiters is 'many'"),
        ({"grpc_address": "localhost"}, {}, "--grpc-address: grpc_address is 'localhost': expected HOST:PORT"),
        ({"http_address": "127.0.0.1:99999"}, {}, "expected HOST:PORT with a port of 0..65535"),
        ({"http_address": "unix:/tmp/x"}, {}, "only grpc_address may be a unix socket; set HOST:PORT"),
        ({"store": "disk"}, {}, "--store: store is 'disk': input should be 'shared_memory', 'memory' or 'redis'"),
        ({"store": "redis"}, {}, "redis_url must be set exactly if store or run_store is redis"),
        ({"redis_min_replicas": 1}, {}, "redis_min_replicas and redis_wait_aof work only with run_store: redis"),
        (
            {"store": "redis", "redis_url": "redis://a", "journal_dir": "/j"},
            {},
            "journal_dir conflicts with run_store: redis",
        ),
        ({"run_store": "journal"}, {}, "run_store: journal needs journal_dir"),
        ({"run_store": "memory", "journal_dir": "/j"}, {}, "journal_dir conflicts with run_store: memory"),
        ({"redis_url": "redis://a", "run_store": "redis"}, {}, "shard_store: shared_memory needs run_store: memory or"),
        ({"shard_store": "redis"}, {}, "shard_store: redis needs run_store: redis, got memory"),
        (
            {"shard_store": "disk"},
            {},
            "--shard-store: shard_store is 'disk': input should be 'shared_memory'",
        ),
        ({"config_file": "/nowhere.yaml"}, {}, "/nowhere.yaml: cannot read the settings"),
    ],
)
def test_a_wrong_setting_is_reported_by_its_origin_and_value(
    load: Load, flags: dict[str, object], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        load(flags, environment)


def test_an_unknown_setting_in_the_file_is_reported(load: Load, file: Path) -> None:
    file.write_text("max_wait: 1\n")
    with pytest.raises(InvalidArgumentError, match=r"gristmill\.yaml: unknown setting max_wait"):
        load({"config_file": file}, {})


def test_a_file_that_is_no_mapping_is_reported(load: Load, file: Path) -> None:
    file.write_text("- 1\n")
    with pytest.raises(InvalidArgumentError, match="expected a mapping of settings, got list"):
        load({"config_file": file}, {})


def test_an_empty_variable_is_none(load: Load) -> None:
    assert load({}, {"GRISTMILL_MAX_WAITERS": "", "GRISTMILL_CONFIG_FILE": ""}).max_waiters == 512


def test_a_secret_is_never_shown(load: Load, file: Path) -> None:
    file.write_text("redis_password: 123456\n")
    with pytest.raises(
        InvalidArgumentError, match=r"gristmill\.yaml: redis_password: input should be a valid string"
    ) as raised:
        load({"config_file": file}, {})
    assert "123456" not in str(raised.value)
    assert "s3cret" not in repr(load({}, {"GRISTMILL_REDIS_PASSWORD": "s3cret"}))
