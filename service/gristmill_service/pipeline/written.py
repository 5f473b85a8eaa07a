"""Converts columns that trainers write back (specification, section 11) from tensors of shards to values of steps.

A trainer writes a column for all rows of a shard, in the shape of a tensor of the shard. Only the rows' own values are
stored, in the shard's order, without padding. When every shard is written, the batch's steps get the values as if
rollout workers had sent them: a response token gets the value of the row that trains it.
Values that would fail the whole batch later are refused when they are written: values that are not finite and, if
credit is computed from them, values whose sums, or whose KL with the other log-probability, may exceed float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.column_spec import ColumnSpec, is_finite
from gristmill._wire.columns import Array, Int64s, Ragged, starts_of
from gristmill._wire.steps import Extra
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import KlInReward, RunConfig
from gristmill_service.pipeline.credit.kl import MOST, credit_columns, excessive_kl, kl, largest, unfit
from gristmill_service.pipeline.layout.columns import safetensors_name
from gristmill_service.pipeline.layout.shard import Shard
from gristmill_service.pipeline.planning import Plan
from gristmill_service.pipeline.rows.merge import Rows
from gristmill_service.pipeline.rows.validate import Received
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan, ShardAddress


@dataclass(frozen=True, slots=True, eq=False)
class WrittenRows:
    """The real rows of a shard, in order, against which written values are checked.

    uids, samples, lasts: the trajectory and last step of each row. ends: int64 (rows,), the end of each response among
    the concatenated responses, in tokens. trained: bool (tokens,), whether this row trains the token; empty unless a KL
    is subtracted from rewards. given: log-probabilities for the KL that rollout workers sent, by name; (tokens,).
    """

    uids: Sequence[str]
    samples: Int64s
    lasts: Int64s
    ends: Int64s
    trained: NDArray[np.bool_]
    given: Mapping[str, Array]

    def check(
        self, column: ColumnSpec, values: Array, config: RunConfig, other: Callable[[str], Array | None], where: str
    ) -> None:
        """Refuses values of a column that would fail the batch.

        values: the rows' own values. other: returns the values written for another column, or None.
        Raises InvalidArgumentError, which names the row, the column, the value and the remedy.
        """
        if not column.allow_nonfinite and not is_finite(values):
            at = next(at for at, one in enumerate(values) if not is_finite(np.atleast_1d(one)))
            raise InvalidArgumentError(
                f"{where}: {self._name(column, at)} is not finite; write finite values, or declare allow_nonfinite: "
                "true"
            )
        if column.name in credit_columns(config):
            self._check_fits(column, values, config, where)
            self._check_kl(column, values, config, other, where)

    def _check_fits(self, column: ColumnSpec, values: Array, config: RunConfig, where: str) -> None:
        reference = config.kl_in_reward
        coef = reference.coef if reference is not None and reference.column == column.name else 1.0
        if (excess := unfit(column.name, values, coef)) is not None:
            raise InvalidArgumentError(f"{where}: {self._name(column, excess[0])} {excess[1]}")

    def _check_kl(
        self,
        column: ColumnSpec,
        values: Array,
        config: RunConfig,
        other: Callable[[str], Array | None],
        where: str,
    ) -> None:
        reference = config.kl_in_reward
        pair = (config.kl_from, "ref_logprobs")
        if reference is None or reference.estimator is None or column.name not in pair:
            return
        ours, theirs = (
            values if name == column.name else self.given[name] if name in self.given else other(name) for name in pair
        )
        if ours is None or theirs is None or _surely_fits(ours, theirs, reference):
            # If one of the two is missing, they are checked when it is written.
            return
        excess = excessive_kl(ours, theirs, self.trained, reference)
        if excess is not None:
            at, message = excess
            raise InvalidArgumentError(f"{where}: {self._name(column, at)} is {values[at]}, and the KL is {message}")

    def _name(self, column: ColumnSpec, at: int) -> str:
        """Returns the name of a value in messages: its row, column, and index in the row's response."""
        row = at if column.scope == "row" else int(np.searchsorted(self.ends, at, side="right"))
        place = "" if column.scope == "row" else f"[{at - (int(self.ends[row - 1]) if row else 0)}]"
        return f"uid {self.uids[row]!r} sample {self.samples[row]} step {self.lasts[row]}: {column.name}{place}"


def _surely_fits(ours: Array, theirs: Array, reference: KlInReward) -> bool:
    """Returns whether the KL fits float32 even for the largest possible difference."""
    assert reference.estimator is not None, "checked by the caller"
    furthest = np.float64(largest(ours) + largest(theirs))
    with np.errstate(over="ignore", invalid="ignore"):
        bounds = reference.coef * kl(np.array([furthest, -furthest]), np.zeros(2), reference.estimator)
    return bool((np.abs(bounds) <= MOST).all())


def written_rows(rows: Int64s, plan: Plan, received: Received, config: RunConfig) -> WrittenRows:
    """Returns the data against which a shard's written values are checked. rows: its real rows, in order."""
    merged, steps = plan.numbers.rows, received.steps
    last = merged.last[rows]
    reference, given, trained = config.kl_in_reward, dict[str, Array](), np.empty(0, np.bool_)
    if reference is not None and reference.estimator is not None:
        places = StepPlaces.of(rows, merged, steps.response_lengths)
        is_counted = places.standing(steps.loss_mask) == 1
        trained = is_counted & places.per_token(plan.trained)
        if steps.logprobs is not None and config.kl_from == "rollout_logprobs":
            given["rollout_logprobs"] = places.standing(steps.logprobs)
        for name in (config.kl_from, "ref_logprobs"):
            if name in steps.extras:
                given[name] = places.standing(steps.extras[name].values)
    return WrittenRows(
        [steps.uids[step] for step in last.tolist()],
        steps.samples[last].astype(np.int64),
        steps.steps[last].astype(np.int64),
        np.cumsum(merged.response_lengths[rows]),
        trained,
        given,
    )


@dataclass(frozen=True, slots=True, eq=False)
class StepPlaces:
    """The tokens that some rows train, as runs of consecutive tokens, in the order of the rows.

    total: the number of response tokens of the rows. in_rows, in_steps: int64, the begin of each run among the response
    tokens of the rows, and of the steps. counts: int64, the tokens of each run. steps: int64, the step of each run.
    """

    total: int
    in_rows: Int64s
    in_steps: Int64s
    counts: Int64s
    steps: Int64s

    @classmethod
    def of(cls, order: Int64s, rows: Rows, responses: Int64s) -> StepPlaces:
        """order: the rows, in order. responses: int64 (steps,), the number of response tokens of each step."""
        lengths = rows.response_lengths[order]
        # The begin of each row's tokens. It is arbitrary for rows not in `order`; their visits count 0 tokens.
        begins, is_placed = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.bool_)
        begins[order], is_placed[order] = starts_of(lengths), True
        counts = np.where(rows.per_visit(is_placed), rows.kept - rows.shared, 0)
        in_rows = rows.per_visit(begins) + rows.starts + rows.shared
        runs = np.flatnonzero(counts)
        runs = runs[np.argsort(in_rows[runs], kind="stable")]
        steps = rows.steps[runs]
        in_steps = starts_of(responses)[steps] + rows.shared[runs]
        return cls(int(lengths.sum()), in_rows[runs], in_steps, counts[runs], steps)

    def standing(self, values: Ragged) -> Array:
        """Returns the steps' values at the rows' tokens; 0 for tokens that the row does not train; (total,)."""
        compact = values.compact().values
        of_rows = np.zeros((self.total, *compact.shape[1:]), compact.dtype)
        copy_runs(of_rows, self.in_rows, compact, self.in_steps, self.counts)
        return of_rows

    def per_token(self, of_steps: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns each step's flag at the tokens that rows train; False for all other tokens; (total,)."""
        ends = self.in_rows + self.counts
        # Alternately the number of tokens before a run and in the run. The tokens after the last run follow below.
        lengths = np.stack([self.in_rows - np.append(0, ends[:-1])[: len(ends)], self.counts], axis=1).ravel()
        flags = np.stack([np.zeros(len(ends), np.bool_), of_steps[self.steps]], axis=1).ravel()
        behind = self.total - int(lengths.sum())
        return np.repeat(np.append(flags, False), np.append(lengths, behind))


def copy_runs(into: Array, places: Int64s, values: Array, starts: Int64s, counts: Int64s) -> None:
    """Copies runs of values, of `counts` values each, from `starts` in `values` to `places` in `into`."""
    if not len(counts):
        return
    goes_on = (places[1:] == (places + counts)[:-1]) & (starts[1:] == (starts + counts)[:-1])
    first = np.flatnonzero(np.append(True, ~goes_on))
    sizes = np.add.reduceat(counts, first)
    for place, start, size in zip(places[first].tolist(), starts[first].tolist(), sizes.tolist(), strict=True):
        into[place : place + size] = values[start : start + size]


Written = Mapping[ShardAddress, Mapping[str, Array]]
"""The rows' own values of each written column of each policy shard, concatenated; (n, *shape)."""


class FormBlock(NamedTuple):
    """A tensor of a shard's responses. prefix: of its name. begin, end: its range of rows. shape: the leading
    dimensions: rows and width, or tokens."""

    prefix: str
    begin: int
    end: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ShardForm:
    """The positions of responses in a shard's tensors.

    blocks: in the order of the rows. leads: int64 (rows,), the elements before each row's own elements. lengths: int64
    (rows,), its own elements. tails: int64 (rows,), the elements after them. elsewhere: int64 (rows,), the response
    tokens that each row shares with the previous row; their values are stored there, and zeros replace them here.
    is_real: bool (rows,), False for padding rows. rows: the data of the real rows.
    """

    blocks: Sequence[FormBlock]
    leads: Int64s
    lengths: Int64s
    tails: Int64s
    elsewhere: Int64s
    is_real: NDArray[np.bool_]
    rows: WrittenRows

    def own_values(self, column: ColumnSpec, tensors: Mapping[str, Array], where: str) -> Array:
        """Returns the rows' own values of a written column; (n, *shape), a view if possible.

        tensors: the written tensors, by their names in a shard. Raises InvalidArgumentError, which names the tensor and
        its actual and expected shape.
        """
        if column.scope == "row":
            values: Array = _tensor(tensors, column.name, (len(self.is_real),), column, where)[self.is_real]
            return values
        blocks = [self._of_block(block, column, tensors, where) for block in self.blocks]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def names(self, column: ColumnSpec) -> list[str]:
        """Returns the names of a column's tensors."""
        return [column.name] if column.scope == "row" else [block.prefix + column.name for block in self.blocks]

    def _of_block(self, block: FormBlock, column: ColumnSpec, tensors: Mapping[str, Array], where: str) -> Array:
        values = _tensor(tensors, block.prefix + column.name, block.shape, column, where)
        rows = slice(block.begin, block.end)
        leads, lengths, is_real = self.leads[rows], self.lengths[rows], self.is_real[rows]
        starts, counts = starts_of(leads + lengths + self.tails[rows]) + leads, np.where(is_real, lengths, 0)
        sizes = np.where(is_real, self.elsewhere[rows], 0) + counts
        flat = values.reshape(-1, *column.value_shape)
        if len(flat) == sizes.sum() == counts.sum():
            return flat
        own = np.zeros((int(sizes.sum()), *column.value_shape), flat.dtype)
        copy_runs(own, starts_of(sizes) + sizes - counts, flat, starts, counts)
        return own


def form_of(shard: Shard, plan: Plan, received: Received, config: RunConfig) -> ShardForm:
    begin, end = shard.blocks[0].begin, shard.blocks[-1].end
    placement = shard.placed.placement
    lengths = placement.own["response"][begin:end].copy()
    elsewhere = placement.lengths["response"][begin:end] - lengths
    leads = placement.leads["response"][begin:end].copy()
    if placement.shared is not None:
        leads = placement.own["sequence"][begin:end] - lengths
    tails = np.zeros_like(leads) if placement.tails is None else placement.tails[begin:end].copy()
    totals = np.append(0, np.cumsum(leads + lengths + tails))
    blocks = [
        FormBlock(
            block.prefix,
            block.begin - begin,
            block.end - begin,
            (int(totals[block.end - begin] - totals[block.begin - begin]),)
            if block.widths is None
            else (block.end - block.begin, block.widths["response"]),
        )
        for block in shard.blocks
    ]
    rows = placement.rows[begin:end]
    is_real = rows >= 0
    return ShardForm(
        blocks, leads, lengths, tails, elsewhere, is_real, written_rows(rows[is_real], plan, received, config)
    )


def values_of_steps(
    written: Written, rows: Rows, received: Received, mini_batches: Sequence[MiniBatchPlan], config: RunConfig
) -> dict[str, Extra]:
    """Returns the written columns as values of steps, the inverse of `StepPlaces.standing`. A step whose rows are in no
    shard, because alignment dropped its group, gets zeros."""
    placed = {
        ShardAddress("policy", part.index, rank): of_rank.rows[of_rank.rows >= 0]
        for part in mini_batches
        if part.model == "policy"
        for rank, of_rank in enumerate(part.ranks)
    }
    places = StepPlaces.of(
        np.concatenate([np.empty(0, np.int64), *placed.values()]), rows, received.steps.response_lengths
    )
    extras = {}
    for column in config.written_columns:
        parts = [written[address][column.name] for address in placed]
        if column.scope == "row":
            extras[column.name] = _of_rows(column, parts, list(placed.values()), rows, len(received.steps))
        else:
            extras[column.name] = _of_responses(column, parts, places, received.steps.response_lengths)
    return extras


def _of_rows(column: ColumnSpec, parts: Sequence[Array], placed: Sequence[Int64s], rows: Rows, steps: int) -> Extra:
    """Assigns the value of each row to the last step of its path, and 0 to other steps. parts: the values of each
    shard. placed: the rows of each shard."""
    of_steps = np.zeros((steps, *column.value_shape), column.storage)
    for values, order in zip(parts, placed, strict=True):
        of_steps[rows.last[order]] = values
    return Extra(Ragged.from_lengths(of_steps, np.ones(steps, np.int64)), np.ones(steps, np.bool_))


def _of_responses(column: ColumnSpec, parts: Sequence[Array], places: StepPlaces, responses: Int64s) -> Extra:
    """Assigns to each token the value of the row that trains it. parts: the values of each shard, in the order of
    `places`. responses: int64 (steps,), the number of response tokens of each step."""
    of_steps = np.zeros((int(responses.sum()), *column.value_shape), column.storage)
    begin = 0
    for values in parts:
        runs = slice(*np.searchsorted(places.in_rows, [begin, begin + len(values)]).tolist())
        copy_runs(of_steps, places.in_steps[runs], values, places.in_rows[runs] - begin, places.counts[runs])
        begin += len(values)
    return Extra(Ragged.from_lengths(of_steps, responses), np.ones(len(responses), np.bool_))


def _tensor(tensors: Mapping[str, Array], name: str, shape: tuple[int, ...], column: ColumnSpec, where: str) -> Array:
    tensor = tensors.get(name)
    if tensor is None:
        raise InvalidArgumentError(f"{where}: {name} is missing; write all tensors of a column together")
    expected = (*shape, *column.value_shape)
    if tensor.shape != expected or tensor.dtype != column.storage:
        raise InvalidArgumentError(
            f"{where}: {name} is {safetensors_name(tensor.dtype)} {list(tensor.shape)}, but the shard needs "
            f"{safetensors_name(column.storage)} {list(expected)}; write it with that dtype and shape"
        )
    return tensor
