"""Builds the requests of rollout calls, and reads their answers. Makes no calls."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Any, TypeVar

import numpy as np

from gristmill._client.rollout.outbox import Limits
from gristmill._client.rollout.prefix_dedup import RequestEncoder
from gristmill._client.rollout.step_writer import plain
from gristmill._wire.codecs import submit_codec
from gristmill._wire.codecs.submit_codec import MESSAGE_BYTES
from gristmill._wire.steps import INT32_MAX, Steps, TrajectoryKey, check_tag
from gristmill._wire.tables import ValueColumns
from gristmill.errors import InvalidArgumentError
from gristmill.v1 import rollout_pb2, run_pb2

_log = logging.getLogger("gristmill")

_T = TypeVar("_T")

# Seconds between two warnings about a wait for capacity. Shorter waits are normal: they throttle producers.
ROOM_NOTICE_S = 30.0

MOST_GROUPS = 1 << 10
"""How many groups a request may name."""

# The seconds that a row waits for others to share its message.
_LINGER_S = 0.003


def limits(max_batch_rows: int, max_batch_bytes: int) -> Limits:
    if max_batch_rows < 1:
        raise InvalidArgumentError(f"max_batch_rows is {max_batch_rows}; expected 1 or more")
    if not 1 <= max_batch_bytes <= MESSAGE_BYTES // 2:
        raise InvalidArgumentError(f"max_batch_bytes is {max_batch_bytes}; expected 1 to {MESSAGE_BYTES // 2}")
    return Limits(max_batch_rows, max_batch_bytes, _LINGER_S)


def encoder(run: str, compression: str | None) -> RequestEncoder:
    if compression not in (None, "zstd"):
        raise InvalidArgumentError(f"compression is {compression!r}; expected None or 'zstd'")
    if compression:
        submit_codec.check_zstd()
    return RequestEncoder(check_run(run), compression is not None)


def tables(rows: ValueColumns, limits: Limits) -> Iterator[Steps]:
    """Splits the rows into tables. Each table, with its names, fits into one message."""
    return rows.tables(limits.message_rows, limits.message_bytes * 7 // 8)


def listed(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the rows as a list. Raises InvalidArgumentError for a single mapping, such as a generator output of
    SkyRL."""
    if isinstance(rows, Mapping):
        raise InvalidArgumentError(
            f"rows is one {type(rows).__name__}; pass a list of rows, or for a generator output of SkyRL "
            "gristmill.converters.from_skyrl(output)"
        )
    return list(rows)


def check_run(run: str) -> str:
    if not isinstance(run, str) or not run:
        raise InvalidArgumentError(f"run is {run!r}; set the run's name, a string that is not empty")
    return run


def create_run(run: str, config: Mapping[str, Any]) -> run_pb2.CreateRunRequest:
    if not isinstance(config, Mapping):
        raise InvalidArgumentError(f"run {run!r}: config is a {type(config).__name__}; pass a mapping of settings")
    try:
        return run_pb2.CreateRunRequest(run=run, config_json=json.dumps(dict(config), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"run {run!r}: config is not JSON: {error}; use plain values") from None


def begin_groups(
    run: str,
    uids: Sequence[str],
    round_: int,
    n_samples: int | Mapping[str, int] | None,
    tag: str | Mapping[str, str] | None,
) -> rollout_pb2.BeginGroupsRequest:
    _check_list(uids)
    sizes = _one_each(uids, n_samples, 0)
    for uid, size in zip(uids, sizes, strict=False):
        if isinstance(size, bool) or not hasattr(size, "__index__") or not 0 <= size <= INT32_MAX:
            raise InvalidArgumentError(f"uid {uid!r}: n_samples is {size!r}; set the number of samples of the group")
    tags = _one_each(uids, tag, "")
    for uid, name in zip(uids, tags, strict=False):
        if not isinstance(name, str):
            raise InvalidArgumentError(f"uid {uid!r}: tag is {name!r}; set a string that names the environment or task")
        check_tag(name, f"uid {uid!r}")
    try:
        return rollout_pb2.BeginGroupsRequest(run=run, round=round_, uids=uids, n_samples=sizes, tags=tags)
    except (TypeError, ValueError) as error:
        raise _no_groups(uids, round_, error) from None


def list_groups(run: str, uids: Iterable[str] | None, round_: int) -> Iterator[run_pb2.ListGroupsRequest]:
    """Yields the requests for the states of groups, or of all listed groups."""
    if uids is None:
        yield run_pb2.ListGroupsRequest(run=run)
        return
    _check_list(uids)
    left = iter(uids)
    while part := list(islice(left, MOST_GROUPS)):
        try:
            yield run_pb2.ListGroupsRequest(run=run, uids=part, round=round_)
        except (TypeError, ValueError) as error:
            raise _no_groups(part, round_, error) from None


def _check_list(uids: object) -> None:
    if isinstance(uids, str):
        raise InvalidArgumentError(f"uids is the string {uids!r}; pass a list of strings")
    if not isinstance(uids, Iterable):
        raise InvalidArgumentError(f"uids is {uids!r}; pass a list of strings")


def _no_groups(uids: Sequence[str], round_: int, error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"uids is {uids!r:.200} and round is {round_!r}: {error}; pass a list of strings, and a 32-bit integer"
    )


def parts(request: rollout_pb2.BeginGroupsRequest) -> Iterator[rollout_pb2.BeginGroupsRequest]:
    """Yields the request, or several for as many groups as the service accepts at once."""
    if len(request.uids) <= MOST_GROUPS:
        yield request
        return
    for begin in range(0, len(request.uids), MOST_GROUPS):
        part, end = rollout_pb2.BeginGroupsRequest(run=request.run, round=request.round), begin + MOST_GROUPS
        part.uids.extend(request.uids[begin:end])
        part.n_samples.extend(request.n_samples[begin:end])
        part.tags.extend(request.tags[begin:end])
        yield part


def _one_each(uids: Sequence[str], values: _T | Mapping[str, _T] | None, default: _T) -> list[_T]:
    """Returns one value per uid. values: one value for all groups, or values by uid; None: an empty list."""
    if values is None:
        return []
    return [values.get(uid, default) if isinstance(values, Mapping) else values for uid in uids]


def admitted(request: rollout_pb2.BeginGroupsRequest, answer: rollout_pb2.BeginGroupsResponse) -> list[str]:
    # The rest was not requested.
    states = zip(request.uids, answer.admissions, strict=False)
    return [uid for uid, state in states if state == rollout_pb2.GROUP_ADMISSION_ADMITTED]


def waits_for_room(answer: rollout_pb2.BeginGroupsResponse) -> bool:
    """Returns whether no group is admitted now, but a group may be admitted later."""
    states = set(answer.admissions)
    admits = rollout_pb2.GROUP_ADMISSION_ADMITTED in states
    return not admits and rollout_pb2.GROUP_ADMISSION_NO_ROOM in states


class RoomWait:
    """A wait for capacity. Logs the reason as a warning after each ROOM_NOTICE_S of waiting."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._began = self._warned = time.monotonic()

    def is_over(self, answer: rollout_pb2.BeginGroupsResponse) -> bool:
        if not waits_for_room(answer):
            return True
        now = time.monotonic()
        if now - self._warned >= ROOM_NOTICE_S:
            self._warned = now
            _log.warning("run %r: no capacity for groups for %.0f s: %s", self._run, now - self._began, answer.reason)
        return False


def set_reward(run: str, key: TrajectoryKey, step: int | None, reward: Any) -> rollout_pb2.SetRewardsRequest:
    values = plain(reward, "reward", str(key))
    try:
        array = np.asarray(values, np.float64) if np.size(values) else np.empty(0)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.ndim > 1 or not array.size or not np.isfinite(array).all():
        raise InvalidArgumentError(f"{key}: reward is {reward!r}; expected a finite number, or one per response token")
    message = rollout_pb2.Reward(trajectory=trajectory_key(key), step=step)
    if array.ndim:
        message.token_values = array.tobytes()
    else:
        message.value = float(array)
    return rollout_pb2.SetRewardsRequest(run=run, rewards=[message])


def abort_trajectory(
    run: str, key: TrajectoryKey, reason: str, attempt: int | None
) -> rollout_pb2.AbortTrajectoriesRequest:
    keys = [trajectory_key(key)]
    try:
        return rollout_pb2.AbortTrajectoriesRequest(run=run, trajectories=keys, reason=reason, attempt=attempt)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"{key}: reason is {reason!r} and attempt {attempt!r}; pass a string, and an integer or None"
        ) from None


def trajectory_key(key: TrajectoryKey) -> rollout_pb2.TrajectoryKey:
    try:
        return rollout_pb2.TrajectoryKey(uid=key.uid, round=key.round, sample=key.sample)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"uid is {key.uid!r}, sample {key.sample!r} and round {key.round!r}; pass a string and two integers"
        ) from None


def wait_of(wait_s: float | None) -> float:
    """Returns the seconds to wait; infinite for None. Raises InvalidArgumentError for a negative number."""
    if wait_s is None:
        return inf
    if not wait_s >= 0:
        raise InvalidArgumentError(f"wait_s is {wait_s}; set 0 or more seconds, or None for no limit")
    return wait_s
