"""Rules between the settings of a run: conflicts are rejected."""

from __future__ import annotations

from fractions import Fraction

from gristmill._wire.column_spec import CP_TENSORS, LOSS_WEIGHT, ColumnScope, ColumnSpec, by_name
from gristmill._wire.context_parallel import pieces_of
from gristmill.errors import InvalidArgumentError
from gristmill_service.config.run_config import MERGE_MODES, RunConfig
from gristmill_service.estimators import GroupEstimator, RunningEstimator, TokenEstimator
from gristmill_service.validation_messages import shown

MOST_PADDED_TO = 1 << 17
# The limit per mini-batch with `micro_batch.count`. Each micro-batch contains at least a padding row.
_MOST_MICRO_BATCHES = 1 << 20
# Limited because each tag is a label value of metrics.
MOST_TAGS = 64


def check(config: RunConfig) -> None:
    """Raises InvalidArgumentError for settings that conflict."""
    _check_step_groups(config)
    _check_running(config)
    _check_columns(config)
    _check_written(config)
    _check_tree(config)
    _check_micro_batch(config)
    _check_mini_batches(config)
    _check_padding(config)
    _check_row_padding(config)
    _check_cp_shards(config)
    _check_alignment(config)
    _check_balance(config)
    _check_tags(config)
    if config.merging.joins and not config.step_wise:
        raise InvalidArgumentError(
            f"merge: {config.merge} joins the steps of a trajectory, but with step_wise: false a trajectory has one "
            "step; set step_wise: true or merge: none"
        )
    if config.retokenized_tail and not config.merging.joins:
        modes = " or ".join(name for name, mode in MERGE_MODES.items() if mode.joins)
        raise InvalidArgumentError(
            f"retokenized_tail: {config.retokenized_tail} has no effect with merge: {config.merge}, which does not "
            f"merge steps; set merge: {modes}, or leave retokenized_tail out"
        )
    if config.loss_reduction == "seq_mean_token_sum_norm" and config.max_seq_len is None:
        raise InvalidArgumentError("loss_reduction: seq_mean_token_sum_norm needs max_seq_len; set max_seq_len")
    if config.most_samples < config.n_samples_per_prompt:
        raise InvalidArgumentError(
            f"max_samples_per_prompt: {config.max_samples_per_prompt} is less than n_samples_per_prompt: "
            f"{config.n_samples_per_prompt}, the default size of a group; raise it or leave it out"
        )
    if config.min_samples > config.n_samples_per_prompt:
        raise InvalidArgumentError(
            f"min_samples: {config.min_samples} exceeds n_samples_per_prompt: {config.n_samples_per_prompt}; lower it"
        )
    estimator = config.estimator
    if config.whiten == "trajectories" and (estimator.compares_steps or isinstance(estimator, TokenEstimator)):
        raise InvalidArgumentError(
            f"whiten: trajectories needs one advantage per trajectory, and advantage_estimator: {estimator.name} "
            f"computes one per {'step' if estimator.compares_steps else 'token'}; use whiten: batch or mini_batch"
        )
    compares_scores = isinstance(estimator, GroupEstimator | RunningEstimator) and not estimator.reads_components
    if config.length_penalty is not None and not compares_scores:
        raise InvalidArgumentError(
            f"length_penalty changes scores, and advantage_estimator: {estimator.name} is not computed from "
            "scores; leave length_penalty out, or use another estimator"
        )
    if config.stale != "count" and config.max_staleness is None:
        raise InvalidArgumentError(f"stale: {config.stale} needs max_staleness, which is not set; set max_staleness")


def _check_running(config: RunConfig) -> None:
    if not isinstance(config.estimator, RunningEstimator):
        return
    if config.zero_variance_filter is not None:
        raise InvalidArgumentError(
            f"zero_variance_filter: {config.zero_variance_filter} leaves out groups of equal scores, and "
            f"advantage_estimator: {config.advantage_estimator} compares scores with running baselines, also where a "
            "group has one trajectory of each agent; leave zero_variance_filter out"
        )
    kl = config.kl_in_reward
    read = set() if kl is None else {config.kl_from, "ref_logprobs", kl.column}
    awaited = [column.name for column in config.written_columns if column.name in read]
    if awaited:
        raise InvalidArgumentError(
            f"advantage_estimator: {config.advantage_estimator} reads scores in the order in which batches are sealed, "
            f"and with kl_in_reward they wait for the column {awaited[0]}, which trainers write in any order; let "
            "rollouts send the column, or leave kl_in_reward out"
        )


def _check_step_groups(config: RunConfig) -> None:
    name, estimator = config.advantage_estimator, config.estimator
    if not estimator.compares_steps:
        return
    if config.trajectory_score != "sum":
        raise InvalidArgumentError(
            f"trajectory_score: {config.trajectory_score} is not what advantage_estimator: {name} compares, which is "
            "the sum over all steps; set trajectory_score: sum"
        )
    if config.kl_in_reward is not None:
        raise InvalidArgumentError(
            f"kl_in_reward changes rewards, and advantage_estimator: {name} compares steps by the rewards that were "
            "sent; leave kl_in_reward out, or use another estimator"
        )


def _check_micro_batch(config: RunConfig) -> None:
    limits = config.micro_batch.model_dump(exclude_none=True, exclude={"full"})
    if len(limits) != 1:
        raise InvalidArgumentError(
            f"micro_batch: expected exactly one limit, got {' and '.join(limits) or 'none'}; set one of size (rows), "
            "max_tokens, count (micro-batches per rank)"
        )
    if config.micro_batch.count is not None:
        _check_micro_batch_count(config, config.micro_batch.count)
    if config.micro_batch.full:
        _check_full_micro_batches(config, config.micro_batch.size)


def _check_mini_batches(config: RunConfig) -> None:
    for model in config.models:
        size, name = config.mini_batch_size(model), f"{model}_mini_batch_size"
        if config.mini_batch_unit == "sequence":
            if size % config.dp_size:
                raise InvalidArgumentError(
                    f"{name}: {size} rows is not a multiple of dp_size: {config.dp_size}, and each rank needs the same "
                    "number of rows; change one of them"
                )
        elif config.train_batch_size % size:
            raise InvalidArgumentError(
                f"train_batch_size: {config.train_batch_size} is not a multiple of {name}: {size}; change one of them"
            )
    if config.mini_batch_unit == "sequence" and (config.micro_batch.size is None or config.on_misaligned != "pad"):
        raise InvalidArgumentError(
            "mini_batch_unit: sequence requires micro_batch: {size: ...} and on_misaligned: pad; set both, or prompt"
        )


def _check_padding(config: RunConfig) -> None:
    """Rejects mini-batches with too many padding rows. A padding row costs as much work as a real row."""
    if config.least_rows > MOST_PADDED_TO:
        raise InvalidArgumentError(
            f"every mini-batch would be padded to at least {config.least_rows} rows, and the limit is "
            f"{MOST_PADDED_TO}; lower a factor: dp_size × microbatch_group_size (with VPP) or × micro_batch.count, × "
            "micro_batch.size with full"
        )


def _check_row_padding(config: RunConfig) -> None:
    """Rejects padding after rows that a token axis cannot have, or that could turn out too small for a micro-batch."""
    multiple, sizes = config.pad_rows_to_multiple_of, config.pad_packed_to
    if config.pads_rows and not config.has_token_axis:
        name = "pad_packed_to" if sizes else "pad_rows_to_multiple_of"
        raise InvalidArgumentError(
            f"{name}: has no effect with layout: left_padded; use layout: packed or prefix_tree, or leave it out"
        )
    if not sizes:
        return
    uneven = [size for size in sizes if size % multiple]
    if uneven:
        raise InvalidArgumentError(
            f"pad_packed_to: {uneven[0]} is not a multiple of pad_rows_to_multiple_of: {multiple}; change one of them"
        )
    cap, largest = config.token_cap, max(sizes)
    if cap is None or max(cap, -(-config.padding_row_tokens // multiple) * multiple) > largest:
        most = "no limit of tokens" if cap is None else f"up to {cap} tokens (max_tokens × cp_size)"
        raise InvalidArgumentError(
            f"pad_packed_to: micro-batches have {most}, and the largest size is {largest}; set micro_batch.max_tokens "
            "so that none exceeds it"
        )


def _check_cp_shards(config: RunConfig) -> None:
    how, size = config.cp_shards, config.cp_size
    if how == "none":
        return
    layout = "prefix_tree" if how == "blocks" else "packed"
    if config.layout != layout:
        raise InvalidArgumentError(
            f"cp_shards: {how} cuts layout: {layout}, and the layout is {config.layout}; use layout: {layout}, or "
            "leave cp_shards out"
        )
    if size == 1:
        raise InvalidArgumentError(f"cp_shards: {how} has no effect with cp_size: 1; set cp_size, or leave it out")
    pieces = pieces_of(how, size)
    if config.pad_rows_to_multiple_of % pieces:
        raise InvalidArgumentError(
            f"cp_shards: {how} cuts each row into {pieces} pieces, and pad_rows_to_multiple_of: "
            f"{config.pad_rows_to_multiple_of} is not a multiple of it; set pad_rows_to_multiple_of: {pieces}"
        )
    for column in config.columns:
        if column.name in CP_TENSORS:
            raise InvalidArgumentError(
                f"columns: {column.name} is a tensor of shards with cp_shards: {how}; give the column another name"
            )


def _check_alignment(config: RunConfig) -> None:
    if config.on_misaligned == "drop_trailing" and config.critic_mini_batch_size is not None:
        raise InvalidArgumentError(
            "on_misaligned: drop_trailing does not work with a critic, because policy and critic mini-batches would "
            "drop different groups; use on_misaligned: pad, or leave critic_mini_batch_size out"
        )
    rows = config.policy_mini_batch_size * config.most_samples
    samples = "n_samples_per_prompt" if config.max_samples_per_prompt is None else "max_samples_per_prompt"
    if not config.step_wise and config.on_misaligned != "pad" and rows < config.align_to:
        raise InvalidArgumentError(
            f"on_misaligned: {config.on_misaligned} can never align a mini-batch: it has policy_mini_batch_size × "
            f"{samples} = {rows} rows, and at least {config.align_to} are needed (dp_size × microbatch_group_size with "
            "VPP); use on_misaligned: pad or larger mini-batches"
        )


def _check_balance(config: RunConfig) -> None:
    if config.balance == "flops" and config.flops is None:
        raise InvalidArgumentError(
            "balance: flops needs flops: {linear: ..., quadratic: ...}, because a row of n tokens costs linear·n + "
            "quadratic·n²; set flops (dense transformer: linear = 2 × parameters, quadratic = 2 × layers × hidden "
            "size; PaLM, arXiv:2204.02311, appendix B), or balance: tokens"
        )
    if config.flops is None:
        return
    if config.flops.column is not None:
        _check_cost_column(config, config.flops.column)
    elif config.flops.linear == 0 and config.flops.quadratic == 0:
        raise InvalidArgumentError("flops: linear and quadratic are both 0, so every row would cost 0; set one")


def _check_cost_column(config: RunConfig, name: str) -> None:
    column = by_name(config.columns).get(name)
    is_number = column is not None and column.scope == "row" and column.dtype != "bool" and not column.shape
    if column is None or not is_number or not column.required or column.source != "rollout":
        raise InvalidArgumentError(
            f"columns: flops reads the cost of each row from {name}; declare it with scope: row, a dtype of numbers, "
            "no shape, required: true and source: rollout"
        )


def _check_columns(config: RunConfig) -> None:
    """Rejects a configuration that does not declare the columns from which its estimator and its KL are computed."""
    kl = config.kl_in_reward
    for name in config.estimator.columns:
        _check_declared(
            config, name, "response", f"advantage_estimator: {config.advantage_estimator} is computed from it"
        )
    _check_lambda(config)
    _check_bootstrap(config)
    weights = ColumnSpec.of({"name": LOSS_WEIGHT, "dtype": "float32", "scope": "response"})
    if by_name(config.columns).get(LOSS_WEIGHT) not in (None, weights):
        raise InvalidArgumentError(
            f"columns: {LOSS_WEIGHT} has the weight of each response token in the loss, so it can only have the "
            "settings dtype: float32 and scope: response; omit the others"
        )
    if kl is None:
        return
    if (kl.estimator is None) == (kl.column is None):
        raise InvalidArgumentError("kl_in_reward: needs exactly one source; set estimator (k1, k2 or k3) or column")
    if config.estimator.takes_advantages:
        raise InvalidArgumentError(
            "kl_in_reward changes rewards, and with advantage_estimator: none you send advantages yourself; leave "
            "kl_in_reward out, or use another estimator"
        )
    if config.estimator.reads_components:
        raise InvalidArgumentError(
            f"kl_in_reward changes rewards, and advantage_estimator: {config.advantage_estimator} is computed from "
            "reward_components; leave kl_in_reward out, or use another estimator"
        )
    if kl.column is not None:
        if isinstance(config.estimator, TokenEstimator):
            raise InvalidArgumentError(
                f"kl_in_reward: column has a sum per row, and advantage_estimator: {config.advantage_estimator} needs "
                "the KL of each token; give estimator: k1, k2 or k3"
            )
        _check_declared(config, kl.column, "row", "kl_in_reward reads a row's KL from it")
        _check_summed(config, kl.column)
        return
    needed = ["ref_logprobs"] if config.kl_from == "rollout_logprobs" else ["ref_logprobs", config.kl_from]
    for name in needed:
        _check_declared(config, name, "response", f"kl_in_reward: {kl.estimator} is computed from it")


def _check_lambda(config: RunConfig) -> None:
    rule = config.lambda_
    if isinstance(rule, float):
        return
    if (rule.length_adaptive is None) == (rule.column is None):
        raise InvalidArgumentError(
            "lambda: needs exactly one rule; set {length_adaptive: ...}, {column: ...}, or a number from 0 to 1"
        )
    if (name := config.lambda_column) is not None:
        _check_declared(config, name, "row", "lambda reads each step's λ from it")
        if any(column.name == name for column in config.written_columns):
            raise InvalidArgumentError(
                f"columns: {name} has source: trainer, so it has one value per row, and lambda reads one per step, "
                "also of merged steps; leave source out, so that rollouts send it"
            )


def _check_bootstrap(config: RunConfig) -> None:
    if (name := config.bootstrap_column) is not None:
        _check_declared(config, name, "row", "bootstrap reads the value after a truncated trajectory from it")


def _check_written(config: RunConfig) -> None:
    """Rejects written columns that are needed of groups that alignment drops: dropped groups have no shard."""
    if config.on_misaligned != "drop_trailing" or not config.written_columns:
        return
    needs, remedy = "", ""
    if config.whiten in ("batch", "trajectories"):
        needs, remedy = f"whose advantages whiten: {config.whiten} needs", "whiten: mini_batch"
    elif config.grpo_std_over == "batch" and config.kl_in_reward is not None:
        needs, remedy = "whose scores grpo_std_over: batch needs", "grpo_std_over: group"
    if needs:
        raise InvalidArgumentError(
            f"columns: {config.written_columns[0].name} has source: trainer, so with on_misaligned: drop_trailing it "
            f"is not written for dropped groups, {needs}; use {remedy}, or on_misaligned: pad"
        )


def _check_tree(config: RunConfig) -> None:
    """Rejects columns that may differ between rows with equal first tokens: a tree stores shared tokens only once."""
    if config.layout != "prefix_tree":
        return
    for column in config.columns:
        if column.scope == "items" or column.merge == "equal":
            what = "scope: items" if column.scope == "items" else "merge: equal"
            raise InvalidArgumentError(
                f"columns: {column.name} has {what}, so its values may differ between rows that share tokens with "
                "layout: prefix_tree; use layout: packed, or leave the column out"
            )


def _check_summed(config: RunConfig, name: str) -> None:
    """Rejects a KL column that is not summed over the steps of a merged row."""
    (column,) = (column for column in config.columns if column.name == name)
    if config.merging.joins and column.source == "rollout" and column.merge != "sum":
        raise InvalidArgumentError(
            f"columns: {name} has merge: {column.merge}, so with merge: {config.merge} a row would contain the KL "
            "of only one of its steps; set merge: sum in the column"
        )


def _check_declared(config: RunConfig, name: str, scope: ColumnScope, why: str) -> None:
    """Rejects a setting that needs a column if the run does not declare that column, or with other properties."""
    declared = [column for column in config.columns if column.name == name]
    if not declared:
        raise InvalidArgumentError(
            f"columns: {name} is missing, and {why}; declare it with scope: {scope} and dtype: float32"
        )
    (column,) = declared
    is_whole = column.required and not column.partial
    if column.scope != scope or column.dtype not in ("float32", "float64") or column.shape or not is_whole:
        raise InvalidArgumentError(
            f"columns: {name} has scope: {column.scope}, dtype: {column.dtype}, shape: {list(column.shape)}, required: "
            f"{str(column.required).lower()}, partial: {str(column.partial).lower()}, and {why}; set scope: "
            f"{scope}, dtype: float32 or float64, no shape, required: true, partial: false"
        )


def _check_micro_batch_count(config: RunConfig, count: int) -> None:
    if count * config.dp_size > _MOST_MICRO_BATCHES:
        raise InvalidArgumentError(
            f"micro_batch.count: {count} on dp_size: {config.dp_size} ranks gives {count * config.dp_size} "
            f"micro-batches per mini-batch, and the limit is {_MOST_MICRO_BATCHES}; lower the count"
        )
    if config.vpp_size > 1 and count % config.microbatch_group_size:
        raise InvalidArgumentError(
            f"micro_batch.count: {count} is not a multiple of microbatch_group_size: {config.microbatch_group_size}, "
            f"which vpp_size: {config.vpp_size} requires; change one of them"
        )
    if config.on_misaligned != "pad":
        raise InvalidArgumentError(
            f"micro_batch.count: {count} is always reached by adding padding rows, so on_misaligned: "
            f"{config.on_misaligned} has no effect; use on_misaligned: pad"
        )


def _check_full_micro_batches(config: RunConfig, size: int | None) -> None:
    if size is None:
        raise InvalidArgumentError(
            "micro_batch.full: true fills micro-batches to micro_batch.size rows, which is not set; set "
            "micro_batch.size, or leave full out"
        )
    for model in config.models:
        rows = config.mini_batch_size(model) // config.dp_size
        if config.mini_batch_unit == "sequence" and rows % size:
            raise InvalidArgumentError(
                f"micro_batch.full: true requires micro-batches of {size} rows, but with mini_batch_unit: sequence "
                f"each rank has {rows} rows per {model} mini-batch ({model}_mini_batch_size / dp_size), not a "
                f"multiple of {size}; change {model}_mini_batch_size or micro_batch.size, or leave full out"
            )


def _check_tags(config: RunConfig) -> None:
    if config.tag_shares and config.seal_by == "call":
        raise InvalidArgumentError(
            "tag_shares decides when a batch is sealed, but with seal_by: call your calls of SealBatch do; leave "
            "tag_shares out, or use seal_by: count"
        )
    if config.tag_timeout_s is not None and not config.tag_shares:
        raise InvalidArgumentError(
            f"tag_timeout_s: {config.tag_timeout_s:g} limits how long a batch waits for tag_shares, which is not set; "
            "set tag_shares, or leave tag_timeout_s out"
        )
    if len(config.tag_shares) > MOST_TAGS:
        raise InvalidArgumentError(
            f"tag_shares: {len(config.tag_shares)} tags exceed the limit of {MOST_TAGS}; list fewer"
        )
    total = sum((Fraction(repr(share.min)) for share in config.tag_shares.values()), Fraction(0))
    if total > 1:
        raise InvalidArgumentError(
            f"tag_shares: the shares of {', '.join(map(shown, config.tag_shares))} add up to {float(total):g}, more "
            "than 1; lower them"
        )
    groups = config.tag_groups(config.train_batch_size)
    if sum(groups.values()) > config.train_batch_size:
        raise InvalidArgumentError(
            f"tag_shares: {' + '.join(f'{count} of {shown(tag)}' for tag, count in groups.items())} whole groups are "
            f"more than train_batch_size: {config.train_batch_size}; lower the shares or enlarge the batch"
        )
