"""What only gRPC has: health, reflection, message limits."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from pydantic import ByteSize

from gristmill._wire.codecs import submit_codec
from gristmill.v1 import rollout_pb2, run_pb2, trainer_pb2
from gristmill_service.access.tokens import create_token
from gristmill_service.api.admission import Admission
from gristmill_service.settings import Settings
from tests.api.apis import CONFIG, GrpcApi, Refused, group, refused, row, rows_message
from tests.on_loop import Service
from tests.run.harness import wait_until
from tests.serving import FREE_PORTS

SERVICES = {"gristmill.v1.RunService", "gristmill.v1.RolloutService", "gristmill.v1.TrainerService"}


def test_health_is_reported_for_the_whole_and_for_each_service(grpc_api: GrpcApi) -> None:
    stub = health_pb2_grpc.HealthStub(grpc_api.channel)
    for name in ("", *SERVICES):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_describes_the_contract(grpc_api: GrpcApi) -> None:
    database = ProtoReflectionDescriptorDatabase(grpc_api.channel)
    assert set(database.get_services()) > SERVICES
    service = DescriptorPool(database).FindServiceByName("gristmill.v1.RolloutService")
    assert "SubmitRows" in service.methods_by_name


def test_a_token_buffer_of_the_wrong_size_is_refused_with_both(grpc_api: GrpcApi, run_name: str) -> None:
    grpc_api.create(run_name, CONFIG)
    rows = rows_message([row("a", 0)])
    rows.tokens = rows.tokens[:-1]
    with pytest.raises(grpc.RpcError) as caught:
        grpc_api.rollouts.SubmitRows(rollout_pb2.SubmitRowsRequest(run=run_name, rows=rows), timeout=20)
    error = refused(caught.value)
    assert error.code == "INVALID_ARGUMENT"
    assert "tokens has 19 bytes" in error.message


def test_requests_that_grow_when_they_are_expanded_are_expanded_one_at_a_time(
    grpc_api: GrpcApi, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expand, count = submit_codec.decompressed, [0]
    free = threading.Lock()

    def expanded(frame: bytes, most_bytes: int) -> bytes:
        assert free.acquire(blocking=False), "another is being expanded"
        try:
            count[0] += 1
            time.sleep(0.02)
            return expand(frame, most_bytes)
        finally:
            free.release()

    monkeypatch.setattr(submit_codec, "decompressed", expanded)
    bomb = submit_codec.compressed(bytes(8 << 20))
    submit = grpc_api.channel.unary_unary("/gristmill.v1.RolloutService/SubmitRows")
    calls = [submit.future(bomb, timeout=60) for _ in range(8)]
    assert {refused(call.exception()).code for call in calls} == {"INVALID_ARGUMENT"}
    assert count == [8]


def test_a_refusal_that_is_delayed_keeps_nothing_of_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expanded = tmp_path / "tokens.yaml", list[weakref.ref[memoryview]]()
    metadata = (("authorization", f"Bearer {create_token(path, 'w', ['worker'], ['*'], None)}"),)
    service = Service(Settings(**FREE_PORTS, store="memory", shutdown_grace_s=5, tokens_file=path))
    service.start()

    def expand(frame: bytes, most_bytes: int) -> memoryview:
        data = memoryview(bytes(100))
        expanded.append(weakref.ref(data))
        return data

    monkeypatch.setattr(submit_codec, "decompressed", expand)
    monkeypatch.setattr(Admission, "refused", lambda admission, *call: 2.0)
    try:
        with grpc.insecure_channel(service.grpc_address) as channel:
            submit = channel.unary_unary("/gristmill.v1.RolloutService/SubmitRows")
            call = submit.future(submit_codec.compressed(b""), timeout=60, metadata=metadata)
            wait_until(lambda: bool(expanded) and expanded[0]() is None)
            assert not call.done(), "it is still delayed"
            assert refused(call.exception()).code == "INVALID_ARGUMENT"
    finally:
        service.stop()


def test_a_batch_comes_with_the_shard_that_is_wanted_first(grpc_api: GrpcApi, run_name: str) -> None:
    grpc_api.create(run_name, CONFIG | {"train_batch_size": 1, "policy_mini_batch_size": 1})
    grpc_api.submit(run_name, [*group("a"), *group("b")])
    wanted = trainer_pb2.GetShardRequest(model=run_pb2.MODEL_POLICY, position=run_pb2.Position(batch=7))
    for batch in range(2):
        request = trainer_pb2.GetBatchRequest(run=run_name, batch=batch, wait_s=20, shard=wanted)
        answer = grpc_api.trainers.GetBatch(request, timeout=30)
        asked = trainer_pb2.GetShardRequest(
            run=run_name, model=run_pb2.MODEL_POLICY, position=run_pb2.Position(batch=batch)
        )
        assert answer.shard == grpc_api.trainers.GetShard(asked, timeout=20)
        assert answer.shard.size_bytes
        without = trainer_pb2.GetBatchRequest(run=run_name, batch=batch)
        alone = grpc_api.trainers.GetBatch(without, timeout=20)
        assert (alone.plan_json, alone.HasField("shard")) == (answer.plan_json, False)
    waiting = grpc_api.trainers.GetBatch(trainer_pb2.GetBatchRequest(run=run_name, batch=2, shard=wanted), timeout=20)
    assert (waiting.state, waiting.HasField("shard")) == (trainer_pb2.BATCH_STATE_PENDING, False)


@pytest.mark.parametrize(
    ("shard", "message"),
    [({"rank": 9}, "rank 9"), ({"model": run_pb2.MODEL_CRITIC}, "critic"), ({"incarnation": 5}, "incarnation")],
)
def test_a_shard_that_is_wanted_with_its_batch_is_refused_as_if_it_were_asked_for_alone(
    grpc_api: GrpcApi, run_name: str, shard: dict[str, int], message: str
) -> None:
    grpc_api.create(run_name, CONFIG | {"train_batch_size": 1, "policy_mini_batch_size": 1})
    grpc_api.submit(run_name, group("a"))
    wanted = trainer_pb2.GetShardRequest(**({"model": run_pb2.MODEL_POLICY} | shard))  # type: ignore[arg-type]
    request = trainer_pb2.GetBatchRequest(run=run_name, wait_s=20, shard=wanted)
    with pytest.raises(grpc.RpcError) as caught:
        grpc_api.trainers.GetBatch(request, timeout=30)
    alone = trainer_pb2.GetShardRequest()
    alone.CopyFrom(wanted)
    alone.run = run_name
    with pytest.raises(grpc.RpcError) as expected:
        grpc_api.trainers.GetShard(alone, timeout=30)
    answer, needed = refused(caught.value), refused(expected.value)
    assert (answer.code, answer.message) == (needed.code, needed.message)
    assert message in answer.message


def test_bytes_that_are_no_message_are_the_callers_fault(service: Service) -> None:
    with grpc.insecure_channel(service.grpc_address) as channel:
        submit = channel.unary_unary("/gristmill.v1.RolloutService/SubmitRows")
        with pytest.raises(grpc.RpcError) as caught:
            submit(b"\xff\xff garbage", timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a message of gristmill.v1" in caught.value.details()


def test_compression_by_grpc_itself_is_refused_before_anything_is_expanded(service: Service) -> None:
    """A message of 60 MB in 60 kB held up everybody's calls for half a second."""
    with grpc.insecure_channel(service.grpc_address) as channel:
        submit = channel.unary_unary("/gristmill.v1.RolloutService/SubmitRows")
        with pytest.raises(grpc.RpcError) as caught:
            submit(bytes(1 << 20), timeout=20, compression=grpc.Compression.Gzip)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "gzip" in caught.value.details()


def test_a_reward_needs_a_value(grpc_api: GrpcApi, run_name: str) -> None:
    grpc_api.create(run_name, CONFIG)
    reward = rollout_pb2.Reward(trajectory=rollout_pb2.TrajectoryKey(uid="a"))
    with pytest.raises(grpc.RpcError) as caught:
        grpc_api.rollouts.SetRewards(rollout_pb2.SetRewardsRequest(run=run_name, rewards=[reward]), timeout=20)
    assert "uid 'a' sample 0: the reward needs exactly one" in refused(caught.value).message


@pytest.fixture
def small_service(tmp_path: Path) -> Iterator[Service]:
    """Takes little: requests of 10,000 bytes, on a unix socket."""
    settings = Settings(
        **{**FREE_PORTS, "grpc_address": f"unix:{tmp_path}/grpc.sock"},
        store="memory",
        max_message_bytes=ByteSize(10_000),
        shutdown_grace_s=5,
    )
    running = Service(settings)
    running.start()
    yield running
    running.stop()


def test_a_request_beyond_the_limit_is_refused_and_the_service_goes_on(small_service: Service) -> None:
    api = GrpcApi(small_service.grpc_address)
    api.create("small", CONFIG)
    with pytest.raises(Refused) as caught:
        api.submit("small", [row("a", 0, prompt_token_ids=[1] * 10_000)])
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert "10000" in caught.value.message
    # Without a delay: trying again would not help.
    assert caught.value.retry_after_s is None
    assert api.submit("small", [row("a", 0)]) == ["accepted"]
    api.close()


def test_the_socket_is_its_owner_s_alone(small_service: Service) -> None:
    path = Path(small_service.grpc_address.removeprefix("unix:"))
    assert path.stat().st_mode & 0o777 == 0o600
