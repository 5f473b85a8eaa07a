"""Columns that trainers write back, by the Python client: PPO with values and log-probabilities of trainers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from pydantic import ByteSize
from safetensors.torch import save

from gristmill import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    RolloutClient,
    StaleIncarnationError,
    TrainerClient,
    UnavailableError,
)
from gristmill._wire.codecs.columns_codec import PART_BYTES
from gristmill.torch import MicroBatch, Shard
from gristmill.v1 import trainer_pb2, trainer_pb2_grpc
from gristmill_service.api.admission import Slot
from gristmill_service.run.machine.events import BatchWithdrawn, ColumnsDropped
from gristmill_service.settings import Settings
from tests.api.apis import group
from tests.faults.services import eventually
from tests.on_loop import Service
from tests.run.harness import wait_until
from tests.serving import FREE_PORTS, StartService

COLUMNS: list[dict[str, Any]] = [
    {"name": "values", "dtype": "float32", "scope": "response", "source": "trainer"},
    {"name": "ref_logprobs", "dtype": "float64", "scope": "response", "source": "trainer"},
    {"name": "teacher", "dtype": "bfloat16", "scope": "response", "shape": [2], "source": "trainer"},
    {"name": "verdict", "dtype": "int16", "scope": "row", "source": "trainer"},
]
CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "n_samples_per_prompt": 2,
    "policy_mini_batch_size": 1,
    "micro_batch": {"size": 1},
    "step_wise": True,
    "merge": "prefix",
    "dp_size": 2,
    "critic_mini_batch_size": 2,
    "advantage_estimator": "gae",
    "kl_in_reward": {"coef": 0.5, "estimator": "k1"},
    "kl_from": "rollout_logprobs",
    "columns": COLUMNS,
}
Trainers = Callable[..., TrainerClient]


@pytest.fixture(params=["memory", "shared memory"])
def address(request: pytest.FixtureRequest, start_service: StartService, service: Service, tmp_path: Path) -> str:
    if request.param == "memory":
        return service.grpc_address
    return start_service("--shared-memory-dir", str(tmp_path)).grpc_address


@pytest.fixture
def trainers(service: Service, run_name: str) -> Iterator[Trainers]:
    """Makes clients of a run with one batch."""
    made: list[TrainerClient] = []

    def make(rank: int, address: str = service.grpc_address, **more: Any) -> TrainerClient:
        made.append(TrainerClient(address, run_name, rank, timeout_s=20, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def roll_out(address: str, run: str, *uids: str, **settings: Any) -> None:
    with RolloutClient(address, run) as client:
        client.create_run(CONFIG | settings)
        for uid in uids or ("a", "b"):
            rows = [{**row, "rollout_logprobs": [-0.5] * len(row["response_ids"])} for row in group(uid)]
            client.submit(rows)


def of_tokens(micro: MicroBatch) -> torch.Tensor:
    """A number of each token, with noise on padding; as `response_mask`, float32."""
    sequences = micro["sequences"]
    own = sequences if micro.is_packed or micro.is_tree else sequences[:, -micro["response_mask"].shape[1] :]
    return torch.where(micro["response_mask"] == 1, own / 8, torch.tensor(99.0))


def computed(shard: Shard) -> dict[str, Any]:
    """What trainers compute of a shard, as they have it: a tensor a micro-batch, also of other types, or an array."""
    micros = list(shard.micro_batches())
    numbers = [of_tokens(micro) for micro in micros]
    return {
        "values": [one.requires_grad_() for one in numbers],
        "ref_logprobs": [np.asarray(one.detach(), np.float64) - 1 for one in numbers],
        "teacher": [torch.stack([one, -one], dim=-1) for one in numbers],
        "verdict": shard["row"].to(torch.int16) + 1,
    }


def check(shard: Shard) -> None:
    """Each value is on its own token, and nothing else is there."""
    assert not shard.is_forward
    assert shard["verdict"].tolist() == [0 if row < 0 else row + 1 for row in shard["row"].tolist()]
    for micro in shard.micro_batches():
        # Observations are no step's own tokens.
        own = micro["rollout_logprobs"] != 0
        numbers = of_tokens(micro)[own]
        assert len(numbers) or micro["is_padding"].all()
        assert torch.equal(micro["values"][own], numbers)
        assert torch.equal(micro["ref_logprobs"][own], numbers.double() - 1)
        assert torch.equal(micro["teacher"][own], torch.stack([numbers, -numbers], dim=-1).bfloat16())
        for name in ("values", "ref_logprobs", "teacher"):
            assert not micro[name][~own].any()
        assert {"advantages", "returns", "rewards"} <= micro.tensors.keys()


@pytest.mark.parametrize(
    "layout", [{}, {"layout": "packed"}, {"layout": "prefix_tree"}, {"pad_width": "micro_batch"}, {"balance": "tokens"}]
)
def test_a_batch_is_read_forward_written_and_then_trained(
    address: str, layout: dict[str, Any], run_name: str, trainers: Trainers
) -> None:
    roll_out(address, run_name, **layout)
    verdicts: list[list[int]] = [[], []]
    errors: list[BaseException] = []

    def train(rank: int) -> None:
        try:
            trainer = trainers(rank, address)
            batch = next(iter(trainer))
            assert batch.awaits == {"values", "ref_logprobs", "teacher", "verdict"}
            for shard in batch.forward():
                assert shard.is_forward
                assert not {"values", "advantages"} & set(next(shard.micro_batches()).tensors)
                with pytest.raises(FailedPreconditionError):
                    shard.ack()
                trainer.write(shard, computed(shard))
            for shard in batch.mini_batches():
                check(shard)
                trainer.write(shard, {"values": "it has its columns"})
                verdicts[rank].append(shard.position.mini_batch)
                shard.ack()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert verdicts == [[0, 1], [0, 1]]
    critic = trainers(0, address, model="critic")
    [shard] = next(iter(critic)).mini_batches()
    check(shard)


def test_a_critic_in_a_process_of_its_own_reads_the_policys_shards_and_writes_its_values(
    service: Service, run_name: str, trainers: Trainers
) -> None:
    roll_out(service.grpc_address, run_name, dp_size=1)
    policy, critic, reader = trainers(0), trainers(0, model="critic"), trainers(0, acks=False)
    for shard in next(iter(reader)).forward():
        reader.write(shard, {name: computed(shard)[name] for name in ("values", "teacher")})
    batch = next(iter(policy))
    for shard in batch.forward():
        policy.write(shard, {name: computed(shard)[name] for name in ("ref_logprobs", "verdict")})
    for shard in batch.mini_batches():
        check(shard)
        shard.ack()
    batch = next(iter(critic))
    assert not batch.awaits
    with pytest.raises(InvalidArgumentError, match="write columns for policy shards of this run"):
        critic.write(next(batch.forward()), {"values": []})
    for shard in batch.mini_batches():
        check(shard)
        shard.ack()
    assert service.runs.get(run_name).status().row_bytes == 0


def test_a_trainer_that_is_started_again_writes_anew(service: Service, run_name: str, trainers: Trainers) -> None:
    roll_out(service.grpc_address, run_name)
    first = trainers(0)
    shard = next(next(iter(first)).forward())
    first.write(shard, computed(shard))
    first.write(shard, computed(shard))
    with pytest.raises(AlreadyExistsError, match="was already written with other values"):
        first.write(shard, computed(shard) | {"verdict": shard["row"]})
    second = trainers(0, dp_size=1)
    second.load_state_dict({}, launch="second")
    with pytest.raises(StaleIncarnationError):
        first.write(shard, computed(shard))
    batch = next(iter(second))
    assert len(batch.awaits) == 4
    with pytest.raises(InvalidArgumentError, match="is for dp_size 2, but the trainer resumed with 1"):
        second.write(shard, computed(shard))
    for shard in batch.forward():
        assert shard.metadata["dp_size"] == 1
        second.write(shard, computed(shard))
    for shard in batch.mini_batches():
        check(shard)


@pytest.mark.parametrize("trained", [0, 1])
def test_a_rank_that_waits_for_what_it_wrote_is_told_that_it_is_lost_and_writes_it_again(
    trained: int, service: Service, run_name: str, trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill._client.connection.retries.LONGEST_WAIT_S", 0.2)
    roll_out(service.grpc_address, run_name, dp_size=1, critic_mini_batch_size=None)
    trainer = trainers(0, prefetch=0)
    batch, verdicts = next(iter(trainer)), list[int]()
    for shard in batch.forward():
        trainer.write(shard, computed(shard))
    training = batch.mini_batches()
    for shard in islice(training, trained):
        shard.ack()
        verdicts.append(shard.position.mini_batch)
    # As where the store has lost the written columns of the first batch.
    service.runs.get(run_name)._execute(lambda view: ([ColumnsDropped(0), BatchWithdrawn(0)], lambda after: None))
    with pytest.raises(
        FailedPreconditionError, match=r"batch 0 mini-batch 0 rank 0: \w+ was written, but the service's"
    ):
        next(training)
    batch = next(iter(trainer))
    assert batch.awaits
    for shard in batch.forward():
        trainer.write(shard, computed(shard))
    for shard in batch.mini_batches():
        check(shard)
        shard.ack()
        verdicts.append(shard.position.mini_batch)
    assert verdicts == [0, 1]


def test_a_rank_that_wants_some_columns_reads_forward_shards_without_those_that_lack(
    service: Service, run_name: str, trainers: Trainers
) -> None:
    roll_out(service.grpc_address, run_name, dp_size=1)
    trainer = trainers(0, columns=["values"])
    batch = next(iter(trainer))
    for shard in batch.forward():
        trainer.write(shard, computed(shard))
    for shard in batch.mini_batches():
        assert "values" in shard
        assert "teacher" not in shard


@pytest.mark.parametrize(
    ("settings", "columns", "message"),
    [
        ({}, {"advantages": torch.zeros(1)}, "'advantages' is not a column that trainers write"),
        ({}, {"verdict": torch.zeros(2)}, "verdict has torch.float32 values, but the column declares int16"),
        ({}, {"values": "words"}, "values is not a tensor or array"),
        ({}, {"values": [torch.zeros(1, 4)] * 3}, "a sequence of 3 and the shard has 2 micro-batches"),
        ({}, {"values": torch.zeros(2, 9)}, r"values is F32 \[2, 9\], but the shard needs F32 \[2, 4\]"),
        ({}, {"values": torch.full((2, 4), torch.nan)}, r"step 1: values\[0\] is not finite"),
        ({}, {"values": [torch.zeros(1, 4), torch.zeros(1, 6)]}, "cannot be concatenated"),
        ({"layout": "packed"}, {"values": torch.zeros(2, 4)}, "pass a list with one tensor per micro-batch"),
    ],
)
def test_what_cannot_be_a_shards_column_is_refused(
    settings: dict[str, Any],
    columns: dict[str, Any],
    message: str,
    service: Service,
    run_name: str,
    trainers: Trainers,
) -> None:
    roll_out(service.grpc_address, run_name, dp_size=1, **settings)
    trainer = trainers(0)
    shard = next(next(iter(trainer)).forward())
    with pytest.raises(InvalidArgumentError, match=message):
        trainer.write(shard, columns)
    with pytest.raises(InvalidArgumentError, match="columns is a list; pass a mapping"):
        trainer.write(shard, [columns])  # type: ignore[arg-type]
    assert len(service.runs.get(run_name).batch(0).awaits) == 8


WIDE: dict[str, Any] = {
    "train_batch_size": 1,
    "n_samples_per_prompt": 1,
    "policy_mini_batch_size": 1,
    "micro_batch": {"size": 1},
    "columns": [{"name": "hidden", "dtype": "float32", "scope": "response", "shape": [320], "source": "trainer"}],
}
LIMIT = 2 << 20


@pytest.fixture
def small() -> Iterator[Service]:
    """A service with small messages."""
    service = Service(Settings(**FREE_PORTS, store="memory", max_message_bytes=ByteSize(LIMIT)))
    service.start()
    yield service
    service.stop()


@pytest.fixture
def wide(small: Service) -> Iterator[Callable[[int], tuple[TrainerClient, Shard]]]:
    """Begins a run with one row of n tokens. Returns its trainer, and the shard to write, of 1,280 bytes per token."""
    with ExitStack() as stack:

        def begin(tokens: int) -> tuple[TrainerClient, Shard]:
            with RolloutClient(small.grpc_address, "wide", timeout_s=60) as client:
                client.create_run(WIDE)
                with client.trajectory("p", 0) as trajectory:
                    trajectory.step([1], range(tokens), reward=1.0, is_last_step=True)
                client.finish()
            trainer = stack.enter_context(TrainerClient(small.grpc_address, "wide", 0, timeout_s=60))
            [shard] = next(iter(trainer)).forward()
            return trainer, shard

        yield begin


Wide = Callable[[int], tuple[TrainerClient, Shard]]


def hidden(shard: Shard) -> torch.Tensor:
    return torch.rand(*shard["response_mask"].shape, 320)


def sent(service: Service, shard: Shard, *messages: trainer_pb2.WriteColumnsRequest, cuts: bool = False) -> None:
    """Sends these messages of one call, and cuts it, or ends it."""
    place = trainer_pb2.WriteColumnsRequest(run="wide", rank=shard.metadata["rank"], incarnation=1)
    messages[0].MergeFrom(place)
    is_over = threading.Event()

    def stream() -> Iterator[trainer_pb2.WriteColumnsRequest]:
        yield from messages
        if cuts:
            is_over.wait(30)

    with grpc.insecure_channel(service.grpc_address) as channel:
        call = trainer_pb2_grpc.TrainerServiceStub(channel).WriteColumns.future(stream(), timeout=60)  # type: ignore[no-untyped-call]
        if not cuts:
            call.result()
            return
        requests = service._api.admission.requests
        wait_until(lambda: requests.total == 3)
        call.cancel()
        is_over.set()
        wait_until(lambda: requests.total == 0)


def test_a_column_larger_than_a_message_is_written_in_parts(small: Service, wide: Wide) -> None:
    trainer, shard = wide(4000)
    values = hidden(shard)
    assert values.nbytes > 2 * LIMIT
    for _ in range(2):
        trainer.write(shard, {"hidden": values})
    [trained] = next(iter(trainer)).mini_batches()
    assert torch.equal(trained["hidden"][trained["response_mask"] == 1], values[shard["response_mask"] == 1])
    assert small._api.admission.requests.by_caller == {}


def test_a_column_in_parts_is_the_same_as_in_one_message(small: Service, wide: Wide) -> None:
    trainer, shard = wide(1500)
    values = hidden(shard)
    file = save({"hidden": values})
    assert PART_BYTES < len(file) < LIMIT
    trainer.write(shard, {"hidden": values})
    sent(small, shard, trainer_pb2.WriteColumnsRequest(tensors=file))
    with pytest.raises(grpc.RpcError, match="already written with other values"):
        sent(small, shard, trainer_pb2.WriteColumnsRequest(tensors=save({"hidden": values + 1})))


def test_a_call_that_is_cut_between_parts_leaves_nothing_and_the_next_one_writes_the_column(
    small: Service, wide: Wide
) -> None:
    trainer, shard = wide(4000)
    file = save({"hidden": hidden(shard)})
    half = (
        trainer_pb2.WriteColumnsRequest(size_bytes=len(file)),
        trainer_pb2.WriteColumnsRequest(tensors=file[:PART_BYTES]),
    )
    run = small.runs.get("wide")
    before = run.status().row_bytes
    sent(small, shard, *half, cuts=True)
    with pytest.raises(grpc.RpcError, match=f"ended after {PART_BYTES} of {len(file)} bytes"):
        sent(small, shard, *half)
    assert (len(run.batch(0).awaits), run.status().row_bytes) == (1, before)
    # The service learns that the first call was cut after the second is refused, if it is slow.
    eventually(lambda: small._api.admission.requests.by_caller == {}, "no place of a large request is taken")
    trainer.write(shard, {"hidden": hidden(shard)})
    assert not run.batch(0).awaits


def test_a_write_that_fails_between_parts_is_sent_again_from_its_beginning(
    small: Service, wide: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, came_part = list[int](), Slot.came_part

    def fail_once(slot: Slot, nbytes: int) -> None:
        arrived.append(nbytes)
        if len(arrived) == 2:
            raise UnavailableError("the connection broke")
        came_part(slot, nbytes)

    monkeypatch.setattr(Slot, "came_part", fail_once)
    trainer, shard = wide(4000)
    values = hidden(shard)
    trainer.write(shard, {"hidden": values})
    assert sum(arrived[2:]) > values.nbytes
    assert arrived[2:4] == arrived[:2]
    [trained] = next(iter(trainer)).mini_batches()
    assert torch.equal(trained["hidden"][trained["response_mask"] == 1], values[shard["response_mask"] == 1])
    assert small._api.admission.requests.by_caller == {}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"size_bytes": -1}], r"size_bytes is -1, and a column has at most 16777216 bytes"),
        ([{"size_bytes": 10, "tensors": b"0123456789"}], "send the tensors in the messages after it"),
        ([{"size_bytes": 10}, {"tensors": b"0123456789a"}], "a part has 11 bytes after 0 of 10 bytes"),
        ([{"size_bytes": 1 << 20}, {"tensors": b"0123456789"}], "send parts of at least 65536 bytes"),
        ([{"size_bytes": 10}, {}], "a part has 0 bytes after 0 of 10 bytes"),
        ([{"size_bytes": 10}, {"tensors": b"0123456789"}], "10 bytes are not a safetensors file"),
    ],
)
def test_parts_that_are_no_column_are_refused(
    small: Service, wide: Wide, messages: list[dict[str, Any]], reason: str
) -> None:
    _, shard = wide(2)
    with pytest.raises(grpc.RpcError, match=reason):
        sent(small, shard, *(trainer_pb2.WriteColumnsRequest(**message) for message in messages))
    assert len(small.runs.get("wide").batch(0).awaits) == 1


def test_a_column_of_more_than_eight_messages_is_refused_with_the_remedy(wide: Wide) -> None:
    trainer, shard = wide(13200)
    with pytest.raises(
        InvalidArgumentError,
        match=r"run 'wide': batch 0 mini-batch 0 rank 0: size_bytes is 168\d+, and a column has at most 16777216 .* "
        "more mini-batches or ranks, which makes shards smaller, or raise max_message_bytes",
    ):
        trainer.write(shard, {"hidden": hidden(shard)})
