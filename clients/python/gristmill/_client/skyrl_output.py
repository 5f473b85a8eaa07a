"""A whole generator output (the dict of lists that SkyRL's generators return) as columns of steps.

Owns the names of that dict and how its rows are numbered. Sends nothing, and imports no framework: tensors are read
through NumPy's array protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gristmill._client.trajectory import plain
from gristmill._wire.column_spec import ColumnSpec
from gristmill._wire.tables import ValueColumns, is_vector
from gristmill.errors import InvalidArgumentError

# Columns of the output and the fields of a row that they are.
_COLUMNS = {
    "prompt_token_ids": "prompt_token_ids",
    "response_ids": "response_ids",
    "loss_masks": "loss_mask",
    "rollout_logprobs": "rollout_logprobs",
    "stop_reasons": "stop_reason",
}
_IDENTITY = ("trajectory_ids", "uids", "samples", "is_last_step", "rewards")
# These need no conversion by NumPy's array protocol.
_PLAIN = frozenset([list, np.ndarray, str])
# Keys that describe the output as a whole, not its rows.
_NOT_ROWS = frozenset({"rollout_metrics"})


def columns_of_output(
    output: Mapping[str, Any],
    *,
    round: int = 0,
    attempt: int = 0,
    policy_version: int = -1,
    declared: Sequence[ColumnSpec] = (),
) -> ValueColumns:
    """The output's columns, with checked types; `RolloutClient.submit` says which the output has. declared: the run's
    own columns, which the output may have under their names.

    Raises InvalidArgumentError naming the field and both sizes, or the trajectory, the field and the value.
    """
    given = {name: values for name, values in output.items() if values is not None and name not in _NOT_ROWS}
    _check_names(given, declared)
    count = _length(given, "response_ids")
    for name in given:
        if (length := _length(given, name)) != count:
            raise InvalidArgumentError(
                f"generator output: {name} has {length} entries and response_ids has {count}; they need one each"
            )
    keys = _keys(given)
    lasts = [bool(last) for last in given.get("is_last_step", [True] * count)]
    columns: dict[str, list[Any]] = {
        "uid": [uid for uid, _ in keys],
        "sample": [sample for _, sample in keys],
        "step": _steps(keys),
        "is_last_step": lasts,
        "reward": _rewards(given.get("rewards"), lasts, given["response_ids"]),
        "round": [round] * count,
        "attempt": [attempt] * count,
        "policy_version": [policy_version] * count,
    }
    for name, field in _COLUMNS.items():
        if name in given:
            columns[field] = [
                value if type(value) in _PLAIN else plain(value, field, _where(columns, row))
                for row, value in enumerate(given[name])
            ]
    if "loss_mask" not in columns:
        columns["loss_mask"] = _all_ones([np.size(response) for response in columns["response_ids"]])
    columns |= {column.name: list(given[column.name]) for column in declared if column.name in given}
    return ValueColumns(columns, count, declared)


def _length(given: Mapping[str, Any], name: str) -> int:
    try:
        return len(given[name])
    except TypeError:
        raise InvalidArgumentError(f"generator output: {name} is {given[name]!r}; it needs one entry a row") from None


def _where(columns: Mapping[str, list[Any]], row: int) -> str:
    uid, sample, step = (columns[name][row] for name in ("uid", "sample", "step"))
    return f"uid {uid!r} sample {sample} step {step}"


def _steps(keys: Sequence[tuple[str, int]]) -> list[int]:
    """Rows of one trajectory are numbered in their order."""
    following: dict[tuple[str, int], int] = {}
    steps = []
    for key in keys:
        step = following.get(key, 0)
        following[key] = step + 1
        steps.append(step)
    return steps


def _all_ones(lengths: Sequence[int]) -> list[Any]:
    """Views of one array, as nobody changes it."""
    ones = np.ones(max(lengths, default=0), np.uint8)
    return [ones[:length] for length in lengths]


def unknown_keys(output: Mapping[str, Any]) -> list[str]:
    """The keys that are neither fields of rows nor about the output as a whole: a run may declare them as columns."""
    return sorted(output.keys() - _COLUMNS.keys() - set(_IDENTITY) - _NOT_ROWS)


def _check_names(given: Mapping[str, Any], declared: Sequence[ColumnSpec]) -> None:
    for name in ("prompt_token_ids", "response_ids"):
        if name not in given:
            raise InvalidArgumentError(f"generator output: {name} is missing; every row needs it")
    if "trajectory_ids" not in given and not {"uids", "samples"} <= given.keys():
        raise InvalidArgumentError(
            "generator output: nothing says which trajectories the rows belong to; give trajectory_ids, or uids and "
            "samples"
        )
    names = {column.name for column in declared}
    unknown = [name for name in unknown_keys(given) if name not in names]
    if unknown:
        known = ", ".join(sorted((*_COLUMNS, *_IDENTITY, *names)))
        raise InvalidArgumentError(
            f"generator output: unknown key {unknown[0]}; known are {known}; declare it as a column of the run, or "
            "drop it"
        )


def _keys(given: Mapping[str, Any]) -> list[tuple[str, int]]:
    if "trajectory_ids" in given:
        return [_key(entry, index) for index, entry in enumerate(given["trajectory_ids"])]
    pairs = zip(given["uids"], given["samples"], strict=True)
    return [_key(pair, index) for index, pair in enumerate(pairs)]


def _key(entry: Any, index: int) -> tuple[str, int]:
    if hasattr(entry, "instance_id") and hasattr(entry, "repetition_id"):
        entry = (entry.instance_id, entry.repetition_id)
    is_pair = isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2
    if not is_pair or not isinstance(entry[0], str) or isinstance(entry[1], bool) or not hasattr(entry[1], "__index__"):
        raise InvalidArgumentError(
            f"generator output: row {index} belongs to {entry!r}; expected a uid (a string) and a sample (an integer)"
        )
    return entry[0], int(entry[1])


def _rewards(rewards: Any, lasts: list[bool], responses: Sequence[Any]) -> list[Any]:
    """One a row; where the others' are per token, a missing one before the last step is so too."""
    if rewards is None:
        rewards = [None] * len(lasts)
    found = [plain(reward, "reward", f"generator output: row {row}") for row, reward in enumerate(rewards)]
    per_token = any(map(is_vector, found))
    return [
        reward if reward is not None or last else (np.zeros(len(response)) if per_token else 0.0)
        for reward, last, response in zip(found, lasts, responses, strict=True)
    ]
