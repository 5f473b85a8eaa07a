"""Reports combinations of a run's settings that are allowed but probably unintended."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from gristmill_service.config.run_config import SETTINGS, RunConfig
from gristmill_service.estimators import GroupEstimator, readers


def warnings_of(config: RunConfig) -> list[str]:
    """Returns a sentence for each combination of settings that is allowed but probably unintended."""
    warnings = []
    if config.merging.joins and config.loss_reduction in ("sequence_mean", "seq_mean_token_sum_norm"):
        warnings.append(
            f"loss_reduction: {config.loss_reduction} counts rows, and merge: {config.merge} reduces their number, so "
            "the scale of the loss depends on how many steps merge; use trajectory_mean, prompt_mean or token_mean "
            "to avoid that"
        )
    if config.on_misaligned == "drop_trailing" and config.seal_order == "completion":
        warnings.append(
            "on_misaligned: drop_trailing with seal_order: completion drops the groups that finish last, which "
            "are the slowest and longest; use seal_order: admission or on_misaligned: pad to train on them"
        )
    size = config.micro_batch.size
    if config.layout == "prefix_tree" and size is not None and size < config.n_samples_per_prompt:
        warnings.append(
            f"layout: prefix_tree with micro_batch: {{size: {size}}} splits every group of "
            f"{config.n_samples_per_prompt} samples, so its prompt is repeated in several micro-batches; use "
            "micro_batch: {max_tokens: ...}, which counts distinct tokens, or a larger size"
        )
    return [*warnings, *_without_effect(config), *_about_groups(config)]


def _without_effect(config: RunConfig) -> Iterator[str]:
    """Yields a sentence for each given setting of estimators that the run's estimator does not read, also one that is
    given its default: who asks for `grpo_norm_by_std: true` expects to get it."""
    for field, setting in RunConfig.model_fields.items():
        name, value = setting.alias or field, getattr(config, field)
        estimators = readers(name)
        is_given = field in config.model_fields_set and value is not None
        if estimators and config.advantage_estimator not in estimators and is_given:
            by = " or ".join(estimators)
            yield f"{name}: {_plain(value)} has no effect: it is read with advantage_estimator: {by} alone"
    is_read = config.rloo_norm_by_std or "rloo_norm_by_std" not in config.estimator.settings
    if "grpo_epsilon" in config.model_fields_set and not is_read:
        yield f"grpo_epsilon: {config.grpo_epsilon} has no effect: it is read with rloo_norm_by_std: true alone"
    if config.grpo_std_over == "batch" and not config.grpo_norm_by_std:
        yield "grpo_std_over: batch has no effect: it is read with grpo_norm_by_std: true alone"
    if config.loss_reduction_over == "trained" and config.loss_reduction == "none":
        yield "loss_reduction_over: trained has no effect: it is read with a loss_reduction other than none alone"
    kl = config.kl_in_reward
    if config.kl_from != SETTINGS["kl_from"].default and (kl is None or kl.estimator is None):
        yield f"kl_from: {config.kl_from} has no effect: it is read only with kl_in_reward: {{estimator: ...}}"


def _plain(value: object) -> object:
    """Returns a setting's value as it is written."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    return str(value).lower() if isinstance(value, bool) else value


def _about_groups(config: RunConfig) -> Iterator[str]:
    micro_batches, rows = config.dp_size * (config.micro_batch.count or 0), _most_rows(config)
    if rows is not None and micro_batches > rows:
        yield (
            f"micro_batch.count: {config.micro_batch.count} on dp_size: {config.dp_size} ranks gives {micro_batches} "
            f"micro-batches, but a mini-batch has at most {rows} rows, so some micro-batches contain only padding; "
            "lower the count or enlarge the mini-batches"
        )
    if config.tag_shares and config.tag_timeout_s is None:
        yield (
            "tag_shares without tag_timeout_s: if no more groups of a tag arrive, no batch is sealed until the run is "
            "finished; set tag_timeout_s"
        )
    several = config.most_samples > 1 and config.n_samples_per_prompt == 1
    if several and isinstance(config.estimator, GroupEstimator):
        yield (
            f"max_samples_per_prompt: {config.max_samples_per_prompt} with n_samples_per_prompt: 1: a group of one "
            "is scored without a baseline, also one that is left of several, and the others relative to their "
            "group; use n_samples_per_prompt: 2 or more, or advantage_estimator: none"
        )


def _most_rows(config: RunConfig) -> int | None:
    """Returns the maximum number of rows of a mini-batch; None if trajectories have several steps."""
    if config.step_wise:
        return None
    return max(map(config.mini_batch_size, config.models)) * config.most_samples
