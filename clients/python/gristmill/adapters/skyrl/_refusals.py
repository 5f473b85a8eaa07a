"""What of SkyRL's configuration a run does not follow, each with what to do instead.

Reads the configuration by its names and imports nothing of SkyRL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any, NamedTuple

_ESTIMATORS = ("grpo", "rloo", "maxrl", "gae", "reinforce++")
_REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
_KL_ESTIMATORS = ("k1", "k2", "k3")
_TOLERANCE = 1e-6
"""SkyRL's default, under which scores of a group count as equal; the service's are exact sums."""


class _Refusal(NamedTuple):
    """setting: its name in SkyRL's configuration. is_refused: whether this value is, in an algorithm's settings.
    why: what the value lacks, and what to set instead."""

    setting: str
    is_refused: Callable[[Any, Any], bool]
    why: str


def _is_on(value: Any, _: Any) -> bool:
    return bool(value)


_REFUSALS = (
    _Refusal(
        "trainer.algorithm.advantage_estimator",
        lambda value, _: value not in _ESTIMATORS,
        f"is SkyRL's alone; the service computes {', '.join(_ESTIMATORS)}",
    ),
    _Refusal(
        "trainer.algorithm.loss_reduction",
        lambda value, _: value not in _REDUCTIONS,
        f"depends on how a mini-batch is cut; use {', '.join(_REDUCTIONS)}",
    ),
    _Refusal(
        "trainer.algorithm.advantage_batch_normalize",
        _is_on,
        "takes its mean over padding too; set it to False and settings={'whiten': 'batch'}, which is over trained "
        "tokens",
    ),
    _Refusal(
        "trainer.algorithm.zero_variance_filter_tol",
        lambda value, algorithm: algorithm.zero_variance_filter and value > _TOLERANCE,
        f"has no equal: the service masks groups of equal scores; use at most {_TOLERANCE}, and round the rewards in "
        "the environment",
    ),
    _Refusal(
        "trainer.algorithm.dynamic_sampling.type",
        _is_on,
        "chooses groups that the service would choose; leave it None and set "
        "trainer.algorithm.zero_variance_filter=true, which masks them",
    ),
    _Refusal(
        "trainer.algorithm.kl_ctrl.type",
        lambda value, algorithm: algorithm.use_kl_in_reward and value != "fixed",
        "changes the coefficient as it goes, and a run has one; use 'fixed'",
    ),
    _Refusal(
        "trainer.algorithm.kl_estimator_type",
        lambda value, algorithm: algorithm.use_kl_in_reward and value not in _KL_ESTIMATORS,
        f"has no equal in rewards; use {', '.join(_KL_ESTIMATORS)}",
    ),
    _Refusal(
        "trainer.critic.model.path",
        lambda value, algorithm: bool(value) and algorithm.advantage_estimator != "gae",
        "gives values that this advantage_estimator does not need; leave it None, or use advantage_estimator 'gae'",
    ),
    _Refusal(
        "generator.vision_language_generator",
        _is_on,
        "gives images, which are not taken to the workers yet; train text with this adapter",
    ),
    _Refusal(
        "trainer.fully_async.sample_full_batch",
        _is_on,
        "drops groups before they come to the service; set it to False and leave zero_variance_filter, which masks "
        "them",
    ),
    _Refusal(
        "trainer.fully_async.simulate_training",
        _is_on,
        "trains nothing, so that there is no run; use SkyRL's own trainer",
    ),
)

# What would leave a batch without a group that SkyRL sampled for it: it would wait for ever.
_OF_WORKERS = ("tag_shares", "group_timeout_s", "min_samples", "max_samples_per_prompt", "surplus", "mini_batch_unit")


def refusals(cfg: Any, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each setting that a run would not follow.

    cfg: a `SkyRLTrainConfig`. settings: the run's own, beside it.
    """
    for refusal in _REFUSALS:
        value = reduce(getattr, refusal.setting.split("."), cfg)
        if refusal.is_refused(value, cfg.trainer.algorithm):
            yield f"{refusal.setting}: {value!r} {refusal.why}"
    for name in _OF_WORKERS:
        if name in settings:
            yield (
                f"settings: {name} chooses among groups that come when they are ready, and SkyRL samples a batch at a "
                "time; leave it out"
            )
    if settings.get("stale") == "drop":
        yield "settings: stale: drop would leave a batch without a group that SkyRL sampled for it; use count or mask"
    if cfg.trainer.algorithm.use_kl_in_reward and settings.get("kl_from", "old_logprobs") != "old_logprobs":
        yield "settings: kl_from: SkyRL takes the KL of its own forward pass; leave it out"
