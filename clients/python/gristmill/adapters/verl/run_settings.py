"""The run that verl's configuration describes. What a run cannot do as verl would is refused here, with the remedy.

Reads a configuration by its names, so that it needs nothing of verl: also rollout workers may make the settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gristmill.errors import InvalidArgumentError

_ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "gae": "gae",
    "reinforce_plus_plus": "reinforce++",
}
_PER_TOKEN = ("gae", "reinforce++")
# verl.trainer.ppo.core_algos.kl_penalty
_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_REFUSED_SETTINGS = {
    "layout": "verl's workers take rows without padding, and the run is packed; leave it out",
    "columns": "verl's workers are given no columns of a run's own; leave it out",
    "loss_reduction": "verl reduces losses itself, by actor_rollout_ref.actor.loss_agg_mode; leave it out",
}
_STRATEGIES = ("fsdp", "fsdp2", "megatron")
# A batch that is trained is held until a checkpoint has it; beside those, so many may wait.
_BATCHES_AHEAD = 2


def run_config(config: Mapping[str, Any], dp_size: int) -> dict[str, Any]:
    """The settings of the run that a trainer with this configuration takes its batches from, for `create_run`.

    config: verl's, as Hydra gives it (`ppo_trainer`). dp_size: data-parallel ranks of the actor.
    `trainer.v1.gristmill.settings` adds what verl has no name for, such as `merge`.
    Raises InvalidArgumentError naming verl's setting, its value and what to change.
    """
    problems = list(_problems(config))
    if problems:
        raise InvalidArgumentError("trainer_mode=gristmill: " + "; ".join(problems))
    actor, algorithm = config["actor_rollout_ref"]["actor"], config["algorithm"]
    estimator = _ESTIMATORS[algorithm["adv_estimator"]]
    derived: dict[str, Any] = {
        "train_batch_size": config["data"]["train_batch_size"],
        "n_samples_per_prompt": config["actor_rollout_ref"]["rollout"]["n"],
        "policy_mini_batch_size": actor["ppo_mini_batch_size"],
        "update_epochs_per_batch": actor["ppo_epochs"],
        "advantage_estimator": estimator,
        "dp_size": dp_size,
        **_micro_batches(actor),
    }
    if estimator == "grpo":
        derived["grpo_norm_by_std"] = algorithm["norm_adv_by_std_in_grpo"]
    if estimator in _PER_TOKEN:
        derived |= {"gamma": algorithm["gamma"], "whiten": "batch"}
    if estimator == "gae":
        derived["lambda"] = algorithm["lam"]
    if algorithm["use_kl_in_reward"]:
        derived["kl_in_reward"] = {
            "coef": algorithm["kl_ctrl"]["kl_coef"],
            "estimator": _KL_ESTIMATORS[algorithm["kl_penalty"]],
        }
        derived["kl_from"] = "rollout_logprobs" if bypasses_old_logprobs(config) else "old_logprobs"
    if needs_critic(config):
        derived["critic_mini_batch_size"] = config["critic"]["ppo_mini_batch_size"]
    if columns := list(_columns(config)):
        derived["columns"] = columns
    return _with_settings(derived, config)


def needs_critic(config: Mapping[str, Any]) -> bool:
    """As verl decides it."""
    enabled = config["critic"]["enable"]
    return config["algorithm"]["adv_estimator"] == "gae" if enabled is None else bool(enabled)


def bypasses_old_logprobs(config: Mapping[str, Any]) -> bool:
    """Whether the sampler's logprobs stand for those of the policy before the update."""
    correction = config["algorithm"].get("rollout_correction") or {}
    return bool(correction.get("bypass_mode", False))


def _with_settings(derived: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(config["trainer"]["v1"]["gristmill"].get("settings") or {})
    if taken := sorted(derived.keys() & given.keys()):
        raise InvalidArgumentError(
            f"trainer.v1.gristmill.settings.{taken[0]} is {given[taken[0]]}, and verl's own configuration says "
            f"{derived[taken[0]]}; change it there, and leave it out here"
        )
    for name, remedy in _REFUSED_SETTINGS.items():
        if name in given:
            raise InvalidArgumentError(f"trainer.v1.gristmill.settings.{name}: {given[name]}: {remedy}")
    save_freq = config["trainer"]["save_freq"]
    defaults: dict[str, Any] = {"step_wise": True, "layout": "packed"}
    if save_freq > _BATCHES_AHEAD:
        defaults["max_buffered_batches"] = save_freq + _BATCHES_AHEAD
    return defaults | given | derived


def _micro_batches(actor: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if actor["use_dynamic_bsz"]:
        found["micro_batch"] = {"max_tokens": actor["ppo_max_token_len_per_gpu"]}
    else:
        found["micro_batch"] = {"size": actor["ppo_micro_batch_size_per_gpu"], "full": True}
    if actor["strategy"] == "megatron":
        found["cp_size"] = actor["megatron"]["context_parallel_size"]
    else:
        found["cp_size"] = actor["ulysses_sequence_parallel_size"]
    return found


def _columns(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What advantages depend on and workers of verl compute."""
    algorithm = config["algorithm"]
    names = []
    if algorithm["use_kl_in_reward"]:
        names += ["ref_logprobs"] if bypasses_old_logprobs(config) else ["old_logprobs", "ref_logprobs"]
    if algorithm["adv_estimator"] == "gae":
        names.append("values")
    for name in names:
        yield {"name": name, "dtype": "float32", "scope": "response", "source": "trainer"}


def _problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each setting of verl's that a run would not follow."""
    for where, value, is_followed, remedy in (
        *_estimation(config["algorithm"]),
        *_training(config["actor_rollout_ref"]["actor"]),
        *_critic(config),
        *_rollouts(config),
    ):
        if not is_followed:
            yield f"{where}: {value} is not followed; {remedy}"


# Setting, its value, whether the run does what it says, and what to change where it does not.
_Check = tuple[str, Any, bool, str]


def _estimation(algorithm: Mapping[str, Any]) -> Iterator[_Check]:
    estimator, kl = algorithm["adv_estimator"], algorithm["use_kl_in_reward"]
    filters = bool((algorithm.get("filter_groups") or {}).get("enable"))
    correction = algorithm.get("rollout_correction") or {}
    corrects = correction.get("rollout_is") is not None or correction.get("rollout_rs") is not None
    yield (
        "algorithm.adv_estimator",
        estimator,
        estimator in _ESTIMATORS,
        f"the service computes {', '.join(_ESTIMATORS)}; choose one of these",
    )
    yield (
        "algorithm.kl_penalty",
        algorithm["kl_penalty"],
        not kl or algorithm["kl_penalty"] in _KL_ESTIMATORS,
        f"the service takes {', '.join(_KL_ESTIMATORS)} from rewards; choose one of these",
    )
    yield (
        "algorithm.kl_ctrl.type",
        algorithm["kl_ctrl"]["type"],
        not kl or algorithm["kl_ctrl"]["type"] == "fixed",
        "a run has one coefficient; use fixed",
    )
    yield (
        "algorithm.filter_groups.enable",
        True,
        not filters,
        "the service replaces groups of equal scores; set it to False and trainer.v1.gristmill.settings."
        "zero_variance_filter=replace",
    )
    yield (
        "algorithm.rollout_correction",
        {name: correction.get(name) for name in ("rollout_is", "rollout_rs")},
        not corrects or bool(correction.get("bypass_mode")),
        "it weighs and rejects tokens before advantages; leave both null, or set bypass_mode=True, which corrects in "
        "the loss",
    )
    yield (
        "algorithm.use_pf_ppo",
        True,
        not algorithm.get("use_pf_ppo"),
        "a run trains each row once an epoch; set False",
    )


def _training(actor: Mapping[str, Any]) -> Iterator[_Check]:
    yield (
        "actor_rollout_ref.actor.strategy",
        actor["strategy"],
        actor["strategy"] in _STRATEGIES,
        f"its context parallelism is not known here; use {', '.join(_STRATEGIES)}",
    )
    yield (
        "actor_rollout_ref.actor.shuffle",
        True,
        not actor["shuffle"],
        "rows stay in the mini-batch that the service put them into; set False",
    )
    yield (
        "actor_rollout_ref.actor.loss_agg_mode",
        actor["loss_agg_mode"],
        actor["loss_agg_mode"] != "seq-mean-token-sum-norm" or actor.get("loss_scale_factor") is not None,
        "verl would divide by the width of each micro-batch; set actor_rollout_ref.actor.loss_scale_factor",
    )
    yield (
        "actor_rollout_ref.actor.checkpoint.async_save",
        True,
        not actor["checkpoint"].get("async_save"),
        "what a checkpoint has is committed when it is written; set False",
    )
    yield (
        "actor_rollout_ref.actor.use_prefix_grouper",
        True,
        not actor.get("use_prefix_grouper"),
        "rows of a group may lie on several ranks; set False",
    )


def _critic(config: Mapping[str, Any]) -> Iterator[_Check]:
    if not needs_critic(config):
        return
    actor, critic = config["actor_rollout_ref"]["actor"], config["critic"]
    yield (
        "critic.enable",
        True,
        config["algorithm"]["adv_estimator"] == "gae",
        "values are of gae alone; leave it null, or set algorithm.adv_estimator=gae",
    )
    yield (
        "critic.ppo_epochs",
        critic["ppo_epochs"],
        critic["ppo_epochs"] == actor["ppo_epochs"],
        f"actor and critic train a batch equally often; set {actor['ppo_epochs']}, as the actor has it",
    )
    yield "critic.shuffle", True, not critic["shuffle"], "as for the actor, set False"
    size = "ppo_max_token_len_per_gpu" if actor["use_dynamic_bsz"] else "ppo_micro_batch_size_per_gpu"
    yield (
        f"critic.{size}",
        critic[size],
        critic[size] is None or critic[size] >= actor[size],
        f"the critic trains the actor's micro-batches; lower actor_rollout_ref.actor.{size} to it",
    )


def _rollouts(config: Mapping[str, Any]) -> Iterator[_Check]:
    """What needs rollouts of verl's own, where they come from elsewhere."""
    trainer = config["trainer"]
    yield (
        "trainer.total_training_steps",
        None,
        trainer["total_training_steps"] is not None,
        "there is no data set to count them by; set how many batches are trained",
    )
    validates = trainer["val_before_train"] or trainer["test_freq"] > 0 or trainer.get("val_only")
    yield (
        "trainer.val_before_train, val_only, test_freq",
        (trainer["val_before_train"], trainer.get("val_only"), trainer["test_freq"]),
        not validates,
        "rollout workers validate; set False, False and -1",
    )
    yield (
        "trainer.rollout_data_dir",
        trainer.get("rollout_data_dir"),
        not trainer.get("rollout_data_dir"),
        "gristmill export writes rollouts; leave it null",
    )
    yield (
        "reward.reward_model.enable",
        True,
        not config["reward"]["reward_model"]["enable"],
        "rollouts come with their rewards; set False",
    )
    yield "distillation.enabled", True, not (config.get("distillation") or {}).get("enabled"), "set False"
