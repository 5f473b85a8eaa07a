"""Builds the shards of a scheduled batch: columns, per-row tensors, and metadata, which is JSON in the header."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gristmill._wire.column_spec import LOSS_WEIGHT
from gristmill._wire.columns import Int64s, Ragged
from gristmill._wire.row_fields import UNKNOWN
from gristmill._wire.steps import FLOAT32_MAX
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import Model, RunConfig
from gristmill_service.estimators import Float64s
from gristmill_service.pipeline.credit.assignment import TokenCredit
from gristmill_service.pipeline.credit.denominators import Denominators
from gristmill_service.pipeline.credit.kl import reward_columns
from gristmill_service.pipeline.credit.trained_tokens import response_rewards, reward_column
from gristmill_service.pipeline.layout.columns import (
    Column,
    Geometry,
    Positions,
    Presence,
    RowScalars,
    StepScalars,
    StepTokens,
    Tokens,
)
from gristmill_service.pipeline.layout.extra_columns import shard_tensors, token_columns
from gristmill_service.pipeline.layout.iovec import Region
from gristmill_service.pipeline.layout.ragged_columns import ragged_tensors
from gristmill_service.pipeline.layout.shard import Layout, PerRow, Shard
from gristmill_service.pipeline.planning import Plan, row_advantages, token_advantages
from gristmill_service.pipeline.rows.merge import kept_tokens
from gristmill_service.pipeline.rows.validate import Received
from gristmill_service.pipeline.scheduling.plan import PADDING, MiniBatchPlan, RankPlan, ShardAddress


def shards(
    planned: Plan, received: Received, layouts: Mapping[Model, Layout], config: RunConfig, *, run: str, batch: int
) -> list[Shard]:
    """Returns all shards of the batch, the policy's first, in plan order. Copies no tokens until a shard is read.

    received: the batch's steps. layouts: the places of each model's rows.
    """
    builder = _ShardBuilder(planned, received, config, run, batch)
    return [shard for model, layout in layouts.items() for shard in builder.model_shards(model, layout)]


def layouts_of(planned: Plan, config: RunConfig) -> dict[Model, Layout]:
    """Returns the places of each model's rows, for models with mini-batches; they need no tokens."""
    geometry = Geometry(planned.numbers.rows, config.padding_row_tokens)
    parts = {model: [part for part in planned.mini_batches if part.model == model] for model in config.models}
    return {model: Layout(some, geometry, config, planned.sharing) for model, some in parts.items() if some}


class _ShardBuilder:
    """Builds the shards of one batch, and caches their common columns."""

    def __init__(self, planned: Plan, received: Received, config: RunConfig, run: str, batch: int) -> None:
        self._plan, self._numbers, self._received = planned, planned.numbers, received
        self._config, self._run, self._batch = config, run, batch
        steps, rows = received.steps, self._numbers.rows
        self._geometry = Geometry(rows, config.padding_row_tokens)
        # Widths are rounded up. No row needs more fill than the widest padded row, or the longest padded token axis.
        self._longest = int(self._geometry.lengths.max()) + config.most_padding
        self._zeros = Region(np.zeros(4 * self._longest, np.uint8))
        self._shared = self._shared_columns()
        built_here = planned.awaits | {LOSS_WEIGHT}
        present = [column for column in config.columns if column.name not in built_here]
        self._extras = token_columns(present, steps, rows, self._geometry, self._longest)
        self._tensors = [
            *shard_tensors(present, steps, rows),
            *ragged_tensors(present, steps, rows, self._geometry),
        ]
        self._per_row = self._per_row_tensors()
        self._labels = row_labels(planned)

    def model_shards(self, model: Model, layout: Layout) -> list[Shard]:
        of_model = [mini_batch for mini_batch in self._plan.mini_batches if mini_batch.model == model]
        denominators = [self._plan.denominators(mini_batch, self._config) for mini_batch in of_model]
        columns = [*layout.tree_columns, *self._shared, *self._advantages(model, of_model, denominators), *self._extras]
        placed = layout.place(columns, self._per_row, self._tensors)
        metadata = Metadata(self._labels, denominators, layout.placement.rows, self._config, self._run, self._batch)
        return [
            layout.shard(
                index,
                address,
                placed,
                metadata.of(address, rank, layout.begins[index], divisors) | self._partitions(part),
            )
            for index, (address, rank, divisors, part) in enumerate(_addressed(of_model, denominators))
        ]

    def _partitions(self, mini_batch: MiniBatchPlan) -> dict[str, str]:
        partitions = self._numbers.partitions
        return {} if partitions is None else {"partitions": _json(partitions.named(mini_batch.partitions))}

    def _shared_columns(self) -> list[Column]:
        """Returns the columns that do not depend on mini-batches: all except the advantages."""
        steps, rows = self._received.steps, self._numbers.rows
        geometry, longest, zeros = self._geometry, self._longest, self._zeros
        columns: list[Column] = [Tokens(steps.tokens, longest, self._config.pad_token_id)]
        if self._config.layout == "packed":
            columns.append(Positions(longest))
        elif self._config.layout == "left_padded":
            columns.append(Presence("attention_mask", "sequence", longest))
        columns.append(Presence("response_mask", "response", longest))
        unfiltered = self._plan.trained[rows.steps]
        columns.append(StepTokens("loss_mask", rows.trained(steps.loss_mask), geometry, zeros, unfiltered))
        columns += self._rewards()
        if steps.logprobs is not None:
            columns.append(StepTokens("rollout_logprobs", rows.standing(steps.logprobs), geometry, zeros))
        unknown = Region(np.full(longest, UNKNOWN, np.int32))
        if steps.token_versions is not None:
            versions = rows.standing(steps.token_versions)
            columns.append(StepTokens("token_policy_version", versions, geometry, unknown))
        if self._config.token_step:
            of_tokens = np.repeat(steps.steps.astype(np.int32), steps.response_lengths)
            numbers = rows.standing(Ragged.from_lengths(of_tokens, steps.response_lengths))
            columns.append(StepTokens("token_step", numbers, geometry, unknown))
        if self._plan.weights is not None:
            columns.append(StepTokens(LOSS_WEIGHT, self._plan.weights, geometry, zeros))
        return columns

    def _rewards(self) -> list[Column]:
        """Returns the column of rewards; empty while the KL that they include is missing."""
        credit, geometry, zeros = self._plan.credit, self._geometry, self._zeros
        if credit is None and reward_columns(self._config):
            return []
        steps, rows = self._received.steps, self._numbers.rows
        changed = None if credit is None else credit.token_rewards
        token_rewards = changed or steps.token_rewards
        if token_rewards is None:
            owned = rows.owns_reward(steps.response_lengths)
            return [StepScalars("rewards", steps.rewards[rows.steps], geometry, zeros, owned)]
        if changed is None and self._config.retokenized_tail:
            token_rewards = reward_column(steps, response_rewards(steps, kept_tokens(rows, len(steps))))
        return [StepTokens("rewards", rows.trained(_float32(token_rewards)), geometry, zeros)]

    def _advantages(
        self, model: Model, mini_batches: Sequence[MiniBatchPlan], denominators: Sequence[Denominators]
    ) -> list[Column]:
        """Returns the column of advantages, scaled by the loss reduction for the policy, and that of returns if
        advantages are per token; empty while a required column is missing."""
        if (credit := self._plan.credit) is None:
            return []
        scale = np.ones(len(self._numbers.rows))
        if model == "policy":
            for mini_batch, divisors in zip(mini_batches, denominators, strict=True):
                scale[mini_batch.start : mini_batch.kept_end] = divisors.scale(self._config)
        if credit.of_tokens is not None:
            return self._of_tokens(credit.of_tokens, mini_batches, scale)
        tokens = self._received.steps.token_advantages
        if tokens is None:
            values: Float64s = row_advantages(credit.advantages, self._plan, mini_batches, self._config) * scale
            self._check_fits(values)
            return [RowScalars("advantages", values, self._zeros)]
        scaled = self._scaled(self._numbers.rows.standing(tokens), scale)
        return [StepTokens("advantages", scaled, self._geometry, self._zeros)]

    def _of_tokens(self, credit: TokenCredit, mini_batches: Sequence[MiniBatchPlan], scale: Float64s) -> list[Column]:
        """Returns the columns of tokens' advantages and returns. scale: float64 (rows,)."""
        rows, advantages = self._numbers.rows, credit.advantages
        if self._config.whiten == "mini_batch" or (scale != 1).any():
            advantages, row_of_token = token_advantages(credit, self._plan, mini_batches, self._config)
            advantages = advantages * scale[row_of_token]
        columns = {"advantages": credit.tokens.response(advantages, "advantages")}
        if credit.returns is not None:
            columns["returns"] = credit.returns
        return [StepTokens(name, rows.trained(values), self._geometry, self._zeros) for name, values in columns.items()]

    def _check_fits(self, advantages: Float64s) -> None:
        """Rejects an advantage that exceeds float32, which finite but very different scores may produce."""
        outside = np.flatnonzero(~(np.abs(advantages) <= FLOAT32_MAX))
        if outside.size:
            row = int(outside[0])
            raise InvalidArgumentError(
                f"{self._received.steps.key(int(self._numbers.rows.first[row]))}: advantage is "
                f"{advantages[row]}, which float32 cannot hold; scale the rewards down"
            )

    def _scaled(self, tokens: Ragged, scale: Float64s) -> Ragged:
        """Multiplies a column by its rows' scale, in float64. tokens: (visits,). scale: (rows,)."""
        if (scale == 1).all():
            return tokens
        compact = tokens.compact()
        values = compact.values * np.repeat(self._numbers.rows.per_visit(scale), compact.lengths)
        return Ragged(values.astype(np.float32), compact.starts, compact.lengths)

    def _per_row_tensors(self) -> dict[int, PerRow]:
        """Returns every row's integers and flags; the padding row is at -1."""
        rows, steps = self._numbers.rows, self._received.steps
        integers: dict[str, NDArray[Any]] = {
            "row": np.arange(len(rows)),
            "sample": steps.samples[rows.first],
            "step_first": steps.steps[rows.first],
            "step_last": steps.steps[rows.last],
            "policy_version": rows.policy_versions,
        }
        flags: dict[str, NDArray[Any]] = {
            "is_last_step": steps.is_last_steps[rows.last],
            "is_padding": np.zeros(len(rows)),
        }
        return {4: _stacked(integers, np.int32, PADDING), 1: _stacked(flags, np.uint8, 1)}


def _addressed(
    mini_batches: Sequence[MiniBatchPlan], denominators: Sequence[Denominators]
) -> Iterator[tuple[ShardAddress, RankPlan, Denominators, MiniBatchPlan]]:
    """Yields the addresses of one model's shards, in plan order, with their rank's plan, denominators, mini-batch."""
    for mini_batch, divisors in zip(mini_batches, denominators, strict=True):
        for index, rank in enumerate(mini_batch.ranks):
            yield ShardAddress(mini_batch.model, mini_batch.index, index), rank, divisors, mini_batch


def _stacked(values: dict[str, NDArray[Any]], dtype: Any, padding: int) -> PerRow:
    """Stacks tensors of values per row, each with the padding row's value at its end."""
    lines = np.array([np.append(line, padding) for line in values.values()], dtype)
    return PerRow(list(values), lines)


def _float32(column: Ragged) -> Ragged:
    if column.values.dtype == np.float32:
        return column
    with np.errstate(over="ignore"):
        return Ragged(column.values.astype(np.float32), column.starts, column.lengths)


Labels = dict[str, NDArray[Any]]


def row_labels(planned: Plan) -> Labels:
    """Returns each row's uid, round and stop reason; its tag if any group has one; its trajectory's reward components,
    agent and episode if trajectories have them; and the keys of its steps if steps have them. With `layout:
    prefix_tree`, where no mask shows it, also the length of its response. (rows + 1,) each, the padding row last."""
    numbers = planned.numbers
    received, rows = numbers.received, numbers.rows
    uids = [uid for _, uid in received.groups]
    # Includes dropped groups, so that a search for one does not find padding.
    taken = {*uids, *(uid for _, uid in numbers.stale)}
    groups = np.append(numbers.row_groups, len(uids))
    lasts = np.append(rows.last, len(received.steps))
    lengths = {} if planned.sharing is None else {"response_lengths": np.append(rows.response_lengths, 0)}
    optional: Labels = {"tags": _objects([*received.tags, ""])[groups]} if any(received.tags) else {}
    trajectories = np.append(rows.trajectories, -1)
    if (components := received.components) is not None:
        optional["reward_components"] = _objects([*components, None])[trajectories]
    for name, texts in (("agents", received.agents), ("episodes", received.episodes)):
        if texts is not None:
            optional[name] = _objects([*texts, ""])[trajectories]
    if (keys := received.steps.step_keys) is not None and any(keys):
        paths = np.split(rows.steps, rows.edges[1:-1])
        optional["step_keys"] = _objects([*([keys[step] for step in path] for path in paths), None])
    return {
        "uids": _objects([*uids, _unused("padding", taken)])[groups],
        "rounds": np.array([*(round_ for round_, _ in received.groups), -1])[groups],
        "stop_reasons": _objects([*received.steps.stop_reasons, "padding"])[lasts],
        **optional,
        **lengths,
    }


class Metadata:
    """Builds the metadata of a model's shards. Per-row values are gathered for all shards at once.

    placed: (n,) the concatenated rows of all shards, -1 for padding rows.
    """

    def __init__(
        self,
        labels: Labels,
        denominators: Sequence[Denominators],
        placed: Int64s,
        config: RunConfig,
        run: str,
        batch: int,
    ) -> None:
        self._head = {"run": _json(run), "batch": _json(batch)}
        self._parallel = {"dp_size": _json(config.dp_size), **_context_parallel(config)}
        self._labels = {name: values[placed].tolist() for name, values in labels.items()}
        self._tokens = {name: values[placed] for name, values in _tokens(denominators, len(labels["uids"])).items()}
        # Caches JSON by micro-batch bounds, which are equal in most shards of a batch.
        self._micro_batches: dict[bytes, str] = {}

    def of(self, address: ShardAddress, rank: RankPlan, begin: int, denominators: Denominators) -> dict[str, str]:
        """Returns the metadata of a shard. begin: its first row's place among the placed rows."""
        rows = slice(begin, begin + len(rank.rows))
        tokens = {name: values[rows] for name, values in self._tokens.items()}
        return {
            **self._head,
            "model": _json(address.model),
            "mini_batch": _json(address.mini_batch),
            "rank": _json(address.rank),
            **self._parallel,
            **{name: _json(values[rows]) for name, values in self._labels.items()},
            "micro_batches": self._positions(rank),
            "loss_denominators": _json(denominators.totals | tokens),
        }

    def _positions(self, rank: RankPlan) -> str:
        key = rank.bounds.tobytes()
        if key not in self._micro_batches:
            self._micro_batches[key] = _json(rank.micro_batches)
        return self._micro_batches[key]


def _context_parallel(config: RunConfig) -> dict[str, str]:
    """Returns what a client needs to cut a shard for a context-parallel rank; empty if the run does not cut shards."""
    if config.cp_shards == "none":
        return {}
    declared = [column.name for column in config.columns if column.scope == "token"]
    tensors = ["sequences", "position_ids", *declared]
    cut = {"size": config.cp_size, "shards": config.cp_shards, "token_tensors": tensors}
    return {"context_parallel": _json(cut)}


def _tokens(denominators: Sequence[Denominators], rows: int) -> dict[str, Int64s]:
    """Returns the denominators that differ by row; 1 for rows in no mini-batch, and for the padding row at -1."""
    tokens = {name: np.ones(rows, np.int64) for name in ("row_tokens", "prompt_tokens", "trajectory_tokens")}
    for divisors in denominators:
        kept = slice(divisors.start, divisors.start + len(divisors.row_tokens))
        for name, values in tokens.items():
            values[kept] = getattr(divisors, name)
    return tokens


def _objects(values: Sequence[Any]) -> NDArray[np.object_]:
    """Returns strings, mappings or lists as an array that rows can index."""
    return np.fromiter(values, np.object_, len(values))


def _unused(name: str, taken: set[str]) -> str:
    """Prefixes a name with underscores until it is not in `taken`."""
    while name in taken:
        name = f"_{name}"
    return name


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()
