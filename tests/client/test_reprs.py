"""What clients, trajectories, batches, plans and shards show of themselves: one line, no tokens, no secrets."""

from __future__ import annotations

import json
import re

import pytest

from gristmill import Credentials, RolloutClient, TrainerClient
from tests.client.faces import FACES, connecting
from tests.on_loop import Service
from tests.rows import make_config

SECRET = "gristmill_not-to-be-seen"
CONFIG = make_config(
    n_samples_per_prompt=3, micro_batch={"size": 2}, update_epochs_per_batch=2, dp_size=2, step_wise=False
)


def fill(client: RolloutClient, **settings: object) -> None:
    client.create_run({**CONFIG, **settings})
    for sample in range(3):
        with client.trajectory("a", sample) as trajectory:
            trajectory.step([987654, 2], [3] * (sample + 1), reward=float(sample), is_last_step=True)
    client.finish()


@pytest.mark.parametrize("face", FACES)
def test_a_trajectory_says_how_far_it_is(service: Service, run_name: str, face: str) -> None:
    with connecting(face) as connect, connect(service.grpc_address, run_name) as client:
        client.create_run({**CONFIG, "step_wise": True})
        trajectory = client.trajectory("math/17", 2)
        shown = getattr(trajectory, "awaited", trajectory)
        kind = type(shown).__name__
        assert repr(shown) == f"<{kind} uid 'math/17' sample 2: 0 steps, open>"
        trajectory.step([987654], [2], reward=0.0)
        assert repr(shown) == f"<{kind} uid 'math/17' sample 2: 1 step, open>"
        trajectory.step([987654, 2], [3], reward=1.0, is_last_step=True)
        assert repr(shown) == f"<{kind} uid 'math/17' sample 2: 2 steps, ended>"


@pytest.mark.parametrize("face", FACES)
def test_a_rollout_client_says_its_run_and_where_it_is(service: Service, run_name: str, face: str) -> None:
    address = service.grpc_address
    with connecting(face) as connect:
        with connect(address, run_name, credentials=Credentials(token=SECRET)) as client:
            shown = getattr(client, "awaited", client)
            assert repr(shown) == f"<{type(shown).__name__} of run '{run_name}' at {address}>"
        assert repr(shown) == f"<{type(shown).__name__} of run '{run_name}' at {address}, closed>"


def test_a_status_says_what_happened_and_not_the_settings(service: Service, run_name: str) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        client.create_run(CONFIG)
        status = client.status()
    assert status.config["dp_size"] == 2
    assert "rows_accepted=0" in repr(status)
    assert "dp_size" not in repr(status)


@pytest.mark.parametrize("layout", ["left_padded", "packed"])
def test_what_a_rank_trains_on_is_one_line_each(service: Service, run_name: str, layout: str) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        fill(client, layout=layout)
    with TrainerClient(service.grpc_address, run_name, 1, credentials=Credentials(token=SECRET)) as trainer:
        head = f"<TrainerClient of run '{run_name}' rank 1 at {service.grpc_address}: policy, "
        assert repr(trainer) == head + "position not read yet>"
        batch = next(iter(trainer))
        assert repr(trainer) == head + "next is batch 0 epoch 0 mini-batch 0>"
        assert repr(batch) == "<Batch 0: 1 prompt, 3 rows, 1 mini-batch in each of 2 epochs>"
        assert re.fullmatch(
            r"<Plan of batch 0: 1 prompt, 3 rows, 2 optimizer steps on 2 ranks, [\d.]+% padding; keys batch, rows.*>",
            repr(batch.plan),
        )
        assert json.loads(json.dumps(batch.plan))["rows"] == 3
        shard = next(batch.mini_batches())
        assert re.fullmatch(
            r"<Shard batch 0 epoch 0 mini-batch 0 rank 1: 2 rows, 1 of them padding(, padded to \d tokens)?, "
            "1 micro-batch>",
            repr(shard),
        )
        [micro] = shard.micro_batches()
        how = "packed" if layout == "packed" else "padded to"
        assert re.fullmatch(rf"<MicroBatch: 2 rows, 1 of them padding, {how} \d tokens>", repr(micro))
        assert "987654" not in f"{shard}{micro}{batch}"


def test_the_trainer_of_all_ranks_shows_ranks_not_shards(service: Service, run_name: str) -> None:
    with RolloutClient(service.grpc_address, run_name) as client:
        fill(client)
    with TrainerClient(service.grpc_address, run_name, ranks="all") as trainer:
        assert repr(trainer).startswith(f"<TrainerClient of run '{run_name}' at {service.grpc_address}: policy, ")
        batch = next(iter(trainer))
        assert repr(batch).startswith("<Batch 0: 1 prompt, 3 rows, ")
        mini_batch = next(batch.mini_batches())
        assert repr(mini_batch) == "<MiniBatch batch 0 epoch 0 mini-batch 0: 4 rows in the shards of 2 ranks>"
