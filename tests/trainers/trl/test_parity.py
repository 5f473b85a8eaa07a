"""Updates through gristmill are TRL's own from the same rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from gristmill import RolloutClient
from gristmill.adapters.trl import Gristmill, GristmillGRPOTrainer, run_settings
from tests.on_loop import Service
from tests.trainers.trl.play import (
    Replay,
    Weights,
    config,
    difference,
    policy,
    prompts_of,
    replayed,
    rollouts,
    submit,
    tokenizer,
    weights,
)

BOUND = 1e-4
KNOWN = rollouts(prompts=4)
MICRO_BATCHES: dict[str, dict[str, Any]] = {
    "as TRL cuts them": {},
    "uneven": {"micro_batch": {"size": 3}},
    "of tokens": {"micro_batch": {"max_tokens": 40}, "balance": "tokens"},
    "a fixed number": {"micro_batch": {"count": 3}, "pad_width": "batch"},
}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "scale_rewards": "none"},
    "cut off completions masked": {"mask_truncated_completions": True},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "rewards scaled over the batch": {"scale_rewards": "batch"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo", "pad_to_multiple_of": 8},
}
SEVERAL_STEPS: dict[str, dict[str, Any]] = {
    "two steps of a generation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 2},
    "twice over a generation": {"num_iterations": 2, "max_steps": 2},
}


def policy_with_reference(directory: Path) -> Qwen2ForCausalLM:
    """The model, which says that it came from a directory: TRL loads the reference from there, with other weights."""
    torch.manual_seed(1)
    reference = Qwen2ForCausalLM(policy().config)
    reference.save_pretrained(directory / "reference")
    model = Qwen2ForCausalLM.from_pretrained(directory / "reference")
    model.load_state_dict(policy().state_dict())
    return model


def trained(kind: Any, directory: Path, more: dict[str, Any], **named: Any) -> Weights:
    """The weights after training on the rollouts."""
    model = policy_with_reference(directory) if more.get("beta") else policy()
    arguments = {
        "reward_funcs": replayed,
        "train_dataset": prompts_of(KNOWN),
        "processing_class": tokenizer(),
        "rollout_func": Replay(KNOWN),
    }
    trainer = kind(model=model, args=config(directory, shuffle_dataset=False, **more), **arguments | named)
    trainer.train()
    return weights(model)


def by_workers(
    service: Service, run: str, directory: Path, more: dict[str, Any], *, turns: bool = True, **options: Any
) -> Weights:
    """The weights after training on what workers submitted."""
    named = {"reward_funcs": None, "train_dataset": None, "rollout_func": None}
    gristmill = Gristmill(service.grpc_address, run, rollouts="workers", **options)
    with RolloutClient(service.grpc_address, run) as client:
        client.create_run(
            run_settings(config(directory, **more), gristmill, dp_size=1, pad_token_id=tokenizer().pad_token_id)
        )
        submit(client, KNOWN, turns=turns)
    return trained(GristmillGRPOTrainer, directory, more, gristmill=gristmill, **named)


def cases(known: dict[str, dict[str, Any]], *, quick: int) -> list[Any]:
    """Parameters, of which the first few are for every change."""
    return [
        pytest.param(more, id=name, marks=[pytest.mark.slow] if place >= quick else [])
        for place, (name, more) in enumerate(known.items())
    ]


@pytest.mark.parametrize("settings", cases(MICRO_BATCHES, quick=3))
def test_what_trl_generates_is_trained_as_by_trl(
    service: Service, run_name: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    gristmill = Gristmill(service.grpc_address, run_name, settings=settings)
    ours = trained(GristmillGRPOTrainer, tmp_path, {}, gristmill=gristmill)
    assert difference(ours, trained(GRPOTrainer, tmp_path, {}), weights(policy())) < BOUND


@pytest.mark.parametrize("more", cases(LOSSES, quick=2))
def test_every_loss_is_trls(service: Service, run_name: str, tmp_path: Path, more: dict[str, Any]) -> None:
    gristmill = Gristmill(service.grpc_address, run_name, settings={"micro_batch": {"size": 3}})
    ours = trained(GristmillGRPOTrainer, tmp_path, more, gristmill=gristmill)
    assert difference(ours, trained(GRPOTrainer, tmp_path, more), weights(policy())) < BOUND


def test_a_loss_reduction_of_the_run_takes_the_place_of_trls(service: Service, run_name: str, tmp_path: Path) -> None:
    settings = {"loss_reduction": "token_mean", "micro_batch": {"size": 3}}
    gristmill = Gristmill(service.grpc_address, run_name, settings=settings)
    ours = trained(GristmillGRPOTrainer, tmp_path, {}, gristmill=gristmill)
    assert difference(ours, trained(GRPOTrainer, tmp_path, {}), weights(policy())) < BOUND


@pytest.mark.parametrize("more", cases(SEVERAL_STEPS, quick=1))
@pytest.mark.parametrize("beta", [0.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_generations_are_trained_in_as_many_steps_as_by_trl(
    service: Service,
    run_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
    beta: float,
) -> None:
    # Steps are of whole prompts; TRL's of the rows as it shuffled them.
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda rows: rows)
    more = more | {"beta": beta}
    ours = trained(GristmillGRPOTrainer, tmp_path, more, gristmill=Gristmill(service.grpc_address, run_name))
    assert difference(ours, trained(GRPOTrainer, tmp_path, more), weights(policy())) < BOUND


@pytest.mark.parametrize("merge", ["prefix", "none"])
def test_turns_that_workers_submit_are_trained_as_trls_whole_completions(
    service: Service, run_name: str, tmp_path: Path, merge: str
) -> None:
    settings = {"step_wise": True, "merge": merge, "micro_batch": {"max_tokens": 40}, "balance": "tokens"}
    ours = by_workers(service, run_name, tmp_path, {}, settings=settings, old_logprobs="trainer")
    assert difference(ours, trained(GRPOTrainer, tmp_path, {}), weights(policy())) < BOUND


def test_log_probabilities_of_old_and_reference_weights_are_written_back_for_what_workers_submit(
    service: Service, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda rows: rows)
    more = SEVERAL_STEPS["two steps of a generation"] | {"beta": 0.5}
    settings = {"step_wise": True, "merge": "prefix", "seal_order": "admission"}
    ours = by_workers(service, run_name, tmp_path, more, settings=settings, old_logprobs="trainer")
    assert difference(ours, trained(GRPOTrainer, tmp_path, more), weights(policy())) < BOUND
