"""verl's configuration becomes a run that the service takes, or is refused by the setting that it cannot follow."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from gristmill import InvalidArgumentError
from gristmill.adapters.verl import Gristmill, run_settings
from gristmill_service.config import RunConfig, parse_config
from tests.trainers.verl.verl_settings import CPU, RUN, batches, compose_config

GUIDE = (Path(__file__).parents[3] / "docs/trainers/verl.md").read_text()
SIZES = batches(groups=8, samples=4, mini_batch=2, micro_batch=3)
DYNAMIC = ["actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"]
GAE = ["algorithm.adv_estimator=gae", "algorithm.gamma=0.9", "algorithm.lam=0.8", "critic.ppo_mini_batch_size=4"]
GDPO = ["algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[format, answer]"]
OTB = ["algorithm.adv_estimator=tir_optimal_token_baseline", "actor_rollout_ref.actor.calculate_sum_pi_squared=True"]
KL = ["algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=low_var_kl", "algorithm.kl_ctrl.kl_coef=0.05"]


@cache
def defaults() -> Any:
    return compose_config([*CPU, *RUN, *SIZES])


def run_of(*overrides: str, dp_size: int = 2) -> RunConfig:
    """What the service makes of it."""
    config = defaults().copy()
    for override in overrides:
        name, _, value = override.removeprefix("+").partition("=")
        OmegaConf.update(config, name, yaml.safe_load(value), force_add=True)
    return parse_config(settings_of(config, dp_size))


def settings_of(config: Any, dp_size: int) -> dict[str, Any]:
    gristmill = Gristmill.of(config.trainer.v1.gristmill, "trainer.v1.gristmill")
    return run_settings(config, gristmill, dp_size=dp_size)


def test_the_guides_settings_make_a_run_and_few_of_them_are_gristmills() -> None:
    match = re.search(r"<!-- verl-overrides -->\n```bash\n(.*?)```", GUIDE, re.DOTALL)
    assert match is not None
    python, flag, module, *overrides = shlex.split(match[1].replace("\\\n", " "))
    assert (python, flag, module) == ("python", "-m", "verl.trainer.main_ppo")
    assert len([setting for setting in overrides if "gristmill" in setting]) <= 10, "what a user writes"
    run = parse_config(settings_of(compose_config(overrides), dp_size=8))
    assert (run.train_batch_size, run.n_samples_per_prompt, run.policy_mini_batch_size) == (256, 8, 64)
    assert (run.merge, run.balance, run.micro_batch.max_tokens) == ("prefix", "tokens", 16384)
    assert run.max_buffered_batches > 20


def test_sizes_are_verls_in_prompts_and_micro_batches_are_full() -> None:
    run = run_of("actor_rollout_ref.actor.ppo_epochs=3", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")
    assert (run.train_batch_size, run.n_samples_per_prompt, run.policy_mini_batch_size) == (8, 4, 2)
    assert (run.dp_size, run.cp_size, run.update_epochs_per_batch) == (2, 2, 3)
    assert (run.micro_batch.size, run.micro_batch.full) == (3, True)
    assert (run.layout, run.step_wise, run.models) == ("packed", True, ("policy",))
    assert run_of(*DYNAMIC).micro_batch.max_tokens == 4096


def test_estimators_have_verls_settings() -> None:
    assert run_of().advantage_estimator == "grpo"
    assert not run_of("algorithm.norm_adv_by_std_in_grpo=False").grpo_norm_by_std
    assert run_of("algorithm.adv_estimator=rloo").advantage_estimator == "rloo"
    gae = run_of(*GAE)
    assert (gae.advantage_estimator, gae.gamma, gae.lambda_, gae.whiten) == ("gae", 0.9, 0.8, "batch")
    assert gae.critic_mini_batch_size == 4
    assert [column.name for column in gae.written_columns] == ["values"]
    assert run_of("algorithm.adv_estimator=opo").advantage_estimator == "opo"
    passk = run_of("algorithm.adv_estimator=grpo_passk", "algorithm.norm_adv_by_std_in_grpo=False")
    assert (passk.advantage_estimator, passk.grpo_norm_by_std) == ("passk", False)
    plain = run_of("algorithm.adv_estimator=reinforce_plus_plus")
    assert (plain.advantage_estimator, plain.whiten, plain.models) == ("reinforce++", "batch", ("policy",))


def test_the_optimal_token_baseline_waits_for_what_verls_workers_compute() -> None:
    run = run_of(*OTB)
    assert (run.advantage_estimator, run.whiten) == ("otb", "none")
    assert [column.name for column in run.written_columns] == ["old_logprobs", "sum_pi_squared"]
    assert len(run_of(*OTB, *KL).written_columns) == 3


def test_gdpo_has_verls_components_and_is_whitened_over_tokens() -> None:
    gdpo = run_of("algorithm.norm_adv_by_std_in_grpo=False", *GDPO)
    assert (gdpo.advantage_estimator, gdpo.whiten, gdpo.grpo_norm_by_std) == ("gdpo", "batch", True)
    assert gdpo.component_weights == {"format": 1.0, "answer": 1.0}
    assert run_of(*GDPO, "+algorithm.gdpo_reward_weights=[0.5, 2]").component_weights == {"format": 0.5, "answer": 2.0}


def test_kl_in_rewards_waits_for_what_verls_workers_compute() -> None:
    run = run_of(*KL)
    assert run.kl_in_reward is not None
    assert (run.kl_in_reward.coef, run.kl_in_reward.estimator) == (0.05, "k3")
    assert [column.name for column in run.written_columns] == ["old_logprobs", "ref_logprobs"]
    bypassed = run_of(*KL, "algorithm.rollout_correction.bypass_mode=True")
    assert bypassed.kl_from == "rollout_logprobs"
    assert [column.name for column in bypassed.written_columns] == ["ref_logprobs"]


def test_settings_that_verl_has_no_name_for_are_given_next_to_it() -> None:
    run = run_of("+trainer.v1.gristmill.settings={merge: prefix, balance: tokens}")
    assert (run.merge, run.balance) == ("prefix", "tokens")


def test_batches_that_a_checkpoint_has_not_yet_leave_room_for_more() -> None:
    assert run_of("trainer.save_freq=20").max_buffered_batches > 20
    assert run_of("trainer.save_freq=-1").max_buffered_batches == 4


REFUSED: list[tuple[list[str], str]] = [
    (
        ["algorithm.adv_estimator=remax"],
        r"algorithm.adv_estimator: 'remax' is not an estimator of the service; use grpo, .*",
    ),
    (["algorithm.adv_estimator=gdpo"], r"adv_estimator: 'gdpo' .*gdpo_reward_keys names none; .* reward_components"),
    (
        ["algorithm.adv_estimator=optimal_token_baseline"],
        r"'optimal_token_baseline' .*; use tir_optimal_token_baseline",
    ),
    ([OTB[0]], r"calculate_sum_pi_squared: False leaves out .* set it to True"),
    (
        [*OTB, "algorithm.rollout_correction.bypass_mode=True"],
        r"bypass_mode: True computes no old_log_probs.* to False",
    ),
    ([*KL, "algorithm.kl_penalty=abs"], r"algorithm.kl_penalty: 'abs' is not supported in rewards; use kl, "),
    ([*KL, "algorithm.kl_ctrl.type=adaptive"], r"algorithm.kl_ctrl.type: 'adaptive' .* use fixed"),
    (["algorithm.filter_groups.enable=True"], r"filter_groups.enable: True .*zero_variance_filter=replace"),
    (["algorithm.rollout_correction.rollout_is=token"], r"rollout_correction: .*'token'.* or set bypass_mode=True"),
    (["algorithm.use_pf_ppo=True"], r"algorithm.use_pf_ppo: True samples rows, .* set it to False"),
    (["actor_rollout_ref.actor.strategy=veomni"], r"actor.strategy: 'veomni' .* use fsdp, fsdp2, megatron"),
    (["actor_rollout_ref.actor.shuffle=True"], r"actor.shuffle: True moves rows, .* set it to False"),
    (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"], r"loss_agg_mode: .*loss_scale_factor"),
    (["actor_rollout_ref.actor.checkpoint.async_save=True"], r"checkpoint.async_save: True .* set it to False"),
    (["actor_rollout_ref.actor.use_prefix_grouper=True"], r"use_prefix_grouper: True .* set it to False"),
    ([*GAE, "critic.ppo_epochs=2"], r"critic.ppo_epochs: 2 differs from the actor's, .* set it to 1"),
    ([*GAE, "critic.ppo_micro_batch_size_per_gpu=1"], r"critic.ppo_micro_batch_size_per_gpu: 1 .* lower actor_rollout"),
    (["critic.enable=True"], r"critic.enable: True .*adv_estimator=gae"),
    (["trainer.total_training_steps=null"], r"trainer.total_training_steps: None .* the number of batches"),
    (["trainer.val_before_train=True"], r"val_before_train: True needs an inference engine, .*; set it to False"),
    (["trainer.test_freq=5"], r"trainer.test_freq: 5 .* set it to -1"),
    (["trainer.v1.gristmill.rollouts=trainer"], r"does not support 'trainer'; use 'workers'"),
    (["trainer.rollout_data_dir=/tmp"], r"trainer.rollout_data_dir: '/tmp' .* gristmill export"),
    (["reward.reward_model.enable=True"], r"reward_model.enable: True .* already have rewards"),
    (
        ["+trainer.v1.gristmill.settings={dp_size: 4}"],
        r"settings: dp_size follows from verl's configuration, where it is 2",
    ),
    (["+trainer.v1.gristmill.settings={loss_reduction: token_mean}"], r"settings: loss_reduction: .*loss_agg_mode"),
    (["+trainer.v1.gristmill.settings={layout: packed}"], r"settings: layout is fixed at 'packed', .*; omit it"),
    (["+trainer.v1.gristmill.settings={columns: []}"], r"settings: columns: .*get no other columns"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_a_run_cannot_follow_is_refused_with_the_remedy(overrides: list[str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        run_of(*overrides)


def test_all_that_is_not_followed_is_named_at_once() -> None:
    with pytest.raises(InvalidArgumentError, match=r"(?s)use_pf_ppo: True .*\n- .*actor.shuffle: True"):
        run_of("algorithm.use_pf_ppo=True", "actor_rollout_ref.actor.shuffle=True")


@pytest.mark.parametrize("missing", ["address", "run"])
def test_the_service_and_the_run_have_to_be_named(missing: str) -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls

    config: Any = compose_config([*CPU, *SIZES, *(setting for setting in RUN if f".{missing}=" not in setting)])
    with pytest.raises(InvalidArgumentError, match=f"trainer.v1.gristmill.{missing} is not set; set the service's"):
        get_trainer_cls("gristmill")(config)


@pytest.mark.parametrize("stale", ["drop", "mask"])
def test_no_rollouts_are_dropped_or_masked_for_the_versions_between_two_checkpoints(stale: str) -> None:
    def settings(max_staleness: int, stale: str) -> list[str]:
        own = f"+trainer.v1.gristmill.settings={{max_staleness: {max_staleness}, stale: {stale}}}"
        return ["trainer.save_freq=20", own]

    with pytest.raises(
        InvalidArgumentError, match=r"max_staleness: 4 is less than trainer.save_freq: 20.* at least 20"
    ):
        run_of(*settings(4, stale))
    assert run_of(*settings(20, stale)).max_staleness == 20
    assert run_of(*settings(4, "count")).batches_ahead == 4
