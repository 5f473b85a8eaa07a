"""The settings of a run, as a `GRPOConfig` means them. What has no equal there is refused, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import Any

from gristmill.adapters.trl._options import Gristmill
from gristmill.errors import InvalidArgumentError

# TRL's normalisers: by all tokens of a mini-batch, and by its rows.
TOKEN_MEANS = frozenset({"dapo", "cispo", "vespo"})
ROW_MEANS = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})

_TRL_EPSILON = 1e-4
"""What TRL adds to the standard deviation of a group's rewards."""

# What would leave a batch without a group that TRL generated, or ask for one that it did not: it would wait for ever.
_OF_WORKERS = ("tag_shares", "group_timeout_s", "min_samples", "max_samples_per_prompt", "surplus", "max_staleness")


def run_settings(args: Any, gristmill: Gristmill, pad_token_id: int) -> dict[str, Any]:
    """The settings with which a trainer of these arguments creates its run, for `RolloutClient.create_run`.

    args: a `GRPOConfig`. pad_token_id: the tokenizer's.
    Raises InvalidArgumentError for what the service cannot do as TRL does it, and for settings that contradict.
    """
    check(args, gristmill)
    derived = _derived(args, gristmill, pad_token_id)
    defaults: dict[str, Any] = {
        "micro_batch": {"size": args.per_device_train_batch_size},
        "pad_width": "micro_batch",
    }
    if gristmill.rollouts == "trainer" and args.save_strategy == "steps" and args.save_steps >= 1:
        # Those since the last checkpoint are kept, and one more is generated.
        defaults["max_buffered_batches"] = int(args.save_steps) // steps_a_batch(args) + 2
    more = dict(gristmill.settings)
    if columns := [*derived.get("columns", ()), *more.pop("columns", ())]:
        derived["columns"] = columns
    for name in more:
        if name in derived:
            raise InvalidArgumentError(
                f"settings: {name} follows from GRPOConfig, where it is {derived[name]!r}; change it there"
            )
    return derived | defaults | more


def check(args: Any, gristmill: Gristmill) -> None:
    """Raises InvalidArgumentError for what cannot be done as TRL does it, saying what can."""
    for is_wrong, message in _rules(args, gristmill):
        if is_wrong:
            raise InvalidArgumentError(message)


def prompts_a_step(args: Any) -> int:
    """Prompt groups of one optimizer step over all ranks."""
    rows: int = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    return rows // int(args.num_generations)


def prompts_a_generation(args: Any) -> int:
    return int(args.generation_batch_size // args.num_generations)


def steps_a_batch(args: Any) -> int:
    """Optimizer steps between two weight updates of the sampler."""
    return prompts_a_generation(args) // prompts_a_step(args) * int(args.num_iterations)


def _rules(args: Any, gristmill: Gristmill) -> Iterator[tuple[bool, str]]:
    """What is refused, whether it is so, and the words."""
    own = gristmill.rollouts == "trainer"
    yield (
        args.loss_type not in TOKEN_MEANS | ROW_MEANS,
        f"loss_type: {args.loss_type!r} divides by the tokens of each micro-batch, so that the loss would depend on "
        "how the mini-batch is cut; use 'dapo', which divides by those of the whole mini-batch",
    )
    yield (
        args.scale_rewards not in ("group", "none"),
        f"scale_rewards: {args.scale_rewards!r} has no equal: advantages are made group by group; use 'group' or "
        "'none'",
    )
    yield (
        args.multi_objective_aggregation != "sum_then_normalize",
        f"multi_objective_aggregation: {args.multi_objective_aggregation!r} has no equal: a row has one reward; use "
        "'sum_then_normalize'",
    )
    yield from _sizes(args)
    yield (
        not own and args.use_vllm,
        "use_vllm: True starts an engine for TRL's own generation, and the rollouts come from workers; set it to False",
    )
    yield (
        not own and args.max_steps < 1,
        "max_steps is not set: rollouts come from workers, so that no data set says how long training is; set it",
    )
    reduction = gristmill.settings.get("loss_reduction", "none")
    entropy = args.entropy_coef or args.use_adaptive_entropy
    yield (
        reduction != "none" and (args.loss_type not in TOKEN_MEANS or args.beta != 0 or bool(entropy)),
        f"settings: loss_reduction: {reduction} is in the advantages, where loss_type: {args.loss_type!r}, beta: "
        f"{args.beta} and an entropy bonus do not see it; use loss_type: 'dapo', beta: 0 and no bonus, or leave it out",
    )
    yield (
        any(column.get("source") == "trainer" for column in gristmill.settings.get("columns", ())),
        "settings: columns of source: trainer are those of log-probabilities, which the adapter declares and writes; "
        "have rows bring the others",
    )
    for name in _OF_WORKERS:
        yield (
            own and name in gristmill.settings,
            f"settings: {name} is of runs whose rollouts come when they are ready, and TRL generates a batch at a "
            "time; leave it out, or let workers generate (rollouts='workers')",
        )
    yield (
        own and gristmill.settings.get("zero_variance_filter") == "replace",
        "settings: zero_variance_filter: replace takes other groups in, and TRL generates a batch at a time; use mask, "
        "or let workers generate (rollouts='workers')",
    )


def _sizes(args: Any) -> Iterator[tuple[bool, str]]:
    rows = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
    size, generation = args.num_generations, prompts_a_generation(args)
    yield (
        bool(rows % size),
        f"an optimizer step has {rows} rows (per_device_train_batch_size × ranks × gradient_accumulation_steps) and a "
        f"prompt num_generations: {size}; mini-batches are of whole prompts: set gradient_accumulation_steps so that "
        f"the step has a multiple of {lcm(rows, size)} rows",
    )
    step = rows // size or 1
    yield (
        bool(generation % step),
        f"steps_per_generation: {args.steps_per_generation} is no multiple of gradient_accumulation_steps: "
        f"{args.gradient_accumulation_steps}, so that a generation ends within a step; make it one, as TRL "
        "does by itself",
    )


def _derived(args: Any, gristmill: Gristmill, pad_token_id: int) -> dict[str, Any]:
    """What GRPOConfig says in words of its own."""
    step = prompts_a_step(args)
    found: dict[str, Any] = {
        "train_batch_size": prompts_a_generation(args),
        "policy_mini_batch_size": step,
        "mini_batch_unit": "prompt",
        "n_samples_per_prompt": args.num_generations,
        "update_epochs_per_batch": args.num_iterations,
        "grpo_norm_by_std": args.scale_rewards == "group",
        "grpo_epsilon": _TRL_EPSILON,
        "dp_size": args.world_size,
        "layout": "left_padded",
        "pad_token_id": pad_token_id,
        "pad_to_multiple_of": args.pad_to_multiple_of or 1,
    }
    if args.mask_truncated_completions:
        found["overlong_filter"] = ["length"]
    if gristmill.rollouts == "trainer":
        # Batches take what TRL generated together, in its order.
        found["seal_order"] = "admission"
    source = "rollout" if gristmill.rollouts == "trainer" else "trainer"
    if names := logprob_columns(args, gristmill):
        column = {"dtype": "float32", "scope": "response", "source": source}
        found["columns"] = [{"name": name} | column for name in names]
    return found


def logprob_columns(args: Any, gristmill: Gristmill) -> list[str]:
    """The columns that the loss needs besides the rows' own, under TRL's names.

    They come with the rows that TRL generates, and are written back for those of workers.
    """
    is_corrected = args.use_vllm and args.vllm_importance_sampling_correction
    if gristmill.rollouts == "trainer":
        # TRL's own condition: generations that do not end with an optimizer step are trained by other weights.
        every = args.steps_per_generation * args.num_iterations
        needs_old = args.gradient_accumulation_steps % every != 0 or is_corrected
    else:
        needs_old = gristmill.old_logprobs == "trainer" and steps_a_batch(args) > 1
    needed = {
        "old_per_token_logps": needs_old,
        "importance_sampling_ratio": is_corrected,
        "ref_per_token_logps": args.beta != 0,
    }
    return [name for name, is_needed in needed.items() if is_needed]


def loss_columns(args: Any, gristmill: Gristmill) -> dict[str, str]:
    """By TRL's name the shard's of each column that the loss reads beside tokens, masks and advantages."""
    found = {name: name for name in logprob_columns(args, gristmill)}
    sampled = []
    if gristmill.rollouts == "workers" and gristmill.old_logprobs == "rollout":
        sampled.append("old_per_token_logps")
    if args.off_policy_mask_threshold is not None:
        sampled.append("sampling_per_token_logps")
    return found | dict.fromkeys(sampled, "rollout_logprobs")
