"""`gristmill status`: what a person, and a probe, learns of a service."""

from __future__ import annotations

import json
import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from gristmill import RolloutClient, TrainerClient, UnavailableError
from gristmill.errors import DeadlineExceededError
from gristmill_service.monitoring.health import findings
from tests.cli.rollouts import FAILS, create, fill, train
from tests.cli.terminal import gristmill
from tests.on_loop import Service
from tests.rows import make_row
from tests.run.harness import wait_until
from tests.serving import StartService

NOBODY = "127.0.0.1:1"
LONG_ROW = make_row(prompt=[1], response=[2] * 1_000_000)


def test_all_runs_are_on_one_screen(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    fill(service.grpc_address, run_name, "a", "b", "c")
    wait_until(lambda: service.runs.get(run_name).status().batches_published == 1)
    done = gristmill("status", "--address", service.grpc_address)
    assert (done.returncode, done.stderr) == (0, "")
    [line] = [line for line in done.stdout.splitlines() if line.startswith(run_name)]
    assert line.split()[1:] == ["no", "trainer", "0", "0", "1", "1", "1", "1", "0", *line.split()[-3:-1], "6"]


def test_one_run_is_shown_whole(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    fill(service.grpc_address, run_name, "a", "b")
    train(service.grpc_address, run_name)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.begin_groups(["c"])
        client.abort_group("c", reason="no_answer")
    done = gristmill("status", run_name, "--address", service.grpc_address)
    assert done.returncode == 0
    for words in (
        "1 sealed, 1 published, 1 freed",
        "1 no_answer",
        "4 accepted",
        "resumed 0 times",
        "2 ranks",
        "batch 1 mini-batch 0",
        "its runs are only in memory",
        time.strftime(", since %Y-"),
    ):
        assert words in done.stdout


def test_programs_get_one_object_with_the_names_of_the_contract(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    document = json.loads(gristmill("status", run_name, "--json", "--address", service.grpc_address).stdout)
    [run] = document["runs"]
    [replica] = document["replicas"]
    assert (replica["problem"], replica["run_store"]) == ("", "memory")
    assert 0 < replica["started"] <= time.time()
    assert (run["run"], run["batches_sealed"], run["health"]["state"]) == (run_name, 0, "idle")
    assert [len(model["next"]) for model in run["models"]] == [2]
    assert run["config"]["train_batch_size"] == 2


def test_the_address_may_come_from_the_environment(service: Service) -> None:
    assert gristmill("status", GRISTMILL_ADDRESS=service.grpc_address).returncode == 0


def test_a_service_that_is_down_is_status_2_in_one_line() -> None:
    done = gristmill("status", "--address", NOBODY)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"unreachable: {NOBODY}: the service cannot be reached")
    assert len(done.stderr.splitlines()) == 1


def test_a_replica_that_is_unreachable_is_reported_and_the_others_answer(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    done = gristmill("status", run_name, "--address", f"{NOBODY},{service.grpc_address}")
    assert done.returncode == 1
    assert f"at {NOBODY}: {NOBODY}: the service cannot be reached" in done.stdout
    assert f"at {service.grpc_address}: ready" in done.stdout
    assert run_name in done.stdout


def test_a_run_that_there_is_not_is_refused(service: Service) -> None:
    done = gristmill("status", "no-such-run", "--address", service.grpc_address)
    assert done.returncode == 1
    assert done.stderr.startswith("refused: run 'no-such-run' does not exist")


def test_an_address_that_is_none_is_refused() -> None:
    done = gristmill("status", "--address", "http://somewhere")
    assert (done.returncode, done.stderr.startswith("refused: address is")) == (1, True)


def test_a_run_whose_batch_could_not_be_built_is_failed(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name, **FAILS)
    fill(service.grpc_address, run_name, "a", samples=1)
    with RolloutClient(service.grpc_address, run_name) as client:
        while not (failed := client.status().failed_batches):
            pass
    done = gristmill("status", run_name, "--json", "--address", service.grpc_address)
    page = httpx.get(f"{service.http_url}/v1/runs/{run_name}/health").json()
    # The others of this service look at all runs.
    httpx.delete(f"{service.http_url}/v1/runs/{run_name}").raise_for_status()
    assert done.returncode == 1
    [run] = json.loads(done.stdout)["runs"]
    assert run["health"]["needs_person"]
    assert failed[0] in run["health"]["summary"]
    # The page says the same, in the same words.
    assert {name: run["health"][name] for name in ("state", "summary")} == {
        "state": "failed",
        "summary": page["summary"],
    }
    words = [one["text"] for one in page["findings"]]
    words[0] += f": {page['findings'][0]['reason']}; {page['findings'][0]['remedy']}"
    assert [finding["text"] for finding in run["health"]["findings"]] == words


def test_a_run_in_which_nothing_happened_for_so_long_is_stuck_for_who_says_so(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    fill(service.grpc_address, run_name, "a", "b", "c", "d")
    assert gristmill("status", run_name, "--for", 300, "--address", service.grpc_address).returncode == 0
    done = gristmill("status", run_name, "--for", 0.001, "--address", service.grpc_address)
    assert done.returncode == 1
    # Lines are as wide as the terminal.
    assert re.search(
        r"stuck no event for \d+ s: no trainer has called yet: workers wait for the trainer: 2 batches not "
        r"committed, policy rank 0 is at batch 0",
        " ".join(done.stdout.split()),
    )


def test_a_rank_that_others_are_past_is_stuck_by_itself(
    service: Service, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(service.grpc_address, run_name)
    fill(service.grpc_address, run_name, "a", "b")
    with TrainerClient(service.grpc_address, run_name, 0, dp_size=2, prefetch=0) as trainer:
        next(iter(next(iter(trainer)).mini_batches())).ack()
    assert gristmill("status", run_name, "--address", service.grpc_address).returncode == 0
    monkeypatch.setattr(findings, "LATE_RANK_S", 0.0)
    done = gristmill("status", run_name, "--address", service.grpc_address)
    # The others of this service look at all runs, perhaps when this one is stuck without that.
    httpx.delete(f"{service.http_url}/v1/runs/{run_name}").raise_for_status()
    assert done.returncode == 1
    assert "stuck  policy rank 1 did not even pull batch 0 mini-batch 0, which is published; 1 other" in done.stdout


def test_a_run_that_is_done_is_never_stuck(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    fill(service.grpc_address, run_name, "a", "b")
    train(service.grpc_address, run_name)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.finish()
    done = gristmill("status", run_name, "--for", 0.001, "--address", service.grpc_address)
    assert (done.returncode, "finished, 1 batch trained" in done.stdout) == (0, True)


def test_a_service_that_is_not_ready_says_why(start_service: StartService, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        journal = small / "journal"
        service = start_service("--store", "memory", "--journal-dir", str(journal))
        create(service.grpc_address, "run")
        _fill_up(small)
        # On a busy machine the last attempt may end before its answer comes.
        refused = pytest.raises((UnavailableError, DeadlineExceededError))
        with RolloutClient(service.grpc_address, "run", timeout_s=3) as client, refused:
            client.submit([LONG_ROW])
        done = gristmill("status", "--address", service.grpc_address)
        assert done.returncode == 1
        assert "not ready: " in done.stdout
        assert "is full" in done.stdout
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def _fill_up(directory: Path) -> None:
    with directory.joinpath("filled").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
