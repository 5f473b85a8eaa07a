"""Every call of either API has its roles, and is refused to all others."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import pytest
from fastapi.routing import APIRoute
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from gristmill import RolloutClient, TrainerClient
from gristmill._client.connection.credentials import Credentials
from gristmill.errors import PermissionDeniedError, StaleIncarnationError, UnauthenticatedError
from gristmill.v1 import rollout_pb2, run_pb2, run_pb2_grpc, trainer_pb2
from gristmill_service.access.roles import CALLS, OPEN_CALLS, ROLES
from gristmill_service.access.tokens import create_token
from gristmill_service.api.http import page, rollouts, runs, trainers
from gristmill_service.settings import Settings
from tests.access.conftest import Guarded
from tests.on_loop import Service
from tests.serving import FREE_PORTS

METHODS: list[MethodDescriptor] = [
    method
    for contract in (run_pb2, rollout_pb2, trainer_pb2)
    for service in contract.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
ROUTERS = (runs.router, rollouts.router, trainers.router, page.router, page.page)
ROUTES = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
FILLED = {"run": "r", "batch": "0", "model": "policy", "mini_batch": "0", "row": "0", "rank": "0", "name": "app.js"}
FILLED |= {"sample": "0", "step": "0"}
TAKEN = {"CreateRun": run_pb2.CreateRunRequest(run="r", config_json="[]")}


def call_of(method: MethodDescriptor) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", method.name).lower()


def test_the_table_names_every_call_and_no_other() -> None:
    names = {call_of(method) for method in METHODS} | {route.name for route in ROUTES}
    operation = {"metrics", "openapi", "healthz", "readyz"}
    assert names | operation == CALLS.keys() | OPEN_CALLS


def allowed(call: str) -> set[str]:
    return set(ROLES) if call in OPEN_CALLS else {"admin", *CALLS[call]}


@pytest.fixture
def channel(guarded: Guarded) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(guarded.service.grpc_address) as opened:
        yield opened


def status(
    channel: grpc.Channel, method: MethodDescriptor, token: str | None, more: Mapping[str, str] | None = None
) -> str:
    """How the service answers a call for run 'r'. more: headers sent with the token."""
    request = TAKEN.get(method.name) or GetMessageClass(method.input_type)(
        **({"run": "r"} if "run" in method.input_type.fields_by_name else {})
    )
    kind = ("stream" if method.client_streaming else "unary") + ("_stream" if method.server_streaming else "_unary")
    bound = getattr(channel, kind)(f"/{method.containing_service.full_name}/{method.name}")
    metadata = (*((("authorization", f"Bearer {token}"),) if token else ()), *(more or {}).items())
    data = request.SerializeToString()
    try:
        answer: Any = bound(iter([data]) if method.client_streaming else data, metadata=metadata, timeout=30)
        if method.server_streaming:
            list(answer)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_over_grpc_a_call_is_made_by_its_roles_alone(
    guarded: Guarded, channel: grpc.Channel, method: MethodDescriptor
) -> None:
    call = call_of(method)
    codes = {role: status(channel, method, guarded.tokens[role]) for role in ROLES}
    assert {role for role, code in codes.items() if code != "PERMISSION_DENIED"} == allowed(call)
    assert "UNAUTHENTICATED" not in codes.values()
    assert (status(channel, method, None) == "UNAUTHENTICATED") == (call not in OPEN_CALLS)


def answer(guarded: Guarded, method: str, path: str, token: str | None, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.request(method, guarded.service.http_url + path, headers=headers, trust_env=False, **more)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_over_http_a_call_is_made_by_its_roles_alone(guarded: Guarded, route: APIRoute) -> None:
    method = next(iter(route.methods or ()))
    path = route.path_format.format(**FILLED)
    body = {"json": {"run": "r"}} if route.name == "create_run" else {}
    answers = {role: answer(guarded, method, path, guarded.tokens[role], **body).status_code for role in ROLES}
    assert {role for role, code in answers.items() if code != 403} == allowed(route.name)
    assert 401 not in answers.values()
    assert (answer(guarded, method, path, None, **body).status_code == 401) == (route.name not in OPEN_CALLS)


@pytest.mark.parametrize(("path", "is_open"), [("/healthz", True), ("/readyz", True), ("/openapi.json", False)])
def test_probes_need_no_token_and_the_description_does(guarded: Guarded, path: str, is_open: bool) -> None:
    assert answer(guarded, "GET", path, None).status_code == (200 if is_open else 401)
    assert answer(guarded, "GET", path, guarded.tokens["viewer"]).status_code == 200
    assert answer(guarded, "GET", path, guarded.tokens["scraper"]).status_code == (200 if is_open else 403)


def test_only_callers_with_a_token_learn_in_which_directory_runs_are(tmp_path: Path) -> None:
    token = create_token(tmp_path / "tokens.yaml", "viewer", ["viewer"], ["*"], None)
    files: dict[str, Any] = {"journal_dir": tmp_path / "journal", "tokens_file": tmp_path / "tokens.yaml"}
    settings = Settings(**FREE_PORTS, **files, store="memory")
    service = Service(settings)
    service.start()
    try:
        with grpc.insecure_channel(service.grpc_address) as channel:
            ask = run_pb2_grpc.RunServiceStub(channel).GetHealth  # type: ignore[no-untyped-call]
            shown = {"authorization": f"Bearer {token}"}.items()
            assert ask(run_pb2.GetHealthRequest()).run_store == "journal"
            assert ask(run_pb2.GetHealthRequest(), metadata=[*shown]).run_store == f"journal {tmp_path / 'journal'}"
    finally:
        service.stop()


def test_nobody_learns_the_contract_by_reflection(channel: grpc.Channel) -> None:
    reflect = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    with pytest.raises(grpc.RpcError) as refused:
        list(reflect(iter([b""]), timeout=20))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_metrics_are_for_scrapers(guarded: Guarded) -> None:
    answers = {role: answer(guarded, "GET", "/metrics", guarded.tokens[role]).status_code for role in ROLES}
    assert {role for role, code in answers.items() if code == 200} == {"scraper", "admin"}
    refused = answer(guarded, "GET", "/metrics", None)
    assert refused.status_code == 401
    assert "a call over HTTP requires a token" in refused.text


@pytest.mark.parametrize("shown", ["Bearer nonsense", "Basic dXNlcjpwYXNz", "Bearer", "Bearer " + "x" * 20_000])
def test_what_is_no_token_of_ours_is_unauthenticated(guarded: Guarded, shown: str) -> None:
    response = httpx.get(f"{guarded.service.http_url}/v1/runs", headers={"authorization": shown}, trust_env=False)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert response.json()["error"]["type"] == "UnauthenticatedError"
    assert "nonsense" not in response.text


def test_a_body_is_not_waited_for_where_its_caller_is_not_known(guarded: Guarded) -> None:
    where = urlsplit(guarded.service.http_url)
    with socket.create_connection((where.hostname, where.port), timeout=20) as opened:
        opened.sendall(b"POST /v1/runs/r/rows HTTP/1.1\r\nhost: gristmill\r\ncontent-length: 1000000\r\n\r\nx")
        assert opened.recv(1000).startswith(b"HTTP/1.1 401")


def test_runs_of_others_are_neither_shown_nor_served(guarded: Guarded) -> None:
    address, worker = guarded.service.grpc_address, Credentials(token=guarded.tokens["worker"])
    config = {"train_batch_size": 1, "n_samples_per_prompt": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}
    with RolloutClient(address, "math-1", credentials=worker) as client:
        client.create_run(config)
        assert client.status().run == "math-1"
    guarded.service.runs.create("secret", config)
    calls: list[Callable[[RolloutClient], object]] = [
        RolloutClient.status,
        lambda client: client.create_run(config),
        lambda client: client.begin_groups(["a"], wait_s=0),
    ]
    for call in calls:
        with (
            RolloutClient(address, "secret", credentials=worker) as client,
            pytest.raises(PermissionDeniedError, match="for run 'secret': its token is for r, math-"),
        ):
            call(client)
    with grpc.insecure_channel(address) as channel:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)  # type: ignore[no-untyped-call]
        shown = (("authorization", f"Bearer {guarded.tokens['worker']}"),)
        assert list(stub.ListRuns(run_pb2.ListRunsRequest(), metadata=shown).runs) == ["math-1"]
    assert answer(guarded, "GET", "/v1/runs", guarded.tokens["viewer"]).json() == {"runs": ["math-1"]}
    unknown = answer(guarded, "GET", "/v1/runs/r", guarded.tokens["viewer"])
    assert unknown.status_code == 404
    assert "or use an existing run: math-1" in unknown.json()["error"]["message"], "a refusal names no runs of others"
    scraped = answer(guarded, "GET", "/metrics", guarded.tokens["scraper"]).text
    assert ('run="math-1"' in scraped, 'run="secret"' in scraped) == (True, False)
    overview = answer(guarded, "GET", "/v1/overview", guarded.tokens["viewer"]).json()
    assert [run["run"] for run in overview["runs"]] == ["math-1"]
    created = answer(guarded, "POST", "/v1/runs", guarded.tokens["worker"], json={"run": "other", "config": config})
    assert created.status_code == 403
    # The path is what is gone by, and of what the body names alone the body.
    acknowledged = {"run": "math-1", "rank": 0, "position": {"batch": 0}}
    for run in ("secret", "nowhere"):
        odd = answer(guarded, "POST", f"/v1/runs/{run}/ack?run=math-1", guarded.tokens["trainer"], json=acknowledged)
        assert odd.status_code == 403
    asked = {"run": "other", "config": config}
    odd = answer(guarded, "POST", "/v1/runs?run=math-1", guarded.tokens["worker"], json=asked)
    assert odd.status_code == 403
    # Not what the standard says JSON is, and read by the handler all the same.
    body = b'{"run": "other", "config": {"train_batch_size": NaN}}'
    odd = answer(guarded, "POST", "/v1/runs", guarded.tokens["worker"], content=body)
    assert odd.status_code == 403


def test_a_call_with_two_tokens_is_refused_by_both_apis(guarded: Guarded) -> None:
    """HTTP took the first and gRPC the last: a proxy in front may have checked the other."""
    shown = [("authorization", f"Bearer {guarded.tokens[role]}") for role in ("viewer", "admin")]
    refused = httpx.get(f"{guarded.service.http_url}/v1/runs", headers=shown, trust_env=False, timeout=30)
    assert (refused.status_code, "2 authorization headers" in refused.text) == (401, True)
    with grpc.insecure_channel(guarded.service.grpc_address) as channel:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            stub.ListRuns(run_pb2.ListRunsRequest(), metadata=tuple(shown), timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(("path", "role"), [("/", "viewer"), ("/metrics", "scraper")])
def test_a_page_and_the_metrics_answer_what_asks_for_their_head(guarded: Guarded, path: str, role: str) -> None:
    headed = answer(guarded, "HEAD", path, guarded.tokens[role])
    assert (headed.status_code, headed.content) == (200, b"")


def test_a_ranks_token_is_for_that_rank(guarded: Guarded) -> None:
    token = guarded.tokens["rank 1"]
    assert answer(guarded, "GET", "/v1/runs/r/shards?rank=0", token).status_code == 403
    assert answer(guarded, "GET", "/v1/runs/r/shards?rank=1", token).status_code == 404
    for written in ("0", "+0", "00", "%200"):
        assert answer(guarded, "GET", f"/v1/runs/r/batches/0/policy/0/{written}", token).status_code == 403
        assert answer(guarded, "GET", f"/v1/runs/r/shards?rank=1&rank={written}", token).status_code in (403, 422)
    body: dict[str, Any] = {"model": "policy", "batch": 0, "epoch": 0, "mini_batch": 0}
    for rank, expected in ((0, 403), (0.0, 403), ("+0", 403), (1, 404), ("1", 404)):
        assert answer(guarded, "POST", "/v1/runs/r/ack", token, json={**body, "rank": rank}).status_code == expected
    method = next(method for method in METHODS if method.name == "Acknowledge")
    with grpc.insecure_channel(guarded.service.grpc_address) as channel:
        # The request names rank 0.
        assert status(channel, method, token) == "PERMISSION_DENIED"
        get_batch = channel.unary_unary("/gristmill.v1.TrainerService/GetBatch")
        for rank, code in ((0, grpc.StatusCode.PERMISSION_DENIED), (1, grpc.StatusCode.NOT_FOUND)):
            shard = trainer_pb2.GetShardRequest(run="r", rank=rank)
            wanted = trainer_pb2.GetBatchRequest(run="r", shard=shard).SerializeToString()
            with pytest.raises(grpc.RpcError) as refused:
                get_batch(wanted, timeout=20, metadata=(("authorization", f"Bearer {token}"),))
            assert refused.value.code() is code


@pytest.fixture
def two_ranks(guarded: Guarded) -> Iterator[str]:
    """A run of two ranks that has one published batch, which belongs to this test alone."""
    config = {"train_batch_size": 2, "n_samples_per_prompt": 1, "policy_mini_batch_size": 2, "dp_size": 2}
    with client_of(guarded, "admin", run := f"math-{secrets.token_hex(4)}") as client:
        client.create_run({**config, "micro_batch": {"size": 1}})
        for uid in ("a", "b"):
            with client.trajectory(uid, 0) as trajectory:
                trajectory.step([1], [2], reward=1.0, is_last_step=True)
        client.finish()
        yield run
        client.delete_run()


def client_of(guarded: Guarded, token: str, run: str) -> RolloutClient:
    return RolloutClient(guarded.service.grpc_address, run, credentials=Credentials(token=guarded.tokens[token]))


def trainer_of(guarded: Guarded, rank: int, run: str, **more: Any) -> TrainerClient:
    token = Credentials(token=guarded.tokens[f"rank {rank}"])
    return TrainerClient(guarded.service.grpc_address, run, rank=rank, credentials=token, **more)


def freed(guarded: Guarded, run: str) -> int:
    with client_of(guarded, "admin", run) as client:
        return client.status().batches_freed


@pytest.mark.parametrize("auto_commit", [True, False])
def test_ranks_with_tokens_of_their_own_commit_each_for_itself(
    guarded: Guarded, two_ranks: str, auto_commit: bool
) -> None:
    trainers = [trainer_of(guarded, rank, two_ranks, auto_commit=auto_commit) for rank in range(2)]
    for trainer in trainers:
        assert freed(guarded, two_ranks) == 0
        for batch in trainer:
            for shard in batch.mini_batches():
                shard.ack()
    if not auto_commit:
        for trainer in trainers:
            assert freed(guarded, two_ranks) == 0
            trainer.commit()
    assert freed(guarded, two_ranks) == 1
    for trainer in trainers:
        trainer.close()


def test_a_ranks_token_neither_commits_nor_resumes_for_others(guarded: Guarded, two_ranks: str) -> None:
    other = trainer_of(guarded, 0, two_ranks, auto_commit=False)
    first = next(iter(other))
    for shard in first.mini_batches():
        shard.ack()
    own = trainer_of(guarded, 1, two_ranks, auto_commit=True)
    for shard in next(iter(own)).mini_batches():
        shard.ack()
    token, path = guarded.tokens["rank 1"], f"/v1/runs/{two_ranks}"
    committed = answer(guarded, "POST", f"{path}/commit", token, json={"position": {"batch": 1}})
    assert (committed.status_code, committed.json()["committed"]["batch"]) == (200, 0)
    assert freed(guarded, two_ranks) == 0, "rank 0 has no checkpoint of it"
    resumed = answer(guarded, "POST", f"{path}/resume", token, json={"launch": "x", "position": {"batch": 0}})
    assert resumed.status_code == 200
    with pytest.raises(StaleIncarnationError, match="other trainers of its ranks started"):
        own.commit()
    other.commit()
    assert freed(guarded, two_ranks) == 0, "rank 1 trains its shard again, and its commit went with its trainer"
    refused = [{"ranks": [0]}, {"launch": "x", "dp_size": 1}, {"launch": "x", "give_up_reason": "y"}]
    for body in refused:
        assert answer(guarded, "POST", f"{path}/resume", token, json=body).status_code == 403
    for request in (
        trainer_pb2.ResumeRequest(run=two_ranks, ranks=[0]),
        trainer_pb2.ResumeRequest(run=two_ranks, launch="x", dp_size=1),
    ):
        with grpc.insecure_channel(guarded.service.grpc_address) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/gristmill.v1.TrainerService/Resume")(
                request.SerializeToString(), timeout=20, metadata=(("authorization", f"Bearer {token}"),)
            )
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    other.close()
    own.close()


def test_each_rank_resumes_with_its_own_token_at_its_checkpoint(guarded: Guarded, two_ranks: str) -> None:
    states = []
    for rank in range(2):
        with trainer_of(guarded, rank, two_ranks, auto_commit=False) as trainer:
            states.append(trainer.state_dict())
            next(iter(trainer)).ack()
    for rank, state in enumerate(states):
        with trainer_of(guarded, rank, two_ranks, auto_commit=False) as trainer:
            trainer.load_state_dict(state, launch="again")
            assert trainer.state_dict() == state
            next(iter(trainer)).ack()
            trainer.commit()
    assert freed(guarded, two_ranks) == 1


def test_a_client_without_a_token_learns_where_it_takes_one_from(guarded: Guarded) -> None:
    with (
        RolloutClient(guarded.service.grpc_address, "r") as client,
        pytest.raises(UnauthenticatedError, match="GRISTMILL_TOKEN or GRISTMILL_TOKEN_FILE"),
    ):
        client.status()
