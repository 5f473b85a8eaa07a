"""What a run's settings allow and its creator probably does not mean."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill_service.config.run_config import SETTINGS, RunConfig


def warnings_of(config: RunConfig) -> list[str]:
    """Returns a sentence for each thing that is allowed but probably not meant. A run's creator is told once."""
    found = []
    if config.merge != "none" and config.loss_reduction in ("sequence_mean", "seq_mean_token_sum_norm"):
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
    estimator, kl = config.advantage_estimator, config.kl_in_reward
    per_token = estimator in ("gae", "reinforce++")
    checks = (
        ("gamma", config.gamma, per_token, "advantage_estimator: gae or reinforce++"),
        ("lambda", config.lambda_, estimator == "gae", "advantage_estimator: gae"),
        ("whiten", config.whiten, per_token, "advantage_estimator: gae or reinforce++"),
        ("grpo_epsilon", config.grpo_epsilon, estimator == "grpo", "advantage_estimator: grpo"),
        ("kl_from", config.kl_from, kl is not None and kl.estimator is not None, "kl_in_reward: {estimator: ...}"),
    )
    for name, value, is_read, by in checks:
        if value != SETTINGS[name].default and not is_read:
            yield f"{name}: {value} has no effect: it is read with {by} alone"


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
    if several and config.advantage_estimator in ("grpo", "rloo", "maxrl"):
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
