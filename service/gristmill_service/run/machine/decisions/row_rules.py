"""What rows of a group and of a run have in common: a group's size and tag, and the kinds of rewards, advantages and
log-probabilities of the run's rows. What a table of rows can be checked for by itself is `pipeline.rows.validate`'s."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gristmill._wire.steps import Steps, TrajectoryKey, check_tag
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import MOST_TAGS, RunConfig
from gristmill_service.pipeline.rows.validate import check_advantage_schema, sizes_of
from gristmill_service.run.machine.answers import RewardUpdate
from gristmill_service.run.machine.events import GroupKey, GroupTagged, NewGroup, RowSchema, StoredRow
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


_NAMES = {
    "logprobs": {True: "rollout_logprobs", False: "no rollout_logprobs"},
    "token_rewards": {True: "one reward per response token", False: "one reward a step"},
    "token_advantages": {True: "one advantage per response token", False: "one advantage a trajectory"},
}


def check_schema(steps: Steps, schema: RowSchema, config: RunConfig) -> RowSchema:
    """The run's row schema with what these rows fix of it. Raises InvalidArgumentError where they disagree with it."""
    check_advantage_schema(steps, config)
    if steps.advantages is not None and steps.token_advantages is not None:
        raise InvalidArgumentError(
            f"{steps.name(0)}: advantage is given twice, as one number and per response token; send one of them"
        )
    # Rows that wait for their reward do not say yet of which kind it will be.
    waits = steps.token_rewards is None and bool(steps.rewards_pending.all())
    found = {
        "logprobs": steps.logprobs is not None,
        "token_rewards": None if waits else steps.token_rewards is not None,
        "token_advantages": steps.token_advantages is not None if config.estimator.takes_advantages else None,
    }
    for name, value in found.items():
        before = getattr(schema, name)
        if value is not None and before is not None and value != before:
            raise InvalidArgumentError(
                f"{steps.name(0)}: has {_NAMES[name][value]}, and the rows before it in this run have "
                f"{_NAMES[name][before]}; all rows of a run are alike in this"
            )
    fixed = {name: value for name, value in found.items() if value is not None and value != getattr(schema, name)}
    return replace(schema, **fixed) if fixed else schema


def check_reward_schema(row: StoredRow, update: RewardUpdate, schema: RowSchema) -> RowSchema:
    per_token = update.token_values is not None
    if per_token and update.value is not None:
        raise InvalidArgumentError(f"{row}: reward is given twice, as one number and per response token; send one")
    if schema.token_rewards is not None and schema.token_rewards != per_token:
        raise InvalidArgumentError(
            f"{row}: has {_NAMES['token_rewards'][per_token]}, and rows of this run have "
            f"{_NAMES['token_rewards'][schema.token_rewards]}; give that"
        )
    return replace(schema, token_rewards=per_token)


class NamedTags:
    """The tags that a request names, of groups that have none yet. Refuses those that disagree, or are too many."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._found: dict[GroupKey, str] = {}

    def name(self, key: GroupKey, tag: str, what: str) -> None:
        """what: which row or group of the request names it, for the refusal."""
        if not tag:
            return
        group = self._state.open.get(key)
        known = self._found.get(key) or (group.tag if group else "")
        if known and known != tag:
            raise InvalidArgumentError(
                f"{what}: tag is {tag!r}, and the group has {known!r}; give all rows of a group one tag, or none"
            )
        if not known:
            check_tag(tag, what)
            self._found[key] = tag
            self._check_count(what)

    def of(self, key: GroupKey) -> str:
        return self._found.get(key, "")

    def events(self, admitted: Iterable[NewGroup]) -> list[GroupTagged]:
        """What becomes of open groups. admitted: those that begin with their tags."""
        new = {group.key for group in admitted}
        return [GroupTagged(key, tag) for key, tag in self._found.items() if key in self._state.open and key not in new]

    def _check_count(self, what: str) -> None:
        names = self._state.tags.keys() | self._found.values()
        if len(names) > MOST_TAGS:
            raise InvalidArgumentError(
                f"{what}: the run would have more than {MOST_TAGS} tags ({', '.join(sorted(names)[:5])}, ...); name "
                "the environment or task by the tag, and not the prompt"
            )
