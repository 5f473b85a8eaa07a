"""The settings of a run, as slime's arguments mean them. What has no equal is refused, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from gristmill._wire.column_spec import ColumnSpec, specs_of
from gristmill.adapters.slime.rank_data import ROUTED_EXPERTS, TEACHER_LOGPROBS
from gristmill.errors import InvalidArgumentError

ADVANTAGE_FUNCTION = "gristmill.adapters.slime.advantages"
"""What `--custom-advantage-function-path` names, where advantages differ within a row."""

_OF_ROWS = ("grpo", "rloo", "maxrl")
"""Estimators whose advantages are the same on all tokens of a row."""

# What leaves a batch without a group that slime generated, or asks for one that it did not: it would wait for ever.
_OF_WORKERS = ("tag_shares", "group_timeout_s", "min_samples", "max_samples_per_prompt", "surplus", "max_staleness")


@dataclass(frozen=True)
class Options:
    """`gristmill` of the file that `--custom-config-path` names.

    address, run: the service's, and the run's name. rollouts: who samples: `slime`, whose rollout function's samples
    are sent to the run, or `workers`, which send their own. settings: of the run, beyond what slime's arguments give.
    ignore: fields of slime's samples that are not to be sent, though slime's training may use them.
    """

    address: str
    run: str
    rollouts: Literal["slime", "workers"] = "slime"
    settings: Mapping[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: Any) -> Options:
        """Raises InvalidArgumentError naming what is missing or unknown."""
        given = getattr(args, "gristmill", None)
        if not isinstance(given, Mapping):
            raise InvalidArgumentError(
                "--custom-config-path: its file has no mapping `gristmill`; give it one with address and run"
            )
        known = [each.name for each in fields(cls)]
        if unknown := sorted(given.keys() - set(known)):
            raise InvalidArgumentError(f"gristmill: unknown option {unknown[0]!r}; known are {', '.join(known)}")
        if missing := [name for name in known[:2] if name not in given]:
            raise InvalidArgumentError(f"gristmill: {' and '.join(missing)} must be given")
        made = cls(**{**given, "ignore": tuple(given.get("ignore", ()))})
        if made.rollouts not in ("slime", "workers"):
            raise InvalidArgumentError(f"gristmill: rollouts is {made.rollouts!r}; give slime or workers")
        return made


def run_settings(args: Any, parallel: Mapping[str, int], options: Options) -> dict[str, Any]:
    """The settings with which the run is created.

    args: slime's. parallel: `dp_size`, `cp_size`, `vpp_size` and `microbatch_group_size_per_vp_stage`, as slime's train
    actors tell them.
    Raises InvalidArgumentError for what the service cannot do as slime does it, and for settings that contradict.
    """
    given = dict(options.settings)
    columns = [*_columns(args), *given.pop("columns", ())]
    derived = _derived(args, parallel)
    for name in given:
        if name in derived:
            raise InvalidArgumentError(
                f"gristmill: settings: {name} follows from slime's arguments, where it is {derived[name]!r}; change it "
                "there"
            )
    settings = derived | _defaults(args) | given | ({"columns": columns} if columns else {})
    for is_wrong, message in _rules(args, settings, options):
        if is_wrong:
            raise InvalidArgumentError(message)
    return settings


def image_columns(settings: Mapping[str, Any]) -> list[str]:
    """The columns that become `multimodal_train_inputs`."""
    return [column.name for column in columns_of(settings) if column.scope == "items"]


def columns_of(settings: Mapping[str, Any]) -> tuple[ColumnSpec, ...]:
    return specs_of(settings.get("columns", ()))


def _derived(args: Any, parallel: Mapping[str, int]) -> dict[str, Any]:
    return {
        "train_batch_size": args.rollout_batch_size,
        "n_samples_per_prompt": args.n_samples_per_prompt,
        "policy_mini_batch_size": args.global_batch_size // args.n_samples_per_prompt,
        "micro_batch": {"max_tokens": args.max_tokens_per_gpu}
        if args.use_dynamic_batch_size
        else {"size": args.micro_batch_size},
        "dp_size": parallel["dp_size"],
        "cp_size": parallel["cp_size"],
        "vpp_size": parallel["vpp_size"],
        "microbatch_group_size": parallel["microbatch_group_size_per_vp_stage"],
        "layout": "packed",
        # slime divides by each rollout's trained tokens, or by those of the step, itself.
        "loss_reduction": "none",
    }


def _defaults(args: Any) -> dict[str, Any]:
    """What `settings` may change."""
    return {
        "step_wise": True,
        "advantage_estimator": "grpo",
        "grpo_norm_by_std": bool(args.grpo_std_normalization),
        "balance": "tokens" if args.balance_data else "none",
        # Those between two checkpoints are held, the next one is made, and one more is sampled.
        "max_buffered_batches": max(4, (args.save_interval or 0) + 2),
    }


def _columns(args: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if getattr(args, "use_rollout_routing_replay", False):
        shape = [args.num_layers, args.moe_router_topk]
        found.append({"name": ROUTED_EXPERTS, "dtype": "int32", "scope": "token", "shape": shape})
    if getattr(args, "use_opd", False) and args.opd_type == "sglang":
        found.append({"name": TEACHER_LOGPROBS, "dtype": "float32", "scope": "response"})
    return found


def _rules(args: Any, settings: Mapping[str, Any], options: Options) -> Iterator[tuple[bool, str]]:
    """What is refused, whether it is so, and the words."""
    yield (
        args.advantage_estimator not in ("grpo", "gspo", "cispo"),
        f"--advantage-estimator is {args.advantage_estimator}, and gristmill computes advantages: give grpo, gspo or "
        "cispo, which say the loss, and the estimator as settings: {advantage_estimator: ...}",
    )
    yield (args.use_critic, "--use-critic: slime's critic is trained on its own batches; not supported")
    yield (
        not args.rewards_normalization,
        "--disable-rewards-normalization: advantages would be the rewards, which no estimator gives; leave it out",
    )
    yield (
        args.normalize_advantages,
        "--normalize-advantages would change what gristmill computed; use settings: {whiten: batch}",
    )
    for name in ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"):
        yield (
            getattr(args, name) is not None,
            f"--{name.replace('_', '-')}: rewards and train data are gristmill's; leave it out",
        )
    yield (
        settings["advantage_estimator"] not in _OF_ROWS and args.custom_advantage_function_path != ADVANTAGE_FUNCTION,
        f"advantage_estimator is {settings['advantage_estimator']}, whose advantages are of tokens; give "
        f"--custom-advantage-function-path {ADVANTAGE_FUNCTION}",
    )
    yield (
        args.global_batch_size % args.n_samples_per_prompt != 0,
        f"--global-batch-size is {args.global_batch_size} and --n-samples-per-prompt {args.n_samples_per_prompt}; a "
        "training step has whole prompt groups, give a multiple",
    )
    yield (
        getattr(args, "rollout_top_p", 1.0) != 1.0,
        "--rollout-top-p: the tokens that top-p kept are not carried; leave it at 1",
    )
    yield (args.log_passrate, "--log-passrate wants one row a sample; read pass@n in the plan and on the page")
    yield (args.debug_rollout_only, "--debug-rollout-only trains nothing; run slime without gristmill for it")
    yield (
        args.save_interval is not None and not args.rollout_global_dataset,
        "--disable-rollout-global-dataset: slime then does not tell when a checkpoint is saved; leave it out, or "
        "--save-interval",
    )
    yield (settings.get("update_epochs_per_batch", 1) != 1, "settings: update_epochs_per_batch: slime makes one pass")
    yield ("critic_mini_batch_size" in settings, "settings: critic_mini_batch_size: slime's critic is not supported")
    for name in _OF_WORKERS:
        yield (
            options.rollouts == "slime" and name in settings,
            f"settings: {name}: slime samples as many groups as a batch has, and would wait for others; it is for "
            "rollouts: workers",
        )
    yield (
        options.rollouts == "slime" and settings.get("zero_variance_filter") == "replace",
        "settings: zero_variance_filter: replace needs more groups than slime samples; use mask, or slime's "
        "--dynamic-sampling-filter-path",
    )
