"""Which settings of a run do not go together: every rule that can be decided before a rollout is seen."""

from __future__ import annotations

from gristmill.errors import InvalidArgumentError
from gristmill_service.config import column_rules, group_rules
from gristmill_service.config.run_config import MERGE_MODES, RunConfig

_MOST_PADDED_TO = 1 << 17


def check(config: RunConfig) -> None:
    """Raises InvalidArgumentError for settings that do not go together."""
    column_rules.check_kl(config)
    column_rules.check_written(config)
    column_rules.check_tree(config)
    _check_micro_batch(config)
    _check_mini_batches(config)
    _check_padding(config)
    _check_alignment(config)
    _check_balance(config)
    group_rules.check_sizes(config)
    group_rules.check_tags(config)
    if config.merging.joins and not config.step_wise:
        raise InvalidArgumentError(
            f"merge: {config.merge} joins the steps of a trajectory, but step_wise is false (one step each); "
            "set step_wise: true or merge: none"
        )
    if config.retokenised_tail and not config.merging.joins:
        modes = " or ".join(name for name, mode in MERGE_MODES.items() if mode.joins)
        raise InvalidArgumentError(
            f"retokenised_tail: {config.retokenised_tail} has an effect only where steps merge, and merge is "
            f"{config.merge}; set merge: {modes}, or leave retokenised_tail out"
        )
    if config.loss_reduction == "seq_mean_token_sum_norm" and config.max_seq_len is None:
        raise InvalidArgumentError("loss_reduction: seq_mean_token_sum_norm divides by max_seq_len; set max_seq_len")
    if config.min_samples > config.n_samples_per_prompt:
        raise InvalidArgumentError(
            f"min_samples: {config.min_samples} exceeds n_samples_per_prompt: {config.n_samples_per_prompt}; lower it"
        )
    if config.stale != "count" and config.max_staleness is None:
        raise InvalidArgumentError(f"stale: {config.stale} needs a bound; set max_staleness")


def _check_micro_batch(config: RunConfig) -> None:
    given = config.micro_batch.model_dump(exclude_none=True, exclude={"full"})
    if len(given) != 1:
        raise InvalidArgumentError(
            f"micro_batch: give exactly one of size (rows), max_tokens and count (of each rank), got "
            f"{' and '.join(given) or 'none'}"
        )
    if config.micro_batch.count is not None:
        group_rules.check_micro_batch_count(config, config.micro_batch.count)
    if config.micro_batch.full:
        group_rules.check_full_micro_batches(config, config.micro_batch.size)


def _check_mini_batches(config: RunConfig) -> None:
    for model in config.models:
        size, name = config.mini_batch_size(model), f"{model}_mini_batch_size"
        if config.mini_batch_unit == "sequence":
            if size % config.dp_size:
                raise InvalidArgumentError(
                    f"{name}: {size} rows is not a multiple of dp_size: {config.dp_size}, so the ranks could not have "
                    "equally many; change one of them"
                )
        elif config.train_batch_size % size:
            raise InvalidArgumentError(
                f"train_batch_size: {config.train_batch_size} is not a multiple of {name}: {size}; change one of them"
            )
    if config.mini_batch_unit == "sequence" and (config.micro_batch.size is None or config.on_misaligned != "pad"):
        raise InvalidArgumentError(
            "mini_batch_unit: sequence works with micro_batch: {size: ...} and on_misaligned: pad only; "
            "change those, or use mini_batch_unit: prompt"
        )


def _check_padding(config: RunConfig) -> None:
    """A row that is padding costs as much work as one that is not."""
    each = config.micro_batch
    least = max(config.align_to, config.dp_size * (each.count or 1)) * (each.size if each.full and each.size else 1)
    if least > _MOST_PADDED_TO:
        raise InvalidArgumentError(
            f"every mini-batch would be padded to at least {least} rows, and {_MOST_PADDED_TO} are the most; this is "
            "dp_size × microbatch_group_size (with VPP) or × micro_batch.count, and × micro_batch.size with full: "
            "lower one of these"
        )


def _check_alignment(config: RunConfig) -> None:
    if config.on_misaligned == "drop_trailing" and config.critic_mini_batch_size is not None:
        raise InvalidArgumentError(
            "on_misaligned: drop_trailing is refused with a critic: policy and critic mini-batches would drop "
            "different groups; use pad, or leave critic_mini_batch_size out"
        )
    rows = config.policy_mini_batch_size * config.most_samples
    samples = "n_samples_per_prompt" if config.max_samples_per_prompt is None else "max_samples_per_prompt"
    if not config.step_wise and config.on_misaligned != "pad" and rows < config.align_to:
        raise InvalidArgumentError(
            f"on_misaligned: {config.on_misaligned} can never align: a mini-batch has policy_mini_batch_size × "
            f"{samples} = {rows} rows, and micro-batches come in multiples of {config.align_to} "
            "(dp_size × microbatch_group_size under VPP); use on_misaligned: pad or larger mini-batches"
        )


def _check_balance(config: RunConfig) -> None:
    if config.balance == "flops" and config.flops is None:
        raise InvalidArgumentError(
            "balance: flops needs flops: {linear: ..., quadratic: ...}, as a row of n tokens costs linear·n + "
            "quadratic·n²; for a dense transformer linear is 2 × parameters and quadratic 2 × layers × hidden size "
            "(PaLM, arXiv:2204.02311, appendix B); set flops, or balance: tokens"
        )
    if config.flops is not None and config.flops.linear == 0 and config.flops.quadratic == 0:
        raise InvalidArgumentError("flops: linear and quadratic are both 0, so every row would cost nothing; set one")
