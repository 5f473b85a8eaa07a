"""How many samples a group has: as many as it was begun with, else as many as the run says."""

from __future__ import annotations

from collections.abc import Sequence

from gristmill._wire.steps import TrajectoryKey
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import RunConfig
from gristmill_service.pipeline.rows.validate import sizes_of
from gristmill_service.run.machine.events import GroupKey, NewGroup, StoredRow
from gristmill_service.run.machine.groups import Group
from gristmill_service.run.machine.state import State


def check_sizes(state: State, wanted: Sequence[NewGroup], config: RunConfig) -> None:
    """Refuses a size that no group may have, and one that differs from the size that the group has already."""
    sizes: dict[GroupKey, int] = {}
    for key, samples, _ in wanted:
        if not 0 <= samples <= config.most_samples:
            raise InvalidArgumentError(
                f"{key}: n_samples is {samples}, and {_most(config)} allows 1..{config.most_samples}; give a number of "
                "these, give 0 for the run's n_samples_per_prompt, or raise max_samples_per_prompt"
            )
        if not samples:
            continue
        group = state.open.get(key)
        known = sizes.setdefault(key, samples) if group is None else group.samples
        if known != samples:
            raise InvalidArgumentError(
                f"{key}: n_samples is {samples}, and the group was begun with {known}; give the same, or begin it in "
                "another round"
            )


def check_sample(trajectory: TrajectoryKey, sample: int, group: Group | None, config: RunConfig) -> None:
    """Refuses a sample that the group has not. group: None where nothing is known of its size."""
    samples = config.most_samples + config.surplus if group is None else group.sampled
    if not 0 <= sample < samples:
        allows = sizes_of(config) if group is None else _size_of(group, config)
        raise _no_sample(trajectory, sample, samples, allows)


def samples_of(group: Group | None, config: RunConfig) -> int:
    """How many samples a group has. None: one that begins with a row, and so has the run's own size."""
    return config.n_samples_per_prompt + config.surplus if group is None else group.sampled


def no_sample(row: StoredRow, group: Group | None, config: RunConfig) -> InvalidArgumentError:
    """The refusal of a row whose sample is beyond `samples_of`."""
    if group is not None:
        own = _size_of(group, config)
    else:
        own = f"n_samples_per_prompt: {config.n_samples_per_prompt}{_with_surplus(config.surplus)}"
        if config.most_samples > config.n_samples_per_prompt:
            own += " (the group was not begun with n_samples of its own)"
    return _no_sample(row, row.trajectory.sample, samples_of(group, config), own)


def _size_of(group: Group, config: RunConfig) -> str:
    is_own = group.samples != config.n_samples_per_prompt
    size = "the group's n_samples" if is_own else "n_samples_per_prompt"
    return f"{size}: {group.samples}{_with_surplus(group.surplus)}"


def _with_surplus(surplus: int) -> str:
    return f" with surplus: {surplus}" if surplus else ""


def _no_sample(row: StoredRow | TrajectoryKey, sample: int, samples: int, allows: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{row}: sample is {sample}, and {allows} allows 0..{samples - 1}; number samples from 0, or begin the "
        "group with more (max_samples_per_prompt)"
    )


def _most(config: RunConfig) -> str:
    name = "n_samples_per_prompt" if config.max_samples_per_prompt is None else "max_samples_per_prompt"
    return f"{name}: {config.most_samples}"
