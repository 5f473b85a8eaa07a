"""`gristmill tail`: what happens in a run, as it happens."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from gristmill import RolloutClient
from tests.cli.rollouts import FAILS, create, fill, train
from tests.cli.terminal import followed, gristmill
from tests.on_loop import Service
from tests.serving import ServiceProcess, StartService

pytestmark = pytest.mark.slow

SOON = ("--json", "--interval", "0.05")


def test_a_run_is_followed_from_its_first_batch_to_its_end(service: Service, run_name: str) -> None:
    address = service.grpc_address
    create(address, run_name)
    with followed("tail", run_name, *SOON, "--address", address) as tail:
        tail.until("following")
        fill(address, run_name, "a", "b")
        assert [(one["event"], one["batch"]) for one in tail.until("published")] == [("sealed", 0), ("published", 0)]
        train(address, run_name)
        events = tail.until("freed")
        assert {"acknowledged", "committed"} < {one["event"] for one in events}
        last = [one for one in events if one["event"] == "acknowledged"][-1]
        assert last["position"] == {"batch": 1, "epoch": 0, "mini_batch": 0}
        assert 1 in last["ranks"]
        with RolloutClient(address, run_name) as client:
            client.finish()
        assert [one["event"] for one in tail.until("done")] == ["finished", "done"]
        assert tail.process.wait(timeout=30) == 0


def test_dropped_groups_are_named_with_their_reasons(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.begin_groups(["a", "b", "c"])
        client.abort_group("a", reason="no_answer")
        with followed("tail", run_name, *SOON, "--address", service.grpc_address) as tail:
            tail.until("following")
            client.abort_group("b", reason="no_answer")
            client.abort_group("c", reason="too_hard")
            dropped = tail.until("groups dropped")
            while sum(one["count"] for one in dropped if one["event"] == "groups dropped") < 2:
                dropped += tail.until("groups dropped")
    uids = {one["reason"]: [group["uid"] for group in one["groups"]] for one in dropped}
    assert uids == {"no_answer": ["b"], "too_hard": ["c"]}


def test_a_batch_that_fails_is_reported_with_its_reason(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name, **FAILS)
    with followed("tail", run_name, *SOON, "--address", service.grpc_address) as tail:
        tail.until("following")
        fill(service.grpc_address, run_name, "a", samples=1)
        failed = tail.until("failed")[-1]
    assert (failed["batch"], "align" in failed["reason"]) == (0, True)


def test_people_get_a_sentence_a_line(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    fill(service.grpc_address, run_name, "a", "b")
    train(service.grpc_address, run_name)
    with RolloutClient(service.grpc_address, run_name) as client:
        client.finish()
    done = gristmill("tail", run_name, "--address", service.grpc_address)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(" ", 1)[1] for line in done.stdout.splitlines()] == [
        "following: batches sealed 1, batches published 1, batches freed 1, groups open 0, groups complete 0",
        "done",
    ]


def test_it_goes_on_when_the_service_starts_again(start_service: StartService, tmp_path: Path) -> None:
    flags = ("--journal-dir", str(tmp_path / "journal"), "--shared-memory-dir", str(tmp_path))
    service = start_service(*flags)
    create(service.grpc_address, "run")
    with followed("tail", "run", *SOON, "--address", service.grpc_address) as tail:
        tail.until("following")
        fill(service.grpc_address, "run", "a", "b")
        tail.until("published")
        assert service.stop() == 0
        assert tail.until("unreachable")[-1]["reason"].startswith(service.grpc_address)
        again = start_service(*flags, "--grpc-address", service.grpc_address)
        assert tail.until("reached again")[-1]["run"] == "run"
        fill(again.grpc_address, "run", "c", "d")
        events = tail.until("published")
        while events[-1]["batch"] != 1:
            events += tail.until("published")
        assert [one["batch"] for one in events if one["event"] == "sealed"] == [1]


def test_it_ends_where_the_run_is_deleted(service: Service, run_name: str) -> None:
    create(service.grpc_address, run_name)
    with followed("tail", run_name, *SOON, "--address", service.grpc_address) as tail:
        tail.until("following")
        httpx.delete(f"{service.http_url}/v1/runs/{run_name}").raise_for_status()
        tail.until("gone")
        assert tail.process.wait(timeout=30) == 0


def test_ctrl_c_ends_it_without_a_trace(service_process: ServiceProcess) -> None:
    create(service_process.grpc_address, "run")
    with followed("tail", "run", *SOON, "--address", service_process.grpc_address) as tail:
        tail.until("following")
        tail.process.send_signal(signal.SIGINT)
        assert tail.process.wait(timeout=30) == 0


def test_a_run_or_a_service_that_there_is_not_is_reported_at_once(service: Service) -> None:
    assert gristmill("tail", "no-such-run", "--address", service.grpc_address).returncode == 1
    assert gristmill("tail", "run", "--address", "127.0.0.1:1").returncode == 2
