"""The rows of a shard that trainers write columns for: what is written is judged where it can be refused by its row.

A value that would fail the whole batch later, when everything is there, is refused when it comes: one that is not
finite, or, where credit is computed of it, whose sums float32 may not hold, or whose KL with the other log-probability
is such.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.column_spec import ColumnSpec, is_finite
from gristmill._wire.columns import Array, Int64s, Ragged, starts_of
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import KlInReward, RunConfig
from gristmill_service.pipeline.credit.credit_columns import MOST, credit_columns
from gristmill_service.pipeline.credit.kl import kl
from gristmill_service.pipeline.rows.merge import Rows
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
        if max(1.0, abs(coef)) * _largest(values) <= MOST:
            return
        outside = np.flatnonzero(~(max(1.0, abs(coef)) * np.abs(values.astype(np.float64)) <= MOST))
        if outside.size:
            at = int(outside[0])
            times = "" if coef == 1 else f" with the coefficient {coef}"
            raise InvalidArgumentError(
                f"{where}: {self._name(column, at)} is {values[at]}, which is too large to be added up in "
                f"float32{times}; scale it down to at most {MOST:g}"
            )

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
        with np.errstate(over="ignore", invalid="ignore"):
            estimates = reference.coef * kl(ours.astype(np.float64), theirs.astype(np.float64), reference.estimator)
        outside = np.flatnonzero(~(np.abs(estimates) <= MOST) & self.trained)
        if outside.size:
            at = int(outside[0])
            raise InvalidArgumentError(
                f"{where}: {self._name(column, at)} is {values[at]}, and the KL is {estimates[at]}, computed from the "
                f"log-probabilities {ours[at]} and {theirs[at]} (ref_logprobs); check that both are of the same "
                "tokens, or use the estimator k1 or k2"
            )

    def _name(self, column: ColumnSpec, at: int) -> str:
        """Names a value by its row and its place in the row's response."""
        row = at if column.scope == "row" else int(np.searchsorted(self.ends, at, side="right"))
        place = "" if column.scope == "row" else f"[{at - (int(self.ends[row - 1]) if row else 0)}]"
        return f"uid {self.uids[row]!r} sample {self.samples[row]} step {self.lasts[row]}: {column.name}{place}"


def _largest(values: Array) -> float:
    """The largest magnitude; NaN where one is."""
    return max(abs(float(values.min(initial=0))), abs(float(values.max(initial=0))))


def _surely_fits(ours: Array, theirs: Array, reference: KlInReward) -> bool:
    """Whether no KL is too large, for none is further from 0 than that of the largest difference there may be."""
    assert reference.estimator is not None, "checked by who calls"
    furthest = np.float64(_largest(ours) + _largest(theirs))
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
