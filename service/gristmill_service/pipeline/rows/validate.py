"""Checks the rules between the rows of a batch, and sorts the rows for later stages.

The order is by group (first appearance), then sample, then step. No value is modified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import Int64s
from gristmill._wire.components import from_text
from gristmill._wire.row_fields import MOST_COMPONENTS, TEXT_FIELDS, UNKNOWN
from gristmill._wire.steps import FLOAT32_MAX, Steps, versions_of_tokens
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.rows.comparison import Comparison, comparison_groups


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A batch of steps in order.

    groups: (round, uid) of each prompt group.
    trajectory_bounds: (trajectories + 1,), trajectory t is the steps `bounds[t]:bounds[t + 1]`.
    trajectory_groups: (trajectories,), the group of each.
    group_bounds: (groups + 1,), group g is the trajectories `bounds[g]:bounds[g + 1]`.
    tags: the environment or task of each group, "" for a group without; empty if no group has one.
    compared: the groups of trajectories that estimators compare.
    """

    steps: Steps
    groups: list[tuple[int, str]]
    trajectory_bounds: Int64s
    trajectory_groups: Int64s
    group_bounds: Int64s
    tags: list[str]
    compared: Comparison

    @property
    def components(self) -> list[dict[str, float]] | None:
        """The components of each trajectory's reward, empty for one without; None if no trajectory has any."""
        texts = self.steps.reward_components
        if texts is None or not any(texts):
            return None
        return [from_text(texts[last]) for last in (self.trajectory_bounds[1:] - 1).tolist()]

    @property
    def agents(self) -> list[str] | None:
        """The agent of each trajectory, "" for one without; None if rows have none."""
        return _of_trajectories(self.steps.agents, self.trajectory_bounds)

    @property
    def episodes(self) -> list[str] | None:
        """The episode of each trajectory, "" for one without; None if rows have none."""
        return _of_trajectories(self.steps.episodes, self.trajectory_bounds)

    @property
    def trajectory_of_step(self) -> Int64s:
        lengths = np.diff(self.trajectory_bounds)
        return np.repeat(np.arange(len(lengths)), lengths)


def _of_trajectories(texts: Sequence[str] | None, trajectory_bounds: Int64s) -> list[str] | None:
    if texts is None or not any(texts):
        return None
    return [texts[first] for first in trajectory_bounds[:-1].tolist()]


def receive(steps: Steps, config: RunConfig) -> Received:
    """Sorts and checks a batch.

    Raises InvalidArgumentError that names the trajectory, the field, the value and the remedy.
    """
    steps, groups, group_of_step = _ordered(steps)
    starts = _trajectory_starts(group_of_step, steps.samples)
    bounds = np.append(starts, len(steps))
    trajectory_groups = group_of_step[starts]
    group_bounds = np.searchsorted(trajectory_groups, np.arange(len(groups) + 1))
    _check_samples(steps, config)
    _check_group_sizes(steps, bounds, group_bounds, config)
    _check_steps(steps, bounds, config)
    _check_texts(steps, bounds)
    _check_rewards(steps)
    _check_advantages(steps, bounds, config)
    if steps.reward_components is not None or config.estimator.reads_components:
        _check_components(steps, config)
    check_lambda(steps, config)
    check_lengths(steps, config)
    check_costs(steps, config)
    check_partitions(steps, config)
    return Received(
        steps=steps,
        groups=groups,
        trajectory_bounds=bounds,
        trajectory_groups=trajectory_groups,
        group_bounds=group_bounds,
        tags=_group_tags(steps, group_of_step, len(groups)),
        compared=comparison_groups(
            trajectory_groups,
            group_bounds,
            _of_trajectories(steps.agents, bounds),
            _of_trajectories(steps.episodes, bounds),
            config.episode_agents,
        ),
    )


def _group_tags(steps: Steps, group_of_step: Int64s, groups: int) -> list[str]:
    """Returns each group's tag, "" for a group without; empty if no group has one. Rejects groups with two tags."""
    if steps.tags is None:
        return []
    tags = [""] * groups
    for row, (group, tag) in enumerate(zip(group_of_step.tolist(), steps.tags, strict=True)):
        known = tags[group]
        if tag and known and tag != known:
            raise InvalidArgumentError(
                f"{steps.name(row)}: tag {tag!r} differs from the group's tag {known!r}; use one tag per group"
            )
        tags[group] = known or tag
    return tags if any(tags) else []


def _ordered(steps: Steps) -> tuple[Steps, list[tuple[int, str]], Int64s]:
    groups, group_of_step = _groups(steps)
    if not _is_ordered(group_of_step, steps.samples, steps.steps):
        order = np.lexsort((steps.steps, steps.samples, group_of_step))
        steps, group_of_step = steps.take(order), group_of_step[order]
    return steps, groups, group_of_step


def _groups(steps: Steps) -> tuple[list[tuple[int, str]], Int64s]:
    """Returns (round, uid) of each group, by first appearance, and the group of each step, int64 (steps,)."""
    uids = list(dict.fromkeys(steps.uids))
    numbers = dict(zip(uids, range(len(uids)), strict=True))
    group_of_step = np.fromiter(map(numbers.__getitem__, steps.uids), np.int64, len(steps))
    rounds = steps.rounds
    if not len(rounds) or (rounds == rounds[0]).all():
        return [(int(rounds[0]), uid) for uid in uids], group_of_step
    # Rounds are int32, so a round and the number of a uid fit into an int64.
    keys, first, inverse = np.unique((group_of_step << 32) + rounds, return_index=True, return_inverse=True)
    appearance = np.argsort(first)
    places = np.empty(len(keys), np.int64)
    places[appearance] = np.arange(len(keys))
    return [(int(rounds[row]), steps.uids[row]) for row in first[appearance].tolist()], places[inverse]


def _is_ordered(*keys: NDArray[Any]) -> bool:
    """Returns whether rows are sorted by these keys, the first key being the most significant."""
    tied = np.True_
    for key in keys:
        before, after = key[:-1], key[1:]
        if (tied & (before > after)).any():
            return False
        tied = tied & (before == after)
    return True


def _trajectory_starts(group_of_step: Int64s, samples: NDArray[np.int32]) -> Int64s:
    if not len(samples):
        return np.empty(0, np.int64)
    changes = (np.diff(group_of_step) != 0) | (np.diff(samples) != 0)
    return np.concatenate([[0], np.flatnonzero(changes) + 1])


def _check_samples(steps: Steps, config: RunConfig) -> None:
    samples = config.most_samples + config.surplus
    outside = np.flatnonzero(steps.samples >= samples)
    if outside.size:
        row = int(outside[0])
        raise InvalidArgumentError(
            f"{steps.name(row)}: sample {steps.samples[row]} is not in 0..{samples - 1} ({sizes_of(config)}); renumber "
            "it"
        )


def sizes_of(config: RunConfig) -> str:
    """Returns the settings that determine a group's samples, for an error message."""
    limit = config.max_samples_per_prompt
    named = (
        f"n_samples_per_prompt: {config.n_samples_per_prompt}" if limit is None else f"max_samples_per_prompt: {limit}"
    )
    return f"{named} with surplus: {config.surplus}" if config.surplus else named


def _check_group_sizes(steps: Steps, bounds: Int64s, group_bounds: Int64s, config: RunConfig) -> None:
    """Rejects a group with too many trajectories, such as surplus samples."""
    large = np.flatnonzero(np.diff(group_bounds) > config.most_samples)
    if large.size:
        group = int(large[0])
        samples = int(group_bounds[group + 1] - group_bounds[group])
        raise InvalidArgumentError(
            f"uid {steps.uids[int(bounds[group_bounds[group]])]!r}: the group has {samples} samples, and the limit is "
            f"{config.most_samples} ({sizes_of(config)}); leave the surplus samples out, because the file does not "
            "record which samples completed first"
        )


def _check_steps(steps: Steps, bounds: Int64s, config: RunConfig) -> None:
    lengths = np.diff(bounds)
    if not config.step_wise and (lengths > 1).any():
        row = int(bounds[int((lengths > 1).argmax())])
        raise InvalidArgumentError(
            f"{steps.key(row)}: has {lengths.max()} steps (or one step twice), and step_wise: false allows one; "
            "set step_wise: true for multi-turn trajectories"
        )
    expected = np.arange(len(steps)) - np.repeat(bounds[:-1], lengths)
    wrong = np.flatnonzero(steps.steps != expected)
    if wrong.size:
        row = int(wrong[0])
        step = int(steps.steps[row])
        problem = "occurs twice" if step < expected[row] else f"is there and step {expected[row]} is missing"
        raise InvalidArgumentError(f"{steps.key(row)}: step {step} {problem}; number the steps 0..T-1, each once")
    last = np.zeros(len(steps), np.bool_)
    last[bounds[1:] - 1] = True
    wrong = np.flatnonzero(steps.is_last_steps != last)
    if wrong.size:
        row = int(wrong[0])
        problem = "is false on the last step" if last[row] else "is true, and later steps follow"
        raise InvalidArgumentError(f"{steps.name(row)}: is_last_step {problem}; set it only on the last step")


def _check_texts(steps: Steps, bounds: Int64s) -> None:
    """Rejects a trajectory with two agents or episodes."""
    for one in TEXT_FIELDS:
        texts = getattr(steps, one.name)
        if not one.of_trajectory or texts is None:
            continue
        for begin, end in pairwise(bounds.tolist()):
            for row in range(begin + 1, end):
                if texts[row] != texts[begin]:
                    raise InvalidArgumentError(
                        f"{steps.name(row)}: {one.key} {texts[row]!r} differs from {texts[begin]!r} on step 0; send "
                        "the same on every step of a trajectory"
                    )


def _check_rewards(steps: Steps) -> None:
    pending = np.flatnonzero(steps.rewards_pending)
    if pending.size:
        raise InvalidArgumentError(f"{steps.name(int(pending[0]))}: reward is missing; set it in every row")


def check_advantage_schema(steps: Steps, config: RunConfig) -> None:
    """Requires advantages if `advantage_estimator` is none, and rejects them otherwise, or if `whiten` does not take
    them. Rejects rows without the log-probabilities from which their KL is computed. steps: at least one row."""
    check_rollout_logprobs(steps, config)
    has_advantages = steps.advantages is not None or steps.token_advantages is not None
    if has_advantages != (config.estimator.takes_advantages):
        remedy = "leave it out, or set advantage_estimator: none" if has_advantages else "send one with each row"
        raise InvalidArgumentError(
            f"{steps.name(0)}: advantage is {'set' if has_advantages else 'missing'} with advantage_estimator: "
            f"{config.advantage_estimator}; {remedy}"
        )
    if steps.token_advantages is not None and config.whiten == "trajectories":
        raise InvalidArgumentError(
            f"{steps.name(0)}: advantage has one number per token, and whiten: trajectories needs one per trajectory; "
            "send that, or use whiten: batch or mini_batch"
        )


def check_rollout_logprobs(steps: Steps, config: RunConfig) -> None:
    reference = config.kl_in_reward
    needs = reference is not None and reference.estimator is not None and config.kl_from == "rollout_logprobs"
    if needs and steps.logprobs is None and steps.tokens.values.size:
        raise InvalidArgumentError(
            f"{steps.name(0)}: rollout_logprobs is missing, but kl_from: rollout_logprobs computes the KL from it; "
            "send it, or set kl_from: old_logprobs"
        )


def _check_components(steps: Steps, config: RunConfig) -> None:
    names: tuple[str, ...] = ()
    # A lengths file has no components.
    for row in np.flatnonzero(steps.is_last_steps).tolist() if steps.tokens.values.size else ():
        names = checked_components(steps, row, names, config)


def checked_components(steps: Steps, row: int, known: tuple[str, ...], config: RunConfig) -> tuple[str, ...]:
    """Returns the names of the components that trajectories of the run have, including those of a last step.

    known: the names before it. Raises InvalidArgumentError naming the row if there are too many, or, if the estimator
    reads components, if they are not the same as those of other trajectories and those with weights.
    """
    names = () if steps.reward_components is None else tuple(from_text(steps.reward_components[row]))
    if config.estimator.reads_components:
        _check_read_components(steps, row, names, known, config)
        return names
    new = [name for name in names if name not in known]
    if len(known) + len(new) > MOST_COMPONENTS:
        raise InvalidArgumentError(
            f"{steps.name(row)}: reward_components has {_listed(new)}, which would be more than the {MOST_COMPONENTS} "
            f"names that a run may have ({_listed(known[:5])}, ...); use fewer"
        )
    return (*known, *new) if new else known


def _check_read_components(
    steps: Steps, row: int, names: tuple[str, ...], others: tuple[str, ...], config: RunConfig
) -> None:
    """Rejects a last step without the components that the estimator reads. others: the names in the `reward_components`
    of the run's other trajectories, none before the first."""
    weights = tuple(sorted(config.component_weights))
    if not names:
        problem = f"is missing, and advantage_estimator: {config.advantage_estimator} reads it; send it"
    elif weights and names != weights:
        problem = f"has {_listed(names)}, and component_weights has {_listed(weights)}; set a weight for each (0: for "
        problem += "metrics alone), and send each"
    elif others not in ((), names):
        problem = f"has {_listed(names)}, and other trajectories of this run have {_listed(others)}, which "
        problem += f"advantage_estimator: {config.advantage_estimator} compares; send the same names"
    else:
        return
    raise InvalidArgumentError(f"{steps.name(row)}: reward_components {problem} with each trajectory's last step")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def check_partitions(steps: Steps, config: RunConfig) -> None:
    """Rejects partitions in a run whose mini-batches have a fixed number of rows."""
    if config.mini_batch_unit == "sequence" and steps.partitions is not None and any(steps.partitions):
        row = next(row for row, text in enumerate(steps.partitions) if text)
        raise InvalidArgumentError(
            f"{steps.name(row)}: partition {steps.partitions[row]!r} would have padding rows of its own, and with "
            "mini_batch_unit: sequence a mini-batch has a fixed number of rows; omit partition, or create the run with "
            "mini_batch_unit: prompt"
        )


def check_lengths(steps: Steps, config: RunConfig) -> None:
    """Rejects rows that no size of `pad_packed_to` holds."""
    largest = max(config.pad_packed_to, default=None)
    if largest is None:
        return
    tokens = config.padded(steps.sequence_lengths)
    longer = np.flatnonzero(tokens > largest)
    if longer.size:
        row = int(longer[0])
        raise InvalidArgumentError(
            f"{steps.name(row)}: {steps.sequence_lengths[row]} tokens are padded to {tokens[row]}, and the largest "
            f"size of pad_packed_to is {largest}; send shorter rows, or create the run with a larger size"
        )


def check_versions(steps: Steps, config: RunConfig) -> None:
    """Rejects rows that train tokens of an unknown policy version, if `stale` keeps old tokens out of the training. A
    rule of runs: the rows of a file may lack versions."""
    if config.max_staleness is None or config.stale == "count":
        return
    if steps.token_versions is None and (steps.policy_versions != UNKNOWN).all():
        return
    versions, mask = versions_of_tokens(steps).compact(), steps.loss_mask.compact()
    unknown = np.flatnonzero((versions.values == UNKNOWN) & (mask.values != 0))
    if unknown.size:
        row = int(np.searchsorted(mask.starts + mask.lengths, unknown[0], side="right"))
        raise InvalidArgumentError(
            f"{steps.name(row)}: trains tokens of policy version -1, which is unknown, and the run has stale: "
            f"{config.stale} with max_staleness {config.max_staleness}; send policy_version (or policy_versions, one "
            "per token) of the weights that sampled the row, 0 before any was announced, or set loss_mask 0"
        )


def check_lambda(steps: Steps, config: RunConfig) -> None:
    """Rejects rows with a λ outside of 0..1, if the estimator reads λ from a column."""
    name = config.lambda_column
    if name is None or name not in steps.extras:
        return
    values = steps.extras[name].values.compact().values
    outside = np.flatnonzero(~((values >= 0) & (values <= 1)))
    if outside.size:
        row = int(outside[0])
        raise InvalidArgumentError(
            f"{steps.name(row)}: {name} is {values[row]}, and lambda reads it; send a number from 0 to 1"
        )


def check_costs(steps: Steps, config: RunConfig) -> None:
    """Rejects rows with a negative cost, if `flops` reads a column."""
    name = None if config.flops is None else config.flops.column
    if name is None or name not in steps.extras:
        return
    values = steps.extras[name].values.compact().values
    wrong = np.flatnonzero(~((values >= 0) & (values <= FLOAT32_MAX)))
    if wrong.size:
        row = int(wrong[0])
        raise InvalidArgumentError(
            f"{steps.name(row)}: {name} is {values[row]}, and flops adds it to the row's cost; send 0 or more"
        )


def _check_advantages(steps: Steps, bounds: Int64s, config: RunConfig) -> None:
    if len(steps):
        check_advantage_schema(steps, config)
    if steps.advantages is not None:
        first = np.repeat(steps.advantages[bounds[:-1]], np.diff(bounds))
        differs = np.flatnonzero(steps.advantages != first)
        if differs.size:
            row = int(differs[0])
            raise InvalidArgumentError(
                f"{steps.name(row)}: advantage {steps.advantages[row]} differs from {first[row]} on step 0; send the "
                "same on every step of a trajectory, or one per response token"
            )
