"""Converts SkyRL's `GeneratorOutput`, a mapping of lists, to rows.

No framework is imported. Tensors are read through NumPy's array protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from gristmill._client.rollout.step_writer import plain
from gristmill._converters.keys import Choice, Keys, Row
from gristmill._converters.refusals import refusing
from gristmill._converters.rows import tagged
from gristmill._converters.values import routes
from gristmill._wire.foreign_names import renamings
from gristmill._wire.lists import size_of
from gristmill._wire.values import is_vector
from gristmill.errors import InvalidArgumentError

_WHAT = "generator output"
# Maps keys of the output to fields of a row.
_COLUMNS = {
    "prompt_token_ids": "prompt_token_ids",
    "response_ids": "response_ids",
    "loss_masks": "loss_mask",
    "rollout_logprobs": "rollout_logprobs",
    "stop_reasons": "stop_reason",
}
_IDENTITY = ("trajectory_ids", "uids", "samples", "is_last_step", "rewards")
# All other keys of SkyRL's `GeneratorOutput` (skyrl/train/generators/base.py), and why they are not fields.
_KEYS = Keys(
    _WHAT,
    frozenset((*_COLUMNS, *_IDENTITY)),
    ignored={
        "rollout_metrics": "metrics of the whole output, which SkyRL logs itself",
        "env_metrics": "the environment's metrics per row, for dumps of evaluations; aggregated in rollout_metrics",
        "trajectory_generation_times": "seconds per trajectory; aggregated in rollout_metrics",
        "trajectory_time_splits": "seconds per trajectory, by engine and environment; aggregated in rollout_metrics",
    },
    needed={
        "rollout_expert_indices": "the routed experts of every token",
        "pixel_values": "the images of every row",
        "image_grid_thw": "the sizes of every row's images",
    },
)
# Maps fields of a row to the output's keys, for suggestions.
_PLURALS = {
    "loss_mask": "loss_masks",
    "reward": "rewards",
    "stop_reason": "stop_reasons",
    "uid": "uids",
    "sample": "samples",
}
# Values of these types need no conversion.
_PLAIN = frozenset([list, np.ndarray, str])


@refusing(_WHAT)
def from_skyrl(
    output: Mapping[str, Any],
    *,
    trajectory_ids: Any = None,
    tags: Sequence[str | None] | None = None,
    round: int = 0,
    attempt: int = 0,
    policy_version: int = -1,
    columns: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> list[Row]:
    """Convert the output of a SkyRL generator's `generate` to rows.

    output: a mapping of lists, arrays or CPU tensors with one entry per row. It has `prompt_token_ids` and
        `response_ids`. It has `trajectory_ids` (objects with `instance_id` and `repetition_id`, or pairs of uid and
        sample), or `uids` and `samples`; `samples` may be omitted if the rows of each trajectory are adjacent. Optional
        are `rewards` (a number per row, or a list with one per response token), `loss_masks`, `rollout_logprobs`,
        `stop_reasons`, `is_last_step` (default: all true). Rows of a trajectory must be in step order.
    trajectory_ids: from the generator's input, for outputs without them (all outputs that are not step-wise).
    tags: one per row, for example the input's `env_classes`.
    columns: for example `rollout_expert_indices` (scope `token`), `pixel_values` and `image_grid_thw` (`items`). A row
        without an image does not get the column.

    A missing reward is 0 before the last step of a trajectory; on the last step the reward is pending.

        output = await generator.generate(input_batch)
        client.submit(from_skyrl(output, trajectory_ids=input_batch["trajectory_ids"]))
    """
    if not isinstance(output, Mapping):
        raise InvalidArgumentError(
            f"{_WHAT} is a {type(output).__name__}; pass a mapping of lists with one entry per row"
        )
    fields = _fields_of(
        {name: values for name, values in output.items() if values is not None},
        trajectory_ids=trajectory_ids,
        round=round,
        attempt=attempt,
        policy_version=policy_version,
        choice=Choice.of(columns, ignore),
    )
    if "loss_mask" not in fields:
        fields["loss_mask"] = _all_ones([size_of(response) for response in fields["response_ids"]])
    tag_fields, optional = tagged(tags, len(fields["uid"]), _WHAT), Choice.of(columns).columns
    return [
        {name: values[row] for name, values in fields.items() if not (name in optional and values[row] is None)} | tag
        for row, tag in enumerate(tag_fields)
    ]


def _all_ones(lengths: Sequence[int]) -> list[Any]:
    """Return arrays of ones, which share memory because they are never modified."""
    ones = np.ones(max(lengths, default=0), np.uint8)
    return [ones[:length] for length in lengths]


def _fields_of(
    output: Mapping[str, Any], *, trajectory_ids: Any, round: int, attempt: int, policy_version: int, choice: Choice
) -> dict[str, list[Any]]:
    """Return the fields of rows and the chosen columns, each with one value per row. Loss masks are absent if the
    output has none."""
    _check_names(output, trajectory_ids)
    unknown = output.keys() - _KEYS.fields - _KEYS.ignored.keys() - {*choice.columns, *choice.ignore}
    if hints := renamings(unknown, output, _KEYS.fields, _PLURALS):
        raise InvalidArgumentError(f"{_WHAT}: unknown key {min(unknown)}{hints}")
    _KEYS.check(output, choice)
    entries = _entries(output, trajectory_ids, choice)
    count = _length(entries, "response_ids")
    for name in entries:
        if (length := _length(entries, name)) != count:
            raise InvalidArgumentError(
                f"generator output: {name} has {length} entries, but response_ids has {count}; pass one entry per row"
            )
    lasts = [*map(bool, entries["is_last_step"])] if "is_last_step" in entries else [True] * count
    keys = _keys(entries, lasts)
    columns: dict[str, list[Any]] = {
        "uid": [uid for uid, _ in keys],
        "sample": [sample for _, sample in keys],
        "step": _steps(keys),
        "is_last_step": lasts,
        "reward": _rewards(entries.get("rewards"), lasts, entries["response_ids"]),
        "round": [round] * count,
        "attempt": [attempt] * count,
        "policy_version": [policy_version] * count,
    }
    for name, field in _COLUMNS.items():
        if name in entries:
            columns[field] = [*entries[name]]
            if not _PLAIN.issuperset(map(type, columns[field])):
                columns[field] = [plain(value, field, _where(columns, row)) for row, value in enumerate(entries[name])]
    return columns | {name: _chosen(name, entries[name], columns) for name in choice.columns}


def _entries(output: Mapping[str, Any], trajectory_ids: Any, choice: Choice) -> dict[str, Any]:
    """Select the output's entries that rows need. Uses the input's trajectory_ids if the output has no ids."""
    names = _KEYS.fields | set(choice.columns)
    entries = {name: values for name, values in output.items() if name in names}
    if trajectory_ids is not None and not {"trajectory_ids", "uids"} & entries.keys():
        entries["trajectory_ids"] = trajectory_ids
    return entries


def _chosen(name: str, values: Sequence[Any], columns: Mapping[str, list[Any]]) -> list[Any]:
    if name != "rollout_expert_indices":
        return [plain(value, name, _where(columns, row)) for row, value in enumerate(values)]
    lengths = [
        sum(map(size_of, pair)) for pair in zip(columns["prompt_token_ids"], columns["response_ids"], strict=True)
    ]
    return [
        routes(value, name, length, _where(columns, row))
        for row, (value, length) in enumerate(zip(values, lengths, strict=True))
    ]


def _length(entries: Mapping[str, Any], name: str) -> int:
    try:
        return len(entries[name])
    except TypeError:
        raise InvalidArgumentError(f"generator output: {name} is {entries[name]!r}; pass one entry per row") from None


def _where(columns: Mapping[str, list[Any]], row: int) -> str:
    uid, sample, step = (columns[name][row] for name in ("uid", "sample", "step"))
    return f"uid {uid!r} sample {sample} step {step}"


def _steps(keys: Sequence[tuple[str, int]]) -> list[int]:
    """Number the rows of each trajectory in their order."""
    if len({*keys}) == len(keys):
        return [0] * len(keys)
    following: dict[tuple[str, int], int] = {}
    steps = []
    for key in keys:
        step = following.get(key, 0)
        following[key] = step + 1
        steps.append(step)
    return steps


def _check_names(output: Mapping[str, Any], trajectory_ids: Any) -> None:
    names = set(output)
    for name in ("prompt_token_ids", "response_ids"):
        if name not in names:
            hints = renamings(names - _KEYS.fields, names, (name,))
            raise InvalidArgumentError(f"generator output: {name} is missing; every row needs it{hints}")
    if trajectory_ids is None and not {"trajectory_ids", "uids"} & names:
        raise InvalidArgumentError(
            "generator output: the trajectories of the rows are unknown; pass trajectory_ids of the generator's input, "
            "or uids and samples"
        )


def _keys(entries: Mapping[str, Any], lasts: Sequence[bool]) -> list[tuple[str, int]]:
    if "trajectory_ids" in entries:
        return [_key(entry, index) for index, entry in enumerate(entries["trajectory_ids"])]
    samples = entries["samples"] if "samples" in entries else _samples(entries["uids"], lasts)
    pairs = list(zip(entries["uids"], samples, strict=True))
    if {*map(type, entries["uids"])} <= {str} and {*map(type, samples)} <= {int}:
        return pairs
    return [_key(pair, index) for index, pair in enumerate(pairs)]


def _samples(uids: Sequence[Any], lasts: Sequence[bool]) -> list[int]:
    """Return each row's trajectory number within its prompt. A trajectory ends with its last step."""
    ended: dict[Any, int] = {}
    samples = []
    for row, (uid, last) in enumerate(zip(uids, lasts, strict=True)):
        if row and not lasts[row - 1] and uids[row - 1] != uid:
            raise InvalidArgumentError(
                f"generator output: row {row} is of uid {uid!r}, but the trajectory of uid {uids[row - 1]!r} has no "
                "last step yet; pass samples, or trajectory_ids"
            )
        samples.append(ended.get(uid, 0))
        ended[uid] = samples[-1] + last
    return samples


def _key(entry: Any, index: int) -> tuple[str, int]:
    if hasattr(entry, "instance_id") and hasattr(entry, "repetition_id"):
        entry = (entry.instance_id, entry.repetition_id)
    is_pair = isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2
    if not is_pair or not isinstance(entry[0], str) or isinstance(entry[1], bool) or not hasattr(entry[1], "__index__"):
        raise InvalidArgumentError(
            f"generator output: row {index} is of {entry!r}; expected a uid (a string) and a sample (an integer)"
        )
    return entry[0], int(entry[1])


def _rewards(rewards: Any, lasts: list[bool], responses: Sequence[Any]) -> list[Any]:
    """Return one reward per row. A missing reward before the last step is 0, or zeros if rewards are per token."""
    if rewards is None:
        rewards = [None] * len(lasts)
    elif {*map(type, rewards)} == {float}:
        return [*rewards]
    values = [plain(reward, "reward", f"generator output: row {row}") for row, reward in enumerate(rewards)]
    per_token = any(map(is_vector, values))
    return [
        reward if reward is not None or last else (np.zeros(len(response)) if per_token else 0.0)
        for reward, last, response in zip(values, lasts, responses, strict=True)
    ]
