"""Ranks agree on one launch: through torch.distributed, in processes of their own."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from gristmill import InvalidArgumentError, RolloutClient, TrainerClient
from gristmill._client.trainer.training_order import make_launch_id
from tests.on_loop import Service

CONFIG = {"train_batch_size": 1, "n_samples_per_prompt": 1, "policy_mini_batch_size": 1, "micro_batch": {"size": 1}}


def _train(rank: int, size: int, rendezvous: str, address: str, run: str, answers: Any) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    try:
        with TrainerClient(address, run, rank, dp_size=size) as trainer:
            trainer.load_state_dict({})
            for batch in trainer:
                for shard in batch.mini_batches():
                    distributed.barrier()
                    shard.ack()
            answers.put((rank, make_launch_id(size), tuple(trainer.position)))
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_under_torch_distributed_resume_and_train_as_one(service: Service, run_name: str) -> None:
    context = multiprocessing.get_context("spawn")
    answers, size = context.SimpleQueue(), 2
    with RolloutClient(service.grpc_address, run_name) as client, tempfile.TemporaryDirectory() as directory:
        client.create_run(CONFIG | {"dp_size": size})
        for uid in client.begin_groups(["a", "b", "c"]):
            with client.trajectory(uid, 0) as trajectory:
                trajectory.step([1], [2], reward=1.0, is_last_step=True)
        client.finish()
        with TrainerClient(service.grpc_address, run_name, 0) as earlier:
            earlier.load_state_dict({}, launch="earlier")
        before = client.status().models["policy"].incarnation
        common = (size, Path(directory) / "rendezvous", service.grpc_address, run_name, answers)
        ranks = [context.Process(target=_train, args=(rank, *common)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
        assert [process.exitcode for process in ranks] == [0, 0]
        assert client.status().models["policy"].incarnation == before + 1
    (_, one, there), (_, other, here) = sorted(answers.get() for _ in range(size))
    assert one == other
    assert there == here == (3, 0, 0)


def test_a_single_rank_needs_nobody_to_agree_with() -> None:
    assert make_launch_id(1) != make_launch_id(1)


def test_several_ranks_need_torch_distributed_or_a_name() -> None:
    with pytest.raises(InvalidArgumentError, match="launch is not set, and dp_size is 3 without torch"):
        make_launch_id(3)
