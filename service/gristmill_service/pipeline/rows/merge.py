"""Merges steps of a trajectory that extend each other into one row.

Two steps can be merged if the tokens of the earlier step are a prefix of the later step's prompt. The merged row then
consists of the last step's tokens, and its response begins where that of the first step does: nothing is concatenated,
and rows are indices. Source: SkyRL #1479. If several steps continue the same step, each has a separate row, and these
rows share the path to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s, Ragged
from gristmill._wire.row_fields import UNKNOWN
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.rows.joins import Joins, find_joins
from gristmill_service.pipeline.rows.validate import Received


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Training rows as paths of steps: row r visits `steps[edges[r]:edges[r + 1]]`, all of one trajectory, in order.

    A row's tokens are those of the last step on its path; the first `prompt_lengths[r]` of them are its prompt, the
    rest its response. Visit v contributes to the response, from index `starts[v]`, the first `kept[v]` tokens of the
    response of step `steps[v]`; tokens between the end of the visit before and `starts[v]` are observation. The first
    `shared[v]` of the kept tokens are trained by an earlier row: here they have loss_mask 0.

    So each token is trained once, even where rows share steps: `shared` is the most that any earlier row kept, but no
    more than `kept`. A path's last step is kept whole and shares nothing, so that it ends the row.

    edges: int64 (rows + 1,).
    steps: int64 (visits,), indices of the batch's steps as received; each is on a path, some on several.
    starts, kept, shared: int64 (visits,), in tokens. starts is 0 where a path begins, and never less than the end of
    the
        visit before.
    trajectories, prompt_lengths, lengths: int64 (rows,). policy_versions: int32 (rows,), of its oldest step.
    """

    edges: Int64s
    steps: Int64s
    starts: Int64s
    kept: Int64s
    shared: Int64s
    trajectories: Int64s
    prompt_lengths: Int64s
    lengths: Int64s
    policy_versions: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def first(self) -> Int64s:
        """The first step on each row's path; int64 (rows,)."""
        return self.steps[self.edges[:-1]]

    @property
    def last(self) -> Int64s:
        """The last step on each row's path, which has the row's tokens; int64 (rows,)."""
        return self.steps[self.edges[1:] - 1]

    @property
    def response_lengths(self) -> Int64s:
        return self.lengths - self.prompt_lengths

    @property
    def ends(self) -> Int64s:
        """Where each visit ends in its row's response; int64 (visits,)."""
        return self.starts + self.kept

    @property
    def observed(self) -> Int64s:
        """How many observation tokens are between each visit and the previous one of its row; int64 (visits,)."""
        ends_before = np.append(0, self.ends)[:-1]
        ends_before[self.edges[:-1]] = 0
        observed: Int64s = self.starts - ends_before
        return observed

    def owns_reward(self, lengths: Int64s) -> NDArray[np.bool_]:
        """Returns whether each visit has its step's scalar reward, so that every reward is in one row: the first that
        keeps the step's last token, or, where none does, the first that keeps one; bool (visits,).

        lengths: int64 (steps,), of the responses.
        """
        is_first = (self.shared == 0) & (self.kept > 0)
        is_whole = (self.kept == lengths[self.steps]) & (self.shared < self.kept)
        is_cut = kept_tokens(self, len(lengths)).most < lengths
        owned: NDArray[np.bool_] = np.where(is_cut[self.steps], is_first, is_whole)
        return owned

    def roots(self, steps: int) -> Int64s:
        """Returns the length of the prompt with which each step's path begins; int64 (steps,)."""
        roots = np.zeros(steps, np.int64)
        roots[self.steps] = self.per_visit(self.prompt_lengths)
        return roots

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """Whether each visit is the first of its step; bool (visits,)."""
        is_first = np.ones(len(self.steps), np.bool_)
        if len(self.steps) > self.steps.max(initial=-1) + 1:
            is_first[:] = False
            is_first[np.unique(self.steps, return_index=True)[1]] = True
        return is_first

    def per_visit(self, values: NDArray[Any]) -> NDArray[Any]:
        """Repeats each row's value for its visits. values: (rows,); the result: (visits,)."""
        return np.repeat(values, np.diff(self.edges))

    def standing(self, values: Ragged) -> Ragged:
        """Returns the values of each visit's kept tokens, trained in its row or not.

        values: (steps,), one per response token. The result: (visits,), `kept` of each; a view.
        """
        return Ragged(values.values, values.starts[self.steps], self.kept)

    def trained(self, values: Ragged) -> Ragged:
        """Returns the values of the tokens that each visit's row trains: `kept - shared` of each visit; a view."""
        return Ragged(values.values, values.starts[self.steps] + self.shared, self.kept - self.shared)

    def trained_in(self, edges: Int64s) -> Int64s:
        """Returns the row that trains each response token of the batch, -1 where none does; int64 (response tokens,).

        edges: int64 (steps + 1,), step i has the response tokens `edges[i]:edges[i + 1]`.
        """
        row_of_token = np.full(edges[-1], -1)
        # Each row that trains tokens of a step continues where the row before it ended.
        order = np.argsort(self.steps, kind="stable")
        visits = order[(self.kept > self.shared)[order]]
        lengths = (self.kept - self.shared)[visits]
        starts = edges[self.steps[visits]] + self.shared[visits]
        tokens = np.arange(lengths.sum()) + np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        row_of_token[tokens] = np.repeat(self.per_visit(np.arange(len(self)))[visits], lengths)
        return row_of_token


def merge_rows(received: Received, config: RunConfig) -> Rows:
    """Merges the batch's steps into rows."""
    joins, count = find_joins(received, config), len(received.steps)
    if not joins.are_plain:
        return _rows_of_joins(received, joins)
    edges = np.append(np.flatnonzero(joins.parents < 0), count)
    kept, shared = received.steps.response_lengths, np.zeros(count, np.int64)
    return rows_of_paths(received, edges, np.arange(count), kept, shared)


def rows_of_paths(
    received: Received, edges: Int64s, path: Int64s, kept: Int64s, shared: Int64s, begins: Int64s | None = None
) -> Rows:
    """Returns the rows of these paths. edges, kept, shared: see `Rows`. path: `Rows.steps`.

    begins: int64 (visits,), where each visit begins in its row's tokens, not before the end of the visit before it;
        by default where its step's prompt ends.
    """
    steps, first, last = received.steps, path[edges[:-1]], path[edges[1:] - 1]
    prompt_lengths = steps.prompt_lengths[first]
    begins = steps.prompt_lengths[path] if begins is None else begins
    return Rows(
        edges=edges,
        steps=path,
        starts=begins - np.repeat(prompt_lengths, np.diff(edges)),
        kept=kept,
        shared=shared,
        trajectories=received.trajectory_of_step[first],
        prompt_lengths=prompt_lengths,
        lengths=steps.tokens.lengths[last],
        policy_versions=_oldest(steps.policy_versions[path], edges[:-1]),
    )


def _rows_of_joins(received: Received, joins: Joins) -> Rows:
    """Returns one row for each step that no other step joins: the path to it."""
    steps = received.steps
    edges, path = _paths(joins.parents)
    prompts, responses = steps.prompt_lengths[path], steps.response_lengths[path]
    # How many tokens of each visit's sequence later joins leave: all of a path's last.
    left = np.append(joins.commons[path[1:]], 0)[: len(path)]
    left[edges[1:] - 1] = steps.tokens.lengths[path[edges[1:] - 1]]
    left = _least_behind(left, edges)
    kept = np.clip(left - prompts, 0, responses)
    return rows_of_paths(received, edges, path, kept, _most_before(kept, path), np.minimum(prompts, left))


def _paths(parents: Int64s) -> tuple[Int64s, Int64s]:
    """Returns the paths to each step that no other step joins, as `edges` and `steps` of `Rows`.

    The first step that joins another step continues its row, and each later one begins a new row. Rows are in the order
    in which they begin.
    """
    steps = np.arange(len(parents))
    joined = np.flatnonzero(parents >= 0)
    if np.array_equal(parents[joined], joined - 1):
        return np.append(np.flatnonzero(parents < 0), len(parents)), steps
    goes_on = joined[np.unique(parents[joined], return_index=True)[1]]
    begins = steps.copy()
    begins[goes_on] = parents[goes_on]
    while not np.array_equal(further := begins[begins], begins):
        begins = further
    ends = np.delete(steps, parents[goes_on])
    return _ancestry(parents, ends[np.argsort(begins[ends])])


def _ancestry(parents: Int64s, ends: Int64s) -> tuple[Int64s, Int64s]:
    """Returns the paths to these steps, each from a step that joins no other, as `edges` and `steps` of `Rows`."""
    rows, at = np.arange(len(ends)), ends
    visits = []
    while len(at):
        visits.append((rows, at))
        at = parents[at]
        rows, at = rows[at >= 0], at[at >= 0]
    row_of_visit, path = (np.concatenate(parts) for parts in zip(*visits, strict=True))
    order = np.lexsort((path, row_of_visit))
    return np.append(0, np.cumsum(np.bincount(row_of_visit))), path[order]


def _least_behind(values: Int64s, edges: Int64s) -> Int64s:
    """Returns the minimum of each visit's value and those of later visits of its row. values: (visits,), not
    negative."""
    # Offset by row, so that a minimum never carries over to an earlier one.
    ranks = np.repeat(np.arange(len(edges) - 1), np.diff(edges)) * (values.max(initial=0) + 1)
    least: Int64s = np.minimum.accumulate((values + ranks)[::-1])[::-1] - ranks
    return least


def _most_before(kept: Int64s, path: Int64s) -> Int64s:
    """Returns the maximum that an earlier row kept of each visit's step, at most what the visit keeps; (visits,)."""
    order = np.argsort(path, kind="stable")
    by_step, kept_by_step = path[order], kept[order]
    # Offset by step, so that a maximum never carries over to a later one.
    ranks = by_step * (kept.max(initial=0) + 1)
    most = np.append(0, np.maximum.accumulate(kept_by_step + ranks)[:-1])[: len(path)] - ranks
    shared = np.empty_like(kept)
    # A step's first visit has nothing before it.
    shared[order] = np.clip(most, 0, kept_by_step)
    return shared


def _oldest(versions: NDArray[np.int32], begins: Int64s) -> NDArray[np.int32]:
    """Returns the lowest known policy version of each row's visits; unknown if none is known. begins: (rows,)."""
    if not len(begins):
        return versions[:0]
    newest = np.iinfo(np.int32).max
    oldest = np.minimum.reduceat(np.where(versions == UNKNOWN, newest, versions), begins)
    return np.where(oldest == newest, UNKNOWN, oldest).astype(np.int32)


def visit_loss_tokens(rows: Rows, loss_mask: Ragged) -> Int64s:
    """Counts the tokens of each visit with loss_mask 1 that its row trains; int64 (visits,).

    loss_mask: uint8 (steps,) over the response; a lengths file has none, and all its tokens count.
    """
    return ones(rows.trained(loss_mask))


class KeptTokens(NamedTuple):
    """How many tokens of each step's response rows keep: at most, and the first row that keeps one; int64 (steps,)."""

    most: Int64s
    first: Int64s

    def of(self, steps: slice) -> KeptTokens:
        return KeptTokens(self.most[steps], self.first[steps])


def kept_tokens(rows: Rows, steps: int) -> KeptTokens:
    """Returns how many tokens of each step's response rows keep."""
    most, first = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
    np.maximum.at(most, rows.steps, rows.kept)
    visits = np.flatnonzero((rows.shared == 0) & (rows.kept > 0))
    first[rows.steps[visits]] = rows.kept[visits]
    return KeptTokens(most, first)


def realigned_tokens(rows: Rows, loss_mask: Ragged) -> tuple[int, int]:
    """Counts the sampled tokens that are in no row, because a later prompt contains other tokens instead, and those
    with loss_mask 1 among them. loss_mask: uint8 (steps,) over the response."""
    most = kept_tokens(rows, len(loss_mask)).most
    lost = Ragged(loss_mask.values, loss_mask.starts + most, loss_mask.lengths - most)
    return lost.total, int(ones(lost).sum())


def ones(masks: Ragged) -> Int64s:
    """Counts the ones in each mask. masks: uint8 of 0 and 1."""
    if not masks.values.size or masks.values.min() == 1:
        # True of most batches: tokens that the policy did not sample are in prompts.
        return masks.lengths
    compact = masks.compact()
    counts, some = np.zeros(len(masks), np.int64), masks.lengths > 0
    # Sums of uint32 are several times faster than those of int64, and a step has fewer tokens than that holds.
    counts[some] = np.add.reduceat(compact.values, compact.starts[some], dtype=np.uint32)
    return counts
