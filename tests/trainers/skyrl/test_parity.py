"""One step through gristmill changes the weights as SkyRL alone does, from the same rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from skyrl.train.trainer import RayPPOTrainer

from gristmill import InvalidArgumentError, RolloutClient
from gristmill.adapters.skyrl import Gristmill, GristmillPPOTrainer
from tests.on_loop import Service
from tests.trainers.skyrl.play import Recorded, config, difference, first_values, first_weights, save_model
from tests.trainers.skyrl.training import Trained, train

BOUND = 1e-4
MERGED = {"generator__merge_stepwise_output": True}
# SkyRL 0.3.0 pads mini-batches of an odd number of rows for its forward pass and leaves the padding in, so that the
# log-probabilities of later mini-batches are those of other rows; not so where the forward pass is of the batch whole.
WHOLE_FORWARD = {"trainer__recompute_old_logprobs_per_minibatch": False}
ONE_TURN = {"generator__step_wise_trajectories": False}
REFERENCE = {"trainer__ref__model__path": "{directory}/reference"}
CASES: dict[str, dict[str, Any]] = {
    "steps": WHOLE_FORWARD,
    "merged steps": WHOLE_FORWARD | MERGED,
    "merged steps, micro-batches of tokens": WHOLE_FORWARD | MERGED | {"trainer__max_tokens_per_microbatch": 40},
    "merged steps, packed": WHOLE_FORWARD | MERGED | {"trainer__remove_microbatch_padding": True},
    "one turn, rloo, sequence mean": ONE_TURN
    | {"trainer__algorithm__advantage_estimator": "rloo", "trainer__algorithm__loss_reduction": "sequence_mean"},
    "one turn, maxrl, prompt mean, twice over": ONE_TURN
    | {
        "trainer__algorithm__advantage_estimator": "maxrl",
        "trainer__algorithm__loss_reduction": "prompt_mean",
        "trainer__update_epochs_per_batch": 2,
    },
    "one turn, reinforce++, sums by length": ONE_TURN
    | {
        "trainer__algorithm__advantage_estimator": "reinforce++",
        "trainer__algorithm__gamma": 0.95,
        "trainer__algorithm__loss_reduction": "seq_mean_token_sum_norm",
        "trainer__algorithm__max_seq_len": 64,
    },
    "KL in the loss": ONE_TURN
    | REFERENCE
    | {"trainer__algorithm__use_kl_loss": True, "trainer__algorithm__kl_loss_coef": 0.1},
    "KL in rewards": ONE_TURN
    | REFERENCE
    | {"trainer__algorithm__use_kl_in_reward": True, "trainer__algorithm__kl_loss_coef": 0.1},
    "a critic": ONE_TURN
    | {
        "trainer__algorithm__advantage_estimator": "gae",
        "trainer__algorithm__lambd": 0.9,
        "trainer__critic__model__path": "{directory}/model",
    },
}


def trained(directory: Path, name: str, kind: Any, more: dict[str, Any], ranks: int, **named: Any) -> Trained:
    placement = {f"trainer__placement__{model}_num_gpus_per_node": ranks for model in ("policy", "critic", "ref")}
    overrides = {
        key: value.format(directory=directory) if isinstance(value, str) else value for key, value in more.items()
    }
    cfg = config(directory, **placement | overrides, trainer__export_path=directory / name)
    return train(kind, cfg, Recorded(cfg), prompts=4, **named)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("parity")
    save_model(directory / "model")
    save_model(directory / "reference", seed=1)
    return directory


@pytest.mark.usefixtures("ray_address")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("more", CASES.values(), ids=CASES)
def test_an_update_is_skyrls_own(
    service: Service, run_name: str, directory: Path, more: dict[str, Any], ranks: int
) -> None:
    gristmill = Gristmill(service.grpc_address, run_name)
    native = trained(directory, "native", RayPPOTrainer, more, ranks)
    ours = trained(directory, "ours", GristmillPPOTrainer, more, ranks, gristmill=gristmill)
    first = first_weights(config(directory))
    assert difference(ours.policy, native.policy, first) < BOUND
    if native.critic:
        assert difference(ours.critic, native.critic, first_values(config(directory))) < BOUND


@pytest.mark.usefixtures("ray_address")
def test_packed_rows_train_as_padded_ones_do(service: Service, run_name: str, directory: Path) -> None:
    gristmill = Gristmill(service.grpc_address, run_name)
    packed = trained(directory, "ours", GristmillPPOTrainer, CASES["merged steps, packed"], 1, gristmill=gristmill)
    padded = trained(directory, "native", RayPPOTrainer, CASES["merged steps"], 1)
    assert difference(packed.policy, padded.policy, first_weights(config(directory))) < BOUND


@pytest.mark.usefixtures("ray_address")
@pytest.mark.parametrize(
    ("case", "columns"), [("KL in rewards", {"old_logprobs", "ref_logprobs"}), ("a critic", {"values"})]
)
def test_what_advantages_depend_on_is_written_back(
    service: Service, run_name: str, directory: Path, case: str, columns: set[str]
) -> None:
    trained(directory, "ours", GristmillPPOTrainer, CASES[case], 1, gristmill=Gristmill(service.grpc_address, run_name))
    with RolloutClient(service.grpc_address, run_name) as client:
        status = client.status()
    declared = status.config["columns"]
    assert {column["name"] for column in declared if column["source"] == "trainer"} == columns
    assert status.batches_freed == 1, "trained, which it is only with them"


@pytest.mark.usefixtures("ray_address")
def test_a_critic_of_fewer_ranks_is_refused(service: Service, run_name: str, directory: Path) -> None:
    fewer = CASES["a critic"] | {"trainer__placement__critic_num_gpus_per_node": 1}
    with pytest.raises(
        InvalidArgumentError, match=r"policy has 2 data-parallel ranks, but the number for the critic is 1; use"
    ):
        trained(directory, "ours", GristmillPPOTrainer, fewer, 2, gristmill=Gristmill(service.grpc_address, run_name))
