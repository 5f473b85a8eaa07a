"""Columns that trainers write back (specification, section 11): from a shard's tensors to values of steps.

A column is written for a shard's rows, whole, as a tensor of the shard would be. What is kept of it are the rows' own
values, in the shard's order: padding counts for nothing. Once every shard is written, the batch's steps get them as if
rollout workers had sent them: each response token that of the row that trains it, each row its number.
A value that would fail the whole batch later, when everything is there, is refused when it comes: one that is not
finite, or, where credit is computed of it, whose sums float32 may not hold, or whose KL with the other log-probability
is such.
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
from gristmill_service.pipeline.credit.kl import MOST, credit_columns, excessive_kl, kl, largest, too_large
from gristmill_service.pipeline.layout.columns import safetensors_name
from gristmill_service.pipeline.layout.shard import Shard
from gristmill_service.pipeline.rows.merge import Rows
from gristmill_service.pipeline.rows.validate import Received
from gristmill_service.pipeline.scheduling.plan import MiniBatchPlan, ShardAddress
from gristmill_service.pipeline.scored_batch import ScoredBatch


@dataclass(frozen=True, slots=True, eq=False)
class WrittenRows:
    """A shard's real rows, one after another.

    uids, samples, lasts: of each its trajectory and last step. ends: int64 (rows,), where its response's tokens end.
    trained: bool (tokens,), whether this row trains the token; none where no KL is taken from rewards.
    given: by name what rollouts gave of the log-probabilities that the KL is computed of; (tokens,).
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
        """values: the rows' own. other: gives what was written of another column, or None.

        Raises InvalidArgumentError naming the row, the column, the value and the remedy.
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
        if (excess := too_large(values, coef)) is not None:
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
            # Where one lacks, it is judged with that.
            return
        excess = excessive_kl(ours, theirs, self.trained, reference)
        if excess is not None:
            at, message = excess
            raise InvalidArgumentError(f"{where}: {self._name(column, at)} is {values[at]}, and the KL is {message}")

    def _name(self, column: ColumnSpec, at: int) -> str:
        """Names a value by its row and its place in the row's response."""
        row = at if column.scope == "row" else int(np.searchsorted(self.ends, at, side="right"))
        place = "" if column.scope == "row" else f"[{at - (int(self.ends[row - 1]) if row else 0)}]"
        return f"uid {self.uids[row]!r} sample {self.samples[row]} step {self.lasts[row]}: {column.name}{place}"


def _surely_fits(ours: Array, theirs: Array, reference: KlInReward) -> bool:
    """Whether no KL is too large, for none is further from 0 than that of the largest difference there may be."""
    assert reference.estimator is not None, "checked by who calls"
    furthest = np.float64(largest(ours) + largest(theirs))
    with np.errstate(over="ignore", invalid="ignore"):
        bounds = reference.coef * kl(np.array([furthest, -furthest]), np.zeros(2), reference.estimator)
    return bool((np.abs(bounds) <= MOST).all())


def written_rows(rows: Int64s, scored: ScoredBatch, config: RunConfig) -> WrittenRows:
    """rows: the shard's real ones, in its order."""
    merged, steps = scored.rows, scored.received.steps
    last = merged.last[rows]
    reference, given, trained = config.kl_in_reward, dict[str, Array](), np.empty(0, np.bool_)
    if reference is not None and reference.estimator is not None:
        places = StepPlaces.of(rows, merged, steps.response_lengths)
        is_counted = places.standing(steps.loss_mask) == 1
        trained = is_counted & places.per_token(scored.trained)
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
    """Where the tokens that some rows train stand: among these rows' own tokens, and in the steps' responses.

    total: the rows' own tokens. in_rows, in_steps, counts: int64, of each run of them where it begins, and how many it
    has, in the order of the rows. steps: int64, the step that each is of.
    """

    total: int
    in_rows: Int64s
    in_steps: Int64s
    counts: Int64s
    steps: Int64s

    @classmethod
    def of(cls, order: Int64s, rows: Rows, responses: Int64s) -> StepPlaces:
        """order: the rows, one after another. responses: int64 (steps,), tokens of each step's response."""
        lengths = rows.response_lengths[order]
        # Where each row's tokens begin; of rows that are not among them, whose visits bring nothing, anywhere.
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
        """The steps' values at the rows' own tokens, 0 where the row does not train them; (total,)."""
        compact = values.compact().values
        found = np.zeros((self.total, *compact.shape[1:]), compact.dtype)
        copy_runs(found, self.in_rows, compact, self.in_steps, self.counts)
        return found

    def per_token(self, of_steps: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Each step's flag at its tokens, False elsewhere; (total,)."""
        ends = self.in_rows + self.counts
        # Before each run what no step has, and that again behind the last.
        lengths = np.stack([self.in_rows - np.append(0, ends[:-1])[: len(ends)], self.counts], axis=1).ravel()
        flags = np.stack([np.zeros(len(ends), np.bool_), of_steps[self.steps]], axis=1).ravel()
        behind = self.total - int(lengths.sum())
        return np.repeat(np.append(flags, False), np.append(lengths, behind))


def copy_runs(into: Array, places: Int64s, values: Array, starts: Int64s, counts: Int64s) -> None:
    """Copies runs of values, from each start as many as its count, to these places."""
    if not len(counts):
        return
    goes_on = (places[1:] == (places + counts)[:-1]) & (starts[1:] == (starts + counts)[:-1])
    first = np.flatnonzero(np.append(True, ~goes_on))
    sizes = np.add.reduceat(counts, first)
    for place, start, size in zip(places[first].tolist(), starts[first].tolist(), sizes.tolist(), strict=True):
        into[place : place + size] = values[start : start + size]


Written = Mapping[ShardAddress, Mapping[str, Array]]
"""Of each of the policy's shards, by column, its rows' own values one after another; (n, *shape)."""


class FormBlock(NamedTuple):
    """A tensor of a shard's responses. prefix: of its name. begin, end: its rows. shape: what stands before a value's
    own: rows and width, or tokens."""

    prefix: str
    begin: int
    end: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ShardForm:
    """Where the responses of a shard's rows stand in its tensors.

    blocks: in the order of the rows. leads, lengths: int64 (rows,) elements before each row's own, and how many its own
    are. elsewhere: int64 (rows,), tokens of each response before these, which stand with the row before it, where no
    value of this row is read: zeros take their place. is_real: bool (rows,), False of padding rows. rows: what
    is known of the others.
    """

    blocks: Sequence[FormBlock]
    leads: Int64s
    lengths: Int64s
    elsewhere: Int64s
    is_real: NDArray[np.bool_]
    rows: WrittenRows

    def own_values(self, column: ColumnSpec, tensors: Mapping[str, Array], where: str) -> Array:
        """The rows' own values of a column as it was written; (n, *shape), a view where they stand so.

        tensors: by the names that a shard's have. Raises InvalidArgumentError naming the tensor, what it is and what it
        has to be.
        """
        if column.scope == "row":
            found = _tensor(tensors, column.name, (len(self.is_real),), column, where)[self.is_real]
        else:
            own = [self._of_block(block, column, tensors, where) for block in self.blocks]
            found = own[0] if len(own) == 1 else np.concatenate(own)
        return found

    def names(self, column: ColumnSpec) -> list[str]:
        """The tensors that hold a column."""
        return [column.name] if column.scope == "row" else [block.prefix + column.name for block in self.blocks]

    def _of_block(self, block: FormBlock, column: ColumnSpec, tensors: Mapping[str, Array], where: str) -> Array:
        values = _tensor(tensors, block.prefix + column.name, block.shape, column, where)
        rows = slice(block.begin, block.end)
        leads, lengths, is_real = self.leads[rows], self.lengths[rows], self.is_real[rows]
        starts, counts = starts_of(leads + lengths) + leads, np.where(is_real, lengths, 0)
        sizes = np.where(is_real, self.elsewhere[rows], 0) + counts
        flat = values.reshape(-1, *column.shape)
        if len(flat) == sizes.sum() == counts.sum():
            return flat
        found = np.zeros((int(sizes.sum()), *column.shape), flat.dtype)
        copy_runs(found, starts_of(sizes) + sizes - counts, flat, starts, counts)
        return found


def form_of(shard: Shard, scored: ScoredBatch, config: RunConfig) -> ShardForm:
    begin, end = shard.blocks[0].begin, shard.blocks[-1].end
    placement = shard.placed.placement
    lengths = placement.own["response"][begin:end].copy()
    elsewhere = placement.lengths["response"][begin:end] - lengths
    leads = placement.leads["response"][begin:end].copy()
    if placement.shared is not None:
        leads = placement.own["sequence"][begin:end] - lengths
    totals = np.append(0, np.cumsum(leads + lengths))
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
    return ShardForm(blocks, leads, lengths, elsewhere, is_real, written_rows(rows[is_real], scored, config))


def values_of_steps(
    written: Written, rows: Rows, received: Received, mini_batches: Sequence[MiniBatchPlan], config: RunConfig
) -> dict[str, Extra]:
    """The columns as steps have them: the inverse of what `standing` does. Steps of rows that are in no shard, because
    alignment dropped their groups, get zeros."""
    placed = {
        ShardAddress("policy", part.index, rank): plan.rows[plan.rows >= 0]
        for part in mini_batches
        if part.model == "policy"
        for rank, plan in enumerate(part.ranks)
    }
    own = StepPlaces.of(
        np.concatenate([np.empty(0, np.int64), *placed.values()]), rows, received.steps.response_lengths
    )
    found = {}
    for column in config.written_columns:
        parts = [written[address][column.name] for address in placed]
        if column.scope == "row":
            found[column.name] = _of_rows(column, parts, list(placed.values()), rows, len(received.steps))
        else:
            found[column.name] = _of_responses(column, parts, own, received.steps.response_lengths)
    return found


def _of_rows(column: ColumnSpec, parts: Sequence[Array], placed: Sequence[Int64s], rows: Rows, steps: int) -> Extra:
    """A row's number stands with its path's last step, and zeros with the others. parts: of each shard, whose rows are
    `placed`."""
    of_steps = np.zeros((steps, *column.shape), column.storage)
    for values, order in zip(parts, placed, strict=True):
        of_steps[rows.last[order]] = values
    return Extra(Ragged.from_lengths(of_steps, np.ones(steps, np.int64)), np.ones(steps, np.bool_))


def _of_responses(column: ColumnSpec, parts: Sequence[Array], own: StepPlaces, responses: Int64s) -> Extra:
    """Each token has the value of the row that trains it. parts: of each shard, one after another as `own` has rows.
    responses: int64 (steps,), tokens of each step's response."""
    of_steps = np.zeros((int(responses.sum()), *column.shape), column.storage)
    begin = 0
    for values in parts:
        runs = slice(*np.searchsorted(own.in_rows, [begin, begin + len(values)]).tolist())
        copy_runs(of_steps, own.in_steps[runs], values, own.in_rows[runs] - begin, own.counts[runs])
        begin += len(values)
    return Extra(Ragged.from_lengths(of_steps, responses), np.ones(len(responses), np.bool_))


def _tensor(tensors: Mapping[str, Array], name: str, shape: tuple[int, ...], column: ColumnSpec, where: str) -> Array:
    found = tensors.get(name)
    if found is None:
        raise InvalidArgumentError(f"{where}: {name} is missing; write all tensors of a column together")
    expected = (*shape, *column.shape)
    if found.shape != expected or found.dtype != column.storage:
        raise InvalidArgumentError(
            f"{where}: {name} is {safetensors_name(found.dtype)} {list(found.shape)} and the shard needs "
            f"{safetensors_name(column.storage)} {list(expected)}; write it with that dtype and shape"
        )
    return found
