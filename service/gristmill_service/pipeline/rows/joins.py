"""Finds the earlier step that each step joins, which means continues: the prompt begins with the sequence (prompt +
response) of the earlier step.

Most steps extend the previous step; one pass over the batch finds these. For each other step, the earlier steps of its
trajectory are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.columns import Array, Int64s, Ragged, bytes_of
from gristmill._wire.extras import starts_of
from gristmill._wire.steps import Steps
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.rows.validate import Received

NONE = -1
PARTITION = "partition"
_COMPARED_FIRST, _COMPARED_NEXT = 1 << 7, 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class Joins:
    """The step that each step joins, called its parent.

    parents: int64 (steps,), the parent, which is an earlier step of the trajectory; -1 if the step joins none.
    commons: int64 (steps,), the number of tokens that the prompt has in common with the parent's sequence: all of the
        sequence, or fewer tokens if its tail was retokenized; 0 if the step joins none.
    are_plain: whether all parents are the previous step, with all of its tokens in common.
    """

    parents: Int64s
    commons: Int64s
    are_plain: bool = False


def find_joins(received: Received, config: RunConfig) -> Joins:
    """Returns the step that each step joins under the run's merge mode."""
    return _MODES[config.merge](received, config)


def _none(received: Received, config: RunConfig) -> Joins:
    return _plain(received, np.zeros(len(received.steps), np.bool_))


def _before(received: Received, config: RunConfig) -> Joins:
    """Joins each step to the previous step, or to none."""
    settled = joins_before(received, config.columns)
    return _searched(received, settled, config) if config.retokenized_tail else _plain(received, settled)


def _any_earlier(received: Received, config: RunConfig) -> Joins:
    """Joins each step to the earlier step that has the longest prefix in common with its prompt. If there are several,
    joins it to the shortest, of which the fewest tokens are cut, and of several shortest to the latest."""
    return _searched(received, joins_before(received, config.columns) & ~_behind_longer(received), config)


_MODES: dict[str, Callable[[Received, RunConfig], Joins]] = {"none": _none, "prefix": _before, "tree": _any_earlier}
"""The functions of `config.MERGE_MODES`, by name."""


def _plain(received: Received, settled: NDArray[np.bool_]) -> Joins:
    """Joins each settled step to the previous step, and the others to none. settled: bool (steps,)."""
    parents = np.where(settled, np.arange(len(settled)) - 1, NONE)
    commons = np.where(settled, np.roll(received.steps.tokens.lengths, 1), 0)
    return Joins(parents, commons, are_plain=True)


def _searched(received: Received, settled: NDArray[np.bool_], config: RunConfig) -> Joins:
    """Joins each settled step to the previous step, and searches a parent for each of the others.

    The prompt must begin with the parent's sequence, of which the last `retokenized_tail` tokens may differ, but not
    the tokens of the prompt of the path's first step, which becomes the prompt of the row. No column with
    `merge: equal` may differ.
    """
    steps, plain = received.steps, _plain(received, settled)
    parents, commons, bounds = plain.parents, plain.commons, received.trajectory_bounds
    is_open = ~settled
    is_open[bounds[:-1]] = False
    for trajectory in np.unique(received.trajectory_of_step[is_open]).tolist():
        span = slice(int(bounds[trajectory]), int(bounds[trajectory + 1]))
        search = _Search(steps, span, config)
        joins = search.joins(parents[span] - span.start, commons[span], is_open[span])
        parents[span] = np.where(joins.parents < 0, NONE, joins.parents + span.start)
        commons[span] = joins.commons
    return Joins(parents, commons)


def joins_before(received: Received, columns: Sequence[ColumnSpec]) -> NDArray[np.bool_]:
    """Returns for each step whether its prompt begins with the whole previous step, and neither the partition nor a
    column with `merge: equal` differs; bool (steps,)."""
    steps = received.steps
    fits = np.zeros(len(steps), np.bool_)
    fits[1:] = steps.tokens.lengths[:-1] <= steps.prompt_lengths[1:]
    fits[received.trajectory_bounds[:-1]] = False
    joins = extends(steps.tokens, fits)
    if steps.partitions is not None or any(column.merge == "equal" for column in columns):
        for step in np.flatnonzero(joins).tolist():
            joins[step] = not differing(columns, steps, step - 1, step, int(steps.tokens.lengths[step - 1]))
    return joins


def differing(columns: Sequence[ColumnSpec], steps: Steps, before: int, step: int, common: int) -> str:
    """Returns `partition`, or the first column with `merge: equal`, in which a step differs from an earlier step that
    it would join; "" if nothing differs.

    Compares values per row, values of the first `common` tokens, and items, of which the later step may have more. For
    a partial column, compares only tokens for which both steps have a value.
    """
    if steps.partitions is not None and steps.partitions[before] != steps.partitions[step]:
        return PARTITION
    for column in columns:
        if column.merge == "equal" and column.scope != "response" and (extra := steps.extras.get(column.name)):
            one, other = extra.values[before], extra.values[step]
            if column.partial or column.is_ragged:
                one, other = _given_by_both(column, steps, before, step, common)
            elif column.scope == "token":
                one = one[:common]
            # NaN, which some columns allow, equals NaN here.
            same = np.array_equal(one, other[: len(one)], equal_nan=one.dtype.kind == "f")
            if (extra.given[before] != extra.given[step] and not column.partial) or not same:
                return column.name
    return ""


def _given_by_both(column: ColumnSpec, steps: Steps, before: int, step: int, common: int) -> tuple[Array, Array]:
    """Returns the values of a partial or ragged column in both steps, for those of the first `common` tokens that have
    a value in both. For a ragged column, returns the number of values per token, followed by the values."""
    both, starts = (before, step), starts_of(column, steps.part(slice(before, step + 1)))
    one, other = (steps.extras[column.name].values[each] for each in both)
    first, second = int(starts[0]), int(starts[-1])
    if not column.is_ragged:
        begin, end = _overlap(first, len(one), second, len(other), common)
        return one[begin - first : end - first], other[begin - second : end - second]
    offsets, offsets_of_other = (steps.extras[column.offsets_column.name].values[each] for each in both)
    begin, end = _overlap(first, len(offsets) - 1, second, len(offsets_of_other) - 1, common)
    return (
        _lists(one, offsets[begin - first : end - first + 1]),
        _lists(other, offsets_of_other[begin - second : end - second + 1]),
    )


def _overlap(first: int, count: int, second: int, count_of_other: int, common: int) -> tuple[int, int]:
    begin = max(first, second)
    return begin, max(begin, min(first + count, second + count_of_other, common))


def _lists(values: Array, offsets: Array) -> Array:
    return np.append(np.diff(offsets), values[offsets[0] : offsets[-1]]) if len(offsets) > 1 else values[:0]


def extends(tokens: Ragged, fits: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns for each row whether it begins with the whole previous row; bool (rows,).

    fits: bool (rows,), the rows to examine. None of them is shorter than the previous row; the first is False.

    A row that starts at the same address as the previous row extends it, and needs no comparison. The other rows are
    examined from the last to the first. In a chain of rows that extend each other, every row is a prefix of the last,
    longest row. So each previous row is compared with this longest row: only one row per chain is copied to bytes,
    whose `startswith` is a memcmp, and all others are read once, in place.
    """
    if not fits.any():
        return np.zeros(len(tokens), np.bool_)
    data, item = bytes_of(tokens.values), tokens.values.itemsize
    starts, ends = (item * tokens.starts).tolist(), (item * (tokens.starts + tokens.lengths)).tolist()
    joins: list[bool] = []
    longest: bytes | None = None
    start_after, end_after = starts[-1], ends[-1]
    for start, end, fit in zip(starts[-2::-1], ends[-2::-1], fits[:0:-1].tolist(), strict=True):
        if fit and start != start_after:
            if longest is None:
                longest = data[start_after:end_after].tobytes()
            fit = longest.startswith(data[start:end])
        if not fit:
            longest = None
        joins.append(fit)
        start_after, end_after = start, end
    return np.array([False, *reversed(joins)], np.bool_)


def _behind_longer(received: Received) -> NDArray[np.bool_]:
    """Returns for each step whether its trajectory has an earlier step that is longer than the previous step; bool
    (steps,). If none is longer, no earlier step can have a longer prefix in common than a previous step that the prompt
    contains as a whole."""
    lengths = received.steps.tokens.lengths
    is_behind = np.zeros(len(lengths), np.bool_)
    # Offset by trajectory, so that a maximum never carries over from an earlier one.
    ranked = lengths + received.trajectory_of_step * (lengths.max(initial=0) + 1)
    is_behind[1:] = (np.maximum.accumulate(ranked) > ranked)[:-1]
    return is_behind


class _Search:
    """Searches joins within one trajectory. Steps are numbered within it, and arrays are (steps,).

    steps: the steps of the batch. span: the range of the trajectory among them.
    """

    def __init__(self, steps: Steps, span: slice, config: RunConfig) -> None:
        self._steps, self._first, self._config = steps, span.start, config
        self._tokens, self._prompts = steps.tokens.take(span), steps.prompt_lengths[span]
        # The length of the prompt of the first step of each step's path: its own prompt until it joins another step.
        self._roots = self._prompts.copy()

    def joins(self, parents: Int64s, commons: Int64s, is_open: NDArray[np.bool_]) -> Joins:
        """Searches the joins of the open steps. parents, commons: those of the settled steps; not modified."""
        parents, commons = parents.copy(), commons.copy()
        for step in range(1, len(parents)):
            if is_open[step]:
                parents[step], commons[step] = self._join(step, 0 if self._config.merging.branches else step - 1)
            if parents[step] >= 0:
                self._roots[step] = self._roots[parents[step]]
        return Joins(parents, commons)

    def _join(self, step: int, earliest: int) -> tuple[int, int]:
        """Returns the step that a step joins, and the number of common tokens. Considers steps from `earliest` on."""
        prompt = self._tokens[step][: self._prompts[step]]
        best_common, best_length, best = 0, 0, NONE
        for other, length, needed in self._candidates(step, earliest):
            if length < best_common:
                break
            is_one_memory = self._tokens.starts[other] == self._tokens.starts[step]
            common = min(length, len(prompt)) if is_one_memory else common_prefix(self._tokens[other], prompt)
            if common >= needed and not self._keeps_apart(other, step, common):
                best_common, best_length, best = max((best_common, best_length, best), (common, -length, other))
        return best, best_common

    def _keeps_apart(self, other: int, step: int, common: int) -> bool:
        return differing(self._config.columns, self._steps, self._first + other, self._first + step, common) != ""

    def _candidates(self, step: int, earliest: int) -> list[tuple[int, int, int]]:
        """Returns the steps that a step may join, longest first: the number, the length, and how many tokens must be in
        common. The last of these tokens is already compared."""
        starts, lengths = self._tokens.starts[earliest:step], self._tokens.lengths[earliest:step]
        needed = np.maximum(lengths - self._config.retokenized_tail, self._roots[earliest:step])
        fits = np.flatnonzero(needed <= self._prompts[step])
        ends, values = needed[fits] - 1, self._tokens.values
        fits = fits[values[starts[fits] + ends] == values[self._tokens.starts[step] + ends]]
        fits = fits[np.argsort(-lengths[fits])]
        return list(zip((fits + earliest).tolist(), lengths[fits].tolist(), needed[fits].tolist(), strict=True))


def common_prefix(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Returns the length of the common prefix. Compares in blocks, and so stops early at an early difference."""
    shorter, begin, size = min(len(one), len(other)), 0, _COMPARED_FIRST
    while begin < shorter:
        end = min(begin + size, shorter)
        differs = one[begin:end] != other[begin:end]
        at = int(differs.argmax())
        if differs[at]:
            return begin + at
        begin, size = end, max(2 * size, _COMPARED_NEXT)
    return shorter
