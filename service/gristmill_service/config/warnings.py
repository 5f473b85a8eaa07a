"""What a run's settings allow and its creator probably does not mean."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill_service.config.run_config import SETTINGS, RunConfig
from gristmill_service.estimators import GroupEstimator, readers


def warnings_of(config: RunConfig) -> list[str]:
    """Returns a sentence for each thing that is allowed but probably not meant. A run's creator is told once."""
    found = []
    if config.merging.joins and config.loss_reduction in ("sequence_mean", "seq_mean_token_sum_norm"):
        found.append(
            f"loss_reduction: {config.loss_reduction} counts rows, and merge: {config.merge} makes fewer of them, so "
            "the scale of the loss depends on how many steps merge; trajectory_mean, prompt_mean and token_mean "
            "do not"
        )
    if config.on_misaligned == "drop_trailing" and config.seal_order == "completion":
        found.append(
            "on_misaligned: drop_trailing with seal_order: completion drops the groups that finished last, which "
            "are the slowest and longest; use seal_order: admission or on_misaligned: pad to keep them"
        )
    size = config.micro_batch.size
    if config.layout == "prefix_tree" and size is not None and size < config.n_samples_per_prompt:
        found.append(
            f"layout: prefix_tree with micro_batch: {{size: {size}}} cuts every group of "
            f"{config.n_samples_per_prompt} samples, so that its prompt stands in several micro-batches; use "
            "micro_batch: {max_tokens: ...}, which counts distinct tokens, or a larger size"
        )
    found += _without_effect(config)
    found += _about_groups(config)
    return found


def _without_effect(config: RunConfig) -> Iterator[str]:
    """Yields a sentence for each setting of estimators that the run's own does not read."""
    for field, setting in RunConfig.model_fields.items():
        name, value = setting.alias or field, getattr(config, field)
        estimators = readers(name)
        if estimators and config.advantage_estimator not in estimators and value != setting.default:
            by = " or ".join(estimators)
            yield f"{name}: {value} has no effect: it is read with advantage_estimator: {by} alone"
    kl = config.kl_in_reward
    if config.kl_from != SETTINGS["kl_from"].default and (kl is None or kl.estimator is None):
        yield f"kl_from: {config.kl_from} has no effect: it is read with kl_in_reward: {{estimator: ...}} alone"


def _about_groups(config: RunConfig) -> Iterator[str]:
    micro_batches, rows = config.dp_size * (config.micro_batch.count or 0), _most_rows(config)
    if rows is not None and micro_batches > rows:
        yield (
            f"micro_batch.count: {config.micro_batch.count} on dp_size: {config.dp_size} ranks makes {micro_batches} "
            f"micro-batches, and a mini-batch has {rows} rows at most, so that the others are padding alone; lower "
            "the count or enlarge the mini-batches"
        )
    if config.tag_shares and config.tag_timeout_s is None:
        yield (
            "tag_shares without tag_timeout_s: where a tag stops coming no batch is sealed any more until the run "
            "is finished; set tag_timeout_s"
        )
    several = config.most_samples > 1 and config.n_samples_per_prompt == 1
    if several and isinstance(config.estimator, GroupEstimator):
        yield (
            f"max_samples_per_prompt: {config.max_samples_per_prompt} with n_samples_per_prompt: 1: a group of one "
            "is scored without a baseline, also one that is left of several, and the others relative to their "
            "group; use n_samples_per_prompt: 2 or more, or advantage_estimator: none"
        )


def _most_rows(config: RunConfig) -> int | None:
    """The most rows that a mini-batch can have; None where trajectories have steps."""
    if config.step_wise:
        return None
    return max(map(config.mini_batch_size, config.models)) * config.most_samples
