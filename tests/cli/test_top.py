"""`gristmill top`, on a terminal and on none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.rollouts import create, fill
from tests.cli.terminal import gristmill, on_terminal
from tests.on_loop import Service
from tests.serving import StartService


def test_without_a_terminal_it_prints_what_there_is_once(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    done = gristmill("top", "--address", service.grpc_address)
    assert (done.returncode, done.stderr, run_name in done.stdout) == (0, "", True)
    assert "\x1b" not in done.stdout
    [line] = gristmill("top", "--json", "--address", service.grpc_address).stdout.splitlines()
    assert run_name in [run["run"] for run in json.loads(line)["runs"]]


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["q", "\x03"], ids=["q", "ctrl-c"])
def test_it_goes_on_until_it_is_ended_and_leaves_the_terminal_as_it_was(
    service: Service, run_name: str, keys: str
) -> None:
    create(service.grpc_address, run_name)
    with on_terminal("top", "--interval", "0.1", "--address", service.grpc_address) as screen:
        screen.until(run_name)
        fill(service.grpc_address, run_name, "a", "b")
        screen.until("rows/s")
        screen.until("no trainer")
        assert not screen.echoes
        screen.press(keys)
        assert screen.ended() == 0
        assert screen.echoes
    # The screen that was there before is there again.
    assert "\x1b[?1049l" in screen.text
    assert "Traceback" not in screen.text


def test_a_narrow_terminal_shows_the_names_of_runs_and_leaves_out_figures(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    with on_terminal("top", "--address", service.grpc_address, width=80) as screen:
        screen.until("a wider terminal also shows")
        screen.until(run_name)
        screen.press("q")
        assert screen.ended() == 0
    assert "stored, rows, rows/s" in screen.text


def test_it_says_that_the_service_is_unreachable_and_goes_on_when_it_is_back(
    start_service: StartService, tmp_path: Path
) -> None:
    flags = ("--journal-dir", str(tmp_path / "journal"), "--shared-memory-dir", str(tmp_path))
    service = start_service(*flags)
    with on_terminal("top", "--interval", "0.1", "--address", service.grpc_address) as screen:
        screen.until("no runs")
        assert service.stop() == 0
        screen.until("cannot be reached")
        again = start_service(*flags, "--grpc-address", service.grpc_address)
        create(again.grpc_address, "later")
        screen.until("later")
        screen.press("q")
        assert screen.ended() == 0


def test_a_service_that_is_down_is_status_2() -> None:
    assert gristmill("top", "--address", "127.0.0.1:1").returncode == 2
