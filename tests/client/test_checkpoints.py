"""A trainer's state names its run; the service refuses a state that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
import pytest

from gristmill import FailedPreconditionError, InvalidArgumentError, RolloutClient, TrainerClient
from gristmill._client.connection.transport import Transport
from gristmill.v1 import run_pb2, run_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tests.client.faulty import Fault, refuse
from tests.on_loop import Service

IDENTITY: dict[str, Any] = {"run_id": "made-on-monday", "generation": 3}
STATE = {"version": 2, "run": "run", "model": "policy", "batch": 5, "epoch": 1, "mini_batch": 2, **IDENTITY}


class OneRun(run_pb2_grpc.RunServiceServicer, trainer_pb2_grpc.TrainerServiceServicer):
    """A run whose identity is given. `refusal` is what the next resume without a reason ends with."""

    def __init__(self, run_id: str, generation: int) -> None:
        self.run_id, self.generation = run_id, generation
        self.resumes: list[trainer_pb2.ResumeRequest] = []
        self.commits: list[trainer_pb2.CommitRequest] = []
        self.refusal: Fault | None = None

    def GetRun(self, request: run_pb2.GetRunRequest, context: grpc.ServicerContext) -> run_pb2.GetRunResponse:
        place = run_pb2.RankProgress(model=run_pb2.MODEL_POLICY, next=run_pb2.Position(batch=4))
        status = run_pb2.RunStatus(
            run=request.run,
            resolved_config_json='{"dp_size": 1, "update_epochs_per_batch": 1, "columns": []}',
            ranks=[place],
            models=[run_pb2.ModelProgress(model=run_pb2.MODEL_POLICY)],
            run_id=self.run_id,
            generation=self.generation,
        )
        return run_pb2.GetRunResponse(status=status)

    def Resume(self, request: trainer_pb2.ResumeRequest, context: grpc.ServicerContext) -> trainer_pb2.ResumeResponse:
        if request.ranks:
            place = run_pb2.Position(batch=4)
            return trainer_pb2.ResumeResponse(incarnation=1, position=place, generation=self.generation)
        self.resumes.append(request)
        if self.refusal and not request.give_up_reason:
            self.refusal(context)
        return trainer_pb2.ResumeResponse(
            incarnation=1, position=request.position, run_id=self.run_id, generation=self.generation
        )

    def Commit(self, request: trainer_pb2.CommitRequest, context: grpc.ServicerContext) -> trainer_pb2.CommitResponse:
        self.commits.append(request)
        return trainer_pb2.CommitResponse(committed=request.position)


@pytest.fixture
def run() -> OneRun:
    return OneRun(**IDENTITY)


@pytest.fixture
def trainer(run: OneRun) -> Iterator[TrainerClient]:
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    run_pb2_grpc.add_RunServiceServicer_to_server(run, server)  # type: ignore[no-untyped-call]
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(run, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with TrainerClient(f"127.0.0.1:{port}", "run", 0) as trainer:
        yield trainer
    server.stop(None).wait()


def test_a_state_names_the_run_by_its_identity_and_not_only_its_name(trainer: TrainerClient) -> None:
    assert trainer.state_dict() == STATE | {"batch": 4, "epoch": 0, "mini_batch": 0}


def test_a_loaded_state_says_which_run_and_which_generation_of_it_it_is_of(trainer: TrainerClient, run: OneRun) -> None:
    trainer.load_state_dict(STATE)
    [request] = run.resumes
    assert (request.run_id, request.generation, request.give_up_reason) == ("made-on-monday", 3, "")
    assert request.position == run_pb2.Position(batch=5, epoch=1, mini_batch=2)


def test_after_loading_the_next_state_is_of_the_run_and_the_generation_that_answered(
    trainer: TrainerClient, run: OneRun
) -> None:
    run.generation = 4
    trainer.load_state_dict(STATE)
    assert trainer.state_dict() == STATE | {"generation": 4}


def test_a_state_of_an_earlier_version_is_read_and_not_checked(trainer: TrainerClient, run: OneRun) -> None:
    trainer.load_state_dict({name: STATE[name] for name in STATE if name not in IDENTITY} | {"version": 1})
    [request] = run.resumes
    assert (request.run_id, request.generation) == ("", 0)
    assert trainer.state_dict() == STATE


def test_without_a_checkpoint_nothing_is_checked(trainer: TrainerClient, run: OneRun) -> None:
    trainer.load_state_dict({})
    [request] = run.resumes
    assert (request.run_id, request.generation) == ("", 0)
    assert not request.HasField("position")


def test_a_state_that_would_skip_rows_is_refused_until_a_reason_is_given(trainer: TrainerClient, run: OneRun) -> None:
    run.refusal = refuse(FailedPreconditionError("3 groups would be skipped; batch 4 epoch 0 mini-batch 0 fits"))
    with pytest.raises(FailedPreconditionError, match="3 groups would be skipped; batch 4 epoch 0 mini-batch 0 fits"):
        trainer.load_state_dict(STATE)
    trainer.load_state_dict(STATE, give_up_reason="lost with Redis")
    assert [request.give_up_reason for request in run.resumes] == ["", "lost with Redis"]


def test_a_reason_that_is_empty_is_refused(trainer: TrainerClient, run: OneRun) -> None:
    with pytest.raises(InvalidArgumentError, match="give_up_reason is empty"):
        trainer.load_state_dict(STATE, give_up_reason="")
    assert not run.resumes


def test_a_state_of_either_version_is_committed(trainer: TrainerClient, run: OneRun) -> None:
    trainer.commit(STATE)
    trainer.commit({name: STATE[name] for name in STATE if name not in IDENTITY} | {"version": 1})
    assert [request.position for request in run.commits] == [run_pb2.Position(batch=5, epoch=1, mini_batch=2)] * 2


# With the real service.


CONFIG = {"train_batch_size": 1, "n_samples_per_prompt": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}


def roll_out(client: RolloutClient, *uids: str) -> None:
    client.create_run(CONFIG)
    for uid in uids:
        with client.trajectory(uid, 0) as trajectory:
            trajectory.step([1], [2], reward=1.0, is_last_step=True)
    client.flush()


def train(trainer: TrainerClient, batches: int) -> list[str]:
    """Uids of these many batches."""
    trained = []
    for _, batch in zip(range(batches), trainer, strict=False):
        for shard in batch.mini_batches():
            trained += shard.metadata["uids"]
            shard.ack()
    return trained


def delete(address: str, run: str) -> None:
    with closing(Transport(address, 20.0, "test")) as transport:
        transport.call(transport.runs.DeleteRun, run_pb2.DeleteRunRequest(run=run))


def test_a_state_of_a_run_that_was_deleted_does_not_fit_the_next_of_its_name(service: Service, run_name: str) -> None:
    address = service.grpc_address
    with RolloutClient(address, run_name) as client, TrainerClient(address, run_name, 0, auto_commit=False) as trainer:
        roll_out(client, "a", "b")
        assert train(trainer, 1) == ["a"]
        state = trainer.state_dict()
        delete(address, run_name)
        roll_out(client, "a", "b", "c")
    with TrainerClient(address, run_name, 0, auto_commit=False) as trainer:
        with pytest.raises(FailedPreconditionError, match=f"another run of this name: its run_id is {state['run_id']}"):
            trainer.load_state_dict(state)
        trainer.load_state_dict({})
        assert trainer.state_dict()["run_id"] not in ("", state["run_id"])
        assert train(trainer, 3) == ["a", "b", "c"]


def test_a_state_ahead_of_its_run_drops_what_it_steps_over_for_the_reason_given_and_no_more(
    service: Service, run_name: str
) -> None:
    address = service.grpc_address
    with RolloutClient(address, run_name) as client, TrainerClient(address, run_name, 0, auto_commit=False) as trainer:
        roll_out(client, "a", "b", "c")
        ahead = trainer.state_dict() | {"batch": 2}
        with pytest.raises(FailedPreconditionError, match="would skip accepted rows: 2 sealed batches with 2 groups"):
            trainer.load_state_dict(ahead)
        trainer.load_state_dict(ahead, give_up_reason="trained elsewhere")
        assert train(trainer, 1) == ["c"]
        assert client.status().groups_dropped == {"trained elsewhere": 2}
