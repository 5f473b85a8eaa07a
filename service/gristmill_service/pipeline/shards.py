"""From a scheduled batch to its shards: which columns each has, its per-row tensors and its metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.columns import Ragged
from gristmill_service.config import Model, RunConfig
from gristmill_service.pipeline.advantage import Denominators, Float64s
from gristmill_service.pipeline.batch import Prepared
from gristmill_service.pipeline.columns import (
    Column,
    Constants,
    Geometry,
    Positions,
    Presence,
    RowScalars,
    ScaledStepTokens,
    StepScalars,
    StepTokens,
    Tokens,
)
from gristmill_service.pipeline.layout import Shard, lay_out, pad_widths
from gristmill_service.pipeline.plan import PADDING, MiniBatchPlan, RankPlan
from gristmill_service.store.base import ShardAddress


def shards(
    prepared: Prepared, mini_batches: Sequence[MiniBatchPlan], config: RunConfig, *, run: str, batch: int
) -> list[Shard]:
    """Every shard of the batch, policy first, in plan order. No token is copied until a shard is read."""
    builder = _ShardBuilder(prepared, config, run, batch)
    return [shard for model in config.models for shard in builder.model_shards(model, mini_batches)]


class _ShardBuilder:
    """What the shards of one batch share."""

    def __init__(self, prepared: Prepared, config: RunConfig, run: str, batch: int) -> None:
        self._prepared, self._config, self._run, self._batch = prepared, config, run, batch
        steps = prepared.received.steps
        self._geometry = Geometry(
            prepared.rows, steps.prompt_lengths, steps.response_lengths, config.padding_row_tokens
        )
        # Widths are rounded up; a row never needs a longer run of fill than the widest padded row.
        self._longest = int(self._geometry.lengths.max()) + config.pad_to_multiple_of
        self._constants = Constants(self._longest)
        self._shared = self._shared_columns()
        self._per_row = self._per_row_tensors()
        self._uids, self._rounds, self._stop_reasons = self._row_labels()

    def model_shards(self, model: Model, mini_batches: Sequence[MiniBatchPlan]) -> list[Shard]:
        own = [mini_batch for mini_batch in mini_batches if mini_batch.model == model]
        widths = pad_widths(own, self._geometry, self._config)
        built = []
        for mini_batch, of_ranks in zip(own, widths, strict=True):
            denominators = self._denominators(mini_batch)
            columns = [*self._shared, self._advantages(mini_batch, denominators)]
            for index, rank in enumerate(mini_batch.ranks):
                address = ShardAddress(model, mini_batch.index, index)
                metadata = self._metadata(address, rank, denominators)
                built.append(
                    lay_out(
                        address,
                        rank,
                        columns,
                        self._per_row,
                        metadata,
                        of_ranks[index],
                        self._geometry,
                        self._config,
                    )
                )
        return built

    def _shared_columns(self) -> list[Column]:
        """The columns that every mini-batch cuts from in the same way: all but the advantages."""
        steps, geometry, constants = self._prepared.received.steps, self._geometry, self._constants
        columns: list[Column] = [Tokens(steps.tokens, geometry, self._longest, self._config.pad_token_id)]
        if self._config.layout == "packed":
            columns.append(Positions(geometry, self._longest))
        else:
            columns.append(Presence("attention_mask", "sequence", geometry, constants))
        columns.append(Presence("response_mask", "response", geometry, constants))
        columns.append(StepTokens("loss_mask", steps.loss_mask, geometry, constants, self._prepared.trained))
        if steps.token_rewards is None:
            columns.append(StepScalars("rewards", steps.rewards, geometry, constants))
        else:
            columns.append(StepTokens("rewards", _float32(steps.token_rewards), geometry, constants))
        if steps.logprobs is not None:
            columns.append(StepTokens("rollout_logprobs", steps.logprobs, geometry, constants))
        return columns

    def _advantages(self, mini_batch: MiniBatchPlan, denominators: Denominators) -> Column:
        """Scaled by the loss reduction for the policy, raw for the critic."""
        scale = np.ones(len(self._prepared.rows))
        if mini_batch.model == "policy":
            scale[mini_batch.start : mini_batch.kept_end] = denominators.scale(self._config)
        tokens = self._prepared.received.steps.token_advantages
        if tokens is None:
            values: Float64s = self._prepared.advantages[self._prepared.rows.trajectories] * scale
            return RowScalars("advantages", values, self._geometry, self._constants)
        if (scale == 1).all():
            return StepTokens("advantages", tokens, self._geometry, self._constants)
        return ScaledStepTokens("advantages", tokens, scale, self._geometry, self._constants)

    def _denominators(self, mini_batch: MiniBatchPlan) -> Denominators:
        prepared = self._prepared
        return Denominators(mini_batch, prepared.loss_tokens, prepared.row_groups, prepared.rows.trajectories)

    def _per_row_tensors(self) -> list[tuple[str, NDArray[Any]]]:
        rows, steps = self._prepared.rows, self._prepared.received.steps
        return [
            ("row", np.append(np.arange(len(rows)), PADDING).astype(np.int32)),
            ("sample", np.append(steps.samples[rows.first], -1).astype(np.int32)),
            ("step_first", np.append(steps.steps[rows.first], -1).astype(np.int32)),
            ("step_last", np.append(steps.steps[rows.last], -1).astype(np.int32)),
            ("policy_version", np.append(rows.policy_versions, -1).astype(np.int32)),
            ("is_last_step", np.append(steps.is_last_steps[rows.last], True).astype(np.uint8)),
            ("is_padding", np.append(np.zeros(len(rows)), 1).astype(np.uint8)),
        ]

    def _row_labels(self) -> tuple[list[str], list[int], list[str]]:
        """Per row its uid, round and stop reason, the padding row's at the end."""
        received, rows = self._prepared.received, self._prepared.rows
        groups = [received.groups[group] for group in self._prepared.row_groups.tolist()]
        stop_reasons = [received.steps.stop_reasons[last] for last in rows.last.tolist()]
        padding_uid = _unused("padding", {uid for _, uid in received.groups})
        return (
            [uid for _, uid in groups] + [padding_uid],
            [round_ for round_, _ in groups] + [-1],
            [
                *stop_reasons,
                "padding",
            ],
        )

    def _metadata(self, address: ShardAddress, rank: RankPlan, denominators: Denominators) -> dict[str, Any]:
        rows: list[int] = rank.rows.tolist()

        def of(values: NDArray[np.int64]) -> list[int]:
            kept = values.tolist()
            return [1 if row == PADDING else kept[row - denominators.start] for row in rows]

        return {
            "run": self._run,
            "batch": self._batch,
            "model": address.model,
            "mini_batch": address.mini_batch,
            "rank": address.rank,
            "dp_size": self._config.dp_size,
            "uids": [self._uids[row] for row in rows],
            "rounds": [self._rounds[row] for row in rows],
            "stop_reasons": [self._stop_reasons[row] for row in rows],
            "micro_batches": rank.micro_batches,
            "loss_denominators": {
                "loss_tokens": denominators.loss_tokens,
                "rows": denominators.rows,
                "prompts": denominators.prompts,
                "trajectories": denominators.trajectories,
                "row_tokens": of(denominators.row_tokens),
                "prompt_tokens": of(denominators.prompt_tokens),
                "trajectory_tokens": of(denominators.trajectory_tokens),
            },
        }


def _float32(column: Ragged) -> Ragged:
    if column.values.dtype == np.float32:
        return column
    with np.errstate(over="ignore"):
        return Ragged(column.values.astype(np.float32), column.starts, column.lengths)


def _unused(name: str, taken: set[str]) -> str:
    """The name, marked until no prompt group is called so."""
    while name in taken:
        name = f"_{name}"
    return name
