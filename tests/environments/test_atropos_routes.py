"""The routes of Atropos' environments, before a run of a real service."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from gristmill import RolloutClient, TrainerClient
from gristmill.environments.atropos.routes import Routes, TrainerFacts
from tests.on_loop import Service

CONFIG = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 2,
    "micro_batch": {"size": 4},
    "max_seq_len": 64,
    "max_buffered_batches": 1,
}
GAME = {"max_token_length": 32, "desired_name": "game", "weight": 1.0, "group_size": 2}

Connect = Callable[..., httpx.Client]


@pytest.fixture
def connect(service: Service, run_name: str) -> Iterator[Connect]:
    """Serves routes before the test's run and gives a client of them."""
    closings: list[Callable[[], object]] = []

    def serve(**options: Any) -> httpx.Client:
        routes = Routes(service.grpc_address, run_name, TrainerFacts("project", "group"), **options)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(routes.app(), log_config=None, ws="none"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        client = httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", trust_env=False, timeout=60)
        closings.extend([listener.close, thread.join, lambda: setattr(server, "should_exit", True), client.close])
        return client

    yield serve
    for close in reversed(closings):
        close()


@pytest.fixture
def run(service: Service, run_name: str) -> Iterator[RolloutClient]:
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        yield client


def group(number: int, **fields: Any) -> dict[str, Any]:
    """Of two samples."""
    tokens = [[1, 2, 10 * number + sample] for sample in range(2)]
    masks = [[-100, -100, tokens[sample][2]] for sample in range(2)]
    return {"tokens": tokens, "masks": masks, "scores": [0.0, 1.0], "env_id": 0} | fields


def register(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/register-env", json=GAME | fields)
    answer.raise_for_status()
    return dict(answer.json())


def status_env(client: httpx.Client, env_id: int = 0) -> dict[str, Any]:
    """As environments ask: a GET with a body."""
    return dict(client.request("GET", "/status-env", json={"env_id": env_id}).json())


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["detail"]


def test_an_environment_waits_until_the_run_is_created(service: Service, run_name: str, connect: Connect) -> None:
    client = connect()
    assert register(client) == {"status": f"wait for run '{run_name}' to be created"}
    with RolloutClient(service.grpc_address, run_name) as rollouts:
        rollouts.create_run(CONFIG)
    told = register(client)
    assert (told["status"], told["env_id"], told["wandb_name"], told["starting_step"]) == ("success", 0, "game_0", 0)
    assert register(client)["wandb_name"] == "game_1"
    assert client.get("/info").json() == {"batch_size": 4, "max_token_len": 64}
    assert client.get("/wandb_info").json() == {"group": "group", "project": "project"}


def test_groups_become_batches_and_the_environment_sees_the_queue_and_the_steps(
    service: Service, run_name: str, run: RolloutClient, connect: Connect
) -> None:
    client = connect()
    register(client)
    assert client.post("/scored_data", json=group(1)).json() == {"status": "received"}
    assert status_env(client)["queue_size"] == 1
    body = gzip.compress(json.dumps([group(2)]).encode())
    posted = client.post("/scored_data_list", content=body, headers={"content-encoding": "gzip"})
    assert posted.json() == {"status": "received", "groups_processed": 1}
    assert client.get("/status").json() == {"current_step": 0, "queue_size": 2}
    with TrainerClient(service.grpc_address, run_name, 0) as trainer:
        (shard,) = next(iter(trainer)).mini_batches()
        assert sorted(shard["sequences"][:, -1].tolist()) == [10, 11, 20, 21]
        assert shard.metadata["tags"] == ["game"] * 4
        shard.ack()
    status = status_env(client)
    assert (status["current_step"], status["queue_size"], status["self_queue_size"]) == (1, 0, 0)


def test_a_group_that_is_posted_again_counts_once(run: RolloutClient, connect: Connect) -> None:
    client = connect()
    register(client)
    for _ in range(2):
        assert client.post("/scored_data", json=group(1)).status_code == 200
    assert (run.status().groups_complete, run.status().rows_accepted) == (1, 2)


def test_environments_share_the_engines_by_weight(run: RolloutClient, connect: Connect) -> None:
    client = connect()
    register(client)
    register(client, desired_name="heavy", weight=3.0)
    assert (status_env(client, 0)["env_weight"], status_env(client, 1)["env_weight"]) == (0.25, 0.75)
    client.post("/disconnect-env", json={"env_id": 1})
    assert status_env(client, 0)["env_weight"] == 1.0


def test_a_post_that_the_run_has_no_room_for_is_to_be_tried_again(run: RolloutClient, connect: Connect) -> None:
    client = connect(room_wait_s=0.2)
    register(client)
    for number in (1, 2):
        assert client.post("/scored_data", json=group(number)).status_code == 200
    for number in (3, 4):
        client.post("/scored_data", json=group(number))
    status, detail = refused(client.post("/scored_data", json=group(9)))
    assert (status, "there was no room for a group for 0.2 s" in detail) == (503, True)
    assert client.post("/scored_data", json=group(1)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 4}, "group_size is 4 and the run takes up to 2 samples"),
        ({"min_batch_allocation": 0.5}, "create the run with tag_shares: {game: {min: 0.5}}"),
        ({"desired_name": None}, "Expected `str`, got `null` - at `$.desired_name`"),
    ],
)
def test_an_environment_that_does_not_fit_the_run_is_refused(
    run: RolloutClient, connect: Connect, fields: dict[str, Any], message: str
) -> None:
    status, detail = refused(connect().post("/register-env", json=GAME | fields))
    assert (status, message in detail) == (422, True), detail


def test_the_shares_of_a_run_are_those_of_its_environments(service: Service, run_name: str, connect: Connect) -> None:
    with RolloutClient(service.grpc_address, run_name) as rollouts:
        rollouts.create_run(CONFIG | {"tag_shares": {"game": {"min": 0.5}}})
    client = connect()
    register(client, min_batch_allocation=0.5)
    assert status_env(client)["unallocated_fraction"] == 0.5


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (group(1, env_id=7), 404, "env_id is 7"),
        (group(1, images=["data:"]), 422, "images are not taken"),
        ([group(1), group(2, scores=[1.0])], 422, "scores has 1 entries for 2 samples"),
        (group(1, inference_logprobs=[[0.0, 0.0, 1e999]] * 2), 422, "the body is not as it should be"),
        ({"tokens": [[1]]}, 422, "missing required field `masks`"),
    ],
)
def test_what_cannot_be_taken_is_refused_whole(
    run: RolloutClient, connect: Connect, body: Any, status: int, message: str
) -> None:
    client = connect()
    register(client)
    route = "/scored_data_list" if isinstance(body, list) else "/scored_data"
    answer = client.post(route, content=json.dumps(body).encode())
    assert (refused(answer)[0], message in refused(answer)[1]) == (status, True), answer.text
    found = run.status()
    assert (found.rows_accepted, found.groups_open, found.groups_complete) == (0, 0, 0)


def test_rows_that_the_run_refuses_leave_no_group_open(run: RolloutClient, connect: Connect) -> None:
    client = connect()
    register(client)
    bad = group(1, inference_logprobs=[[1.0, 1.0, -1e300]] * 2)
    assert client.post("/scored_data", json=bad).status_code == 422
    assert run.status().groups_open == 0


@pytest.mark.parametrize("route", ["POST /register", "GET /batch", "GET /reset_data", "GET /latest_example"])
def test_trainers_are_told_what_to_use(run: RolloutClient, connect: Connect, route: str) -> None:
    status, detail = refused(connect().request(*route.split()))
    assert (status, "use gristmill.TrainerClient" in detail) == (409, True)


def test_the_command_serves_the_routes_until_it_is_asked_to_stop(
    service: Service, run_name: str, run: RolloutClient
) -> None:
    command = [str(Path(sys.executable).with_name("gristmill")), "atropos", "--run", run_name]
    command += ["--address", service.grpc_address, "--port", "0", "--num-steps", "7"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split("ready: ")[1].split()[0]
        with httpx.Client(base_url=url, trust_env=False) as client:
            assert register(client)["num_steps"] == 7
            assert client.post("/scored_data", json=group(1)).status_code == 200
        taken = subprocess.run([*command[:-3], url.rpartition(":")[2]], capture_output=True, text=True)
        assert (taken.returncode, "cannot listen on 127.0.0.1:" in taken.stderr) == (2, True), taken.stderr
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert run.status().groups_complete == 1
