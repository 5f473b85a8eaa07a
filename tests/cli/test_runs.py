"""`gristmill runs`: runs created, listed, shown and deleted from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill import NotFoundError, RolloutClient
from tests.cli.rollouts import create
from tests.cli.terminal import CONFIG, gristmill, on_terminal
from tests.on_loop import Service


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_a_run_is_created_of_a_file_once(service: Service, run_name: str, config: Path) -> None:
    command = ("runs", "create", run_name, "--config", config, "--address", service.grpc_address)
    assert gristmill(*command).stdout == f"run '{run_name}' created\n"
    assert gristmill(*command).stdout == f"run '{run_name}' already exists with these settings\n"
    assert json.loads(gristmill(*command, "--json").stdout) == {"run": run_name, "created": False, "warnings": []}
    assert service.runs.get(run_name).config.train_batch_size == CONFIG["train_batch_size"]


def test_other_settings_are_refused(service: Service, run_name: str, config: Path) -> None:
    create(service.grpc_address, run_name, n_samples_per_prompt=4)
    done = gristmill("runs", "create", run_name, "--config", config, "--address", service.grpc_address)
    assert done.returncode == 1
    assert done.stderr.startswith("refused: ")
    assert "n_samples_per_prompt" in done.stderr


def test_a_file_with_a_wrong_setting_is_refused_without_a_service(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("train_batch_sise: 2\n")
    done = gristmill("runs", "create", "any", "--config", wrong, "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert "unknown setting train_batch_sise" in done.stderr


def test_runs_are_listed_with_their_states(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    done = gristmill("runs", "list", GRISTMILL_ADDRESS=service.grpc_address)
    [line] = [line for line in done.stdout.splitlines() if line.startswith(run_name)]
    assert line.split()[1] == "idle"
    listed = json.loads(gristmill("runs", "list", "--json", "--address", service.grpc_address).stdout)["runs"]
    assert {one["run"]: one["state"] for one in listed}[run_name] == "idle"


def test_a_run_is_shown_with_its_settings(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    done = gristmill("runs", "show", run_name, "--address", service.grpc_address)
    assert done.returncode == 0
    assert "  max_buffered_batches: 2\n" in done.stdout
    shown = json.loads(gristmill("runs", "show", run_name, "--json", "--address", service.grpc_address).stdout)
    assert (shown["run"], shown["config"]["dp_size"]) == (run_name, 2)


def test_a_run_is_deleted_by_who_says_yes(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    command = ("runs", "delete", run_name, "--address", service.grpc_address)
    asked = gristmill(*command)
    assert (asked.returncode, "pass --yes" in asked.stderr) == (1, True)
    assert run_name in service.runs.names()
    assert gristmill(*command, "--yes").stdout == f"run '{run_name}' deleted\n"
    assert run_name not in service.runs.names()
    again = gristmill(*command, "--yes")
    assert (again.returncode, "does not exist" in again.stderr) == (1, True)


@pytest.mark.slow
def test_on_a_terminal_it_asks(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    for answer, status in (("n\n", 1), ("y\n", 0)):
        with on_terminal("runs", "delete", run_name, "--address", service.grpc_address) as screen:
            screen.until("[y/N]")
            assert run_name in service.runs.names()
            screen.press(answer)
            assert screen.ended() == status
    with RolloutClient(service.grpc_address, run_name) as client, pytest.raises(NotFoundError):
        client.status()
