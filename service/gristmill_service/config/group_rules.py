"""Rules of a run's configuration that concern groups, and how many micro-batches are made of them."""

from __future__ import annotations

from fractions import Fraction

from gristmill.errors import InvalidArgumentError
from gristmill_service.config.run_config import RunConfig
from gristmill_service.validation_messages import shown

# Of a mini-batch, where `micro_batch.count` asks for them: each has a row, if only a padding row.
MOST_MICRO_BATCHES = 1 << 20
# Tags are labels of metrics.
MOST_TAGS = 64


def check_sizes(config: RunConfig) -> None:
    if config.most_samples < config.n_samples_per_prompt:
        raise InvalidArgumentError(
            f"max_samples_per_prompt: {config.max_samples_per_prompt} is less than n_samples_per_prompt: "
            f"{config.n_samples_per_prompt}, which groups have unless they say otherwise; raise it or leave it out"
        )


def check_micro_batch_count(config: RunConfig, count: int) -> None:
    if count * config.dp_size > MOST_MICRO_BATCHES:
        raise InvalidArgumentError(
            f"micro_batch.count: {count} on dp_size: {config.dp_size} ranks makes {count * config.dp_size} "
            f"micro-batches of every mini-batch, and {MOST_MICRO_BATCHES} are the most; lower the count"
        )
    if config.vpp_size > 1 and count % config.microbatch_group_size:
        raise InvalidArgumentError(
            f"micro_batch.count: {count} is not a multiple of microbatch_group_size: {config.microbatch_group_size}, "
            f"which vpp_size: {config.vpp_size} asks for; change one of them"
        )
    if config.on_misaligned != "pad":
        raise InvalidArgumentError(
            f"micro_batch.count: {count} is always reached, with padding rows where there are too few, so that "
            f"on_misaligned: {config.on_misaligned} has nothing to decide; use on_misaligned: pad"
        )


def check_full_micro_batches(config: RunConfig, size: int | None) -> None:
    if size is None:
        raise InvalidArgumentError(
            "micro_batch.full: true fills micro-batches up to micro_batch.size rows, which is not given; give size, or "
            "leave full out"
        )
    for model in config.models:
        rows = config.mini_batch_size(model) // config.dp_size
        if config.mini_batch_unit == "sequence" and rows % size:
            raise InvalidArgumentError(
                f"micro_batch.full: true asks for micro-batches of {size} rows, and with mini_batch_unit: sequence "
                f"each rank has {rows} rows of every {model} mini-batch ({model}_mini_batch_size / dp_size), no "
                f"multiple of it; change {model}_mini_batch_size or micro_batch.size, or leave full out"
            )


def check_tags(config: RunConfig) -> None:
    if config.tag_timeout_s is not None and not config.tag_shares:
        raise InvalidArgumentError(
            f"tag_timeout_s: {config.tag_timeout_s:g} says how long a batch waits for tag_shares, and there are none; "
            "set tag_shares or leave it out"
        )
    if len(config.tag_shares) > MOST_TAGS:
        raise InvalidArgumentError(
            f"tag_shares names {len(config.tag_shares)} tags, and a run has {MOST_TAGS} at most; name fewer"
        )
    total = sum((Fraction(repr(share.min)) for share in config.tag_shares.values()), Fraction(0))
    if total > 1:
        raise InvalidArgumentError(
            f"tag_shares: the shares of {', '.join(map(shown, config.tag_shares))} are {float(total):g} together, more "
            "than all of a batch; lower them"
        )
    groups = config.tag_groups(config.train_batch_size)
    if sum(groups.values()) > config.train_batch_size:
        raise InvalidArgumentError(
            f"tag_shares: {' + '.join(f'{count} of {shown(tag)}' for tag, count in groups.items())} whole groups are "
            f"more than train_batch_size: {config.train_batch_size}; lower the shares or enlarge the batch"
        )
