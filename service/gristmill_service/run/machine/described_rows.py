"""Describe the rows of a request as the state stores them: names, sizes and digests.

Digests detect whether a row that is sent again has other content, and whether stored rows are damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import add
from struct import Struct
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_128, xxh3_128_digest

from gristmill._wire.column_spec import start_of
from gristmill._wire.columns import Array, Int64s, Ragged, bytes_of, exact_sum
from gristmill._wire.named_tuples import made_of
from gristmill._wire.row_fields import OPTIONAL_STRINGS, PLAIN_FIELDS, TEXT_FIELDS
from gristmill._wire.steps import Steps, TrajectoryKey
from gristmill_service.run.machine.events import RowName, RowRef, StoredRow

NONE: Mapping[str, bool] = MappingProxyType({})
ROW_OVERHEAD_BYTES = 768
"""The bytes that a row counts for in addition to its token values: its keys, digest, lengths and indices."""
_SMALL = Struct("<qqi??dd16s")


class RowKeys(NamedTuple):
    """The keys of a request's rows. trajectories: each row's trajectory. names: each row's name within its group."""

    trajectories: Sequence[TrajectoryKey]
    names: Sequence[RowName]

    @classmethod
    def of(cls, steps: Steps) -> RowKeys:
        rounds, samples = steps.rounds.tolist(), steps.samples.tolist()
        uids: list[str] = []
        for uid, same in groupby(steps.uids):
            # Equal uids share one string object, because the state stores uids as long as the rows.
            uids += [uid] * len(list(same))
        return cls(
            made_of(TrajectoryKey, rounds, uids, samples),
            made_of(RowName, samples, steps.attempts.tolist(), steps.steps.tolist()),
        )


def describe_rows(
    steps: Steps,
    keys: RowKeys,
    table: int,
    digests: RowDigests,
    tokens: Sequence[bytes],
    parents: Sequence[RowName | None],
) -> list[StoredRow]:
    """Returns the rows of a request as the state stores them.

    table: the number of the table that contains the rows. digests: computes the digests of its rows. tokens: for each
        row, the digest of all its tokens. parents: for each row, its `StoredRow.parent`.
    """
    count, checks = len(steps), [b""] * len(steps)
    if steps.prefix_lengths is not None:
        stored_digests = digests.of_own()
        checks = [b"" if parent is None else stored_digests[row] for row, parent in enumerate(parents)]
    pending, rewards = steps.rewards_pending.tolist(), steps.rewards.tolist()
    responses = steps.response_lengths.tolist()
    item = sum(column.values.itemsize for column in steps.token_columns)
    stored = zip(steps.tokens.lengths.tolist(), responses, strict=True)
    sizes = [ROW_OVERHEAD_BYTES + 4 * tokens + item * response for tokens, response in stored]
    for extra in steps.extras.values():
        sizes = [*map(add, sizes, extra.row_bytes.tolist())]
    for name in OPTIONAL_STRINGS:
        if (texts := getattr(steps, name)) is not None:
            sizes = [*map(add, sizes, map(len, texts))]
    return made_of(
        StoredRow,
        keys.trajectories,
        steps.steps.tolist(),
        steps.attempts.tolist(),
        steps.is_last_steps.tolist(),
        made_of(RowRef, [table] * count, range(count)),
        digests.of(tokens),
        sizes,
        responses,
        steps.policy_versions.tolist(),
        [None if waits else reward for waits, reward in zip(pending, rewards, strict=True)],
        digests.rewards,
        [None] * count if steps.advantages is None else steps.advantages.tolist(),
        [b""] * count,
        steps.sequence_lengths.tolist(),
        parents,
        checks,
        _reward_rests(steps, rewards),
        steps.agents or [""] * count,
        steps.episodes or [""] * count,
    )


def reward_rest(values: Array, reward: float) -> float:
    """Returns the rounding error of a step's reward: the exact sum of its rewards per token, minus `reward`."""
    return exact_sum(np.append(values.astype(np.float64), -reward))


def _reward_rests(steps: Steps, rewards: Sequence[float]) -> list[float]:
    if steps.token_rewards is None:
        return [0.0] * len(steps)
    pending, values = steps.rewards_pending.tolist(), steps.token_rewards.arrays()
    return [
        0.0 if waits else reward_rest(array, reward)
        for waits, array, reward in zip(pending, values, rewards, strict=True)
    ]


def row_digests(steps: Steps, repeated: Mapping[str, bool] = NONE) -> list[bytes]:
    """Returns a digest of each row's content in this table, without omitted tokens. repeated: as in `RowDigests`."""
    return RowDigests(steps, repeated).of_own()


class RowDigests:
    """Computes digests of a table's rows, without their keys and without the placeholders of pending rewards.

    repeated: the columns of which a row may omit the values that the step before has, and whether each is partial. For
        rows after the first step, only their values of response tokens enter the digest.
    rewards: for each row, the digest of its rewards per token; empty if its reward is scalar or pending.
    """

    def __init__(self, steps: Steps, repeated: Mapping[str, bool]) -> None:
        self._steps, self.rewards = steps, [b""] * len(steps.uids)
        if steps.token_rewards is not None:
            self.rewards = _reward_digests(steps, steps.token_rewards)
        self._small = _small_fields(steps, self.rewards)
        # Parts of variable length follow those of fixed length.
        self._texts = [*map(str.encode, steps.stop_reasons)]
        if steps.reward_components is not None:
            # JSON has no zero byte, and a text without it is a stop reason alone.
            texts = [f"\0{text}".encode() if text else b"" for text in steps.reward_components]
            self._texts = [*map(bytes.__add__, self._texts, texts)]
        for one in TEXT_FIELDS:
            if one.label and (values := getattr(steps, one.name)) is not None:
                texts = [f"{one.label}{value}".encode() if value else b"" for value in values]
                self._texts = [*map(bytes.__add__, self._texts, texts)]
        self._values: list[Sequence[Any]] = [steps.loss_mask.memory(), *_plain_parts(steps)]
        if steps.token_advantages is not None:
            self._values.append(steps.token_advantages.memory())
        if steps.token_versions is not None:
            self._values.append(_token_versions(steps, steps.token_versions))
        starts = {start_of(name) for name, is_partial in repeated.items() if is_partial}
        for name in sorted(steps.extras.keys() - starts):
            self._values += _extra_parts(steps, name, repeated.get(name))

    def of(self, tokens: Sequence[bytes]) -> list[bytes]:
        """Returns the rows' digests. tokens: for each row, the digest of all its tokens."""
        parts = zip(self._small, self._texts, tokens, *self._values, strict=True)
        if self._steps.extras:
            # Hash the parts one by one, because joining them would copy images.
            return [_digest(one) for one in parts]
        return [*map(xxh3_128_digest, map(b"".join, parts))]

    def of_own(self) -> list[bytes]:
        """Returns digests that cover only the tokens in the table, and how many tokens each row omits."""
        tokens = [*map(xxh3_128_digest, self._steps.tokens.memory())]
        if self._steps.prefix_lengths is None:
            return self.of(tokens)
        lengths = self._steps.prefix_lengths.tolist()
        lacking = [length.to_bytes(8, "little") if length else b"" for length in lengths]
        return self.of([*map(bytes.__add__, tokens, lacking)])


def _digest(parts: Iterable[Any]) -> bytes:
    digest = xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _extra_parts(steps: Steps, name: str, is_partial: bool | None) -> tuple[list[bytes], list[Array]]:
    """Returns for each row a label that shows whether the row has the column, and the column's values.

    is_partial: as in `RowDigests`; None for a column whose values are all sent.
    """
    extra = steps.extras[name]
    values: list[Array] = extra.values.arrays()
    # The tokens before the first value that enters the digest.
    starts = [0] * len(values)
    if is_partial is not None:
        firsts = _starts(steps, name) if is_partial else steps.sequence_lengths - extra.values.lengths
        begins = np.where(steps.steps > 0, steps.prompt_lengths, 0)
        skipped = np.maximum(begins - firsts, 0).tolist()
        values = [one[count:] for one, count in zip(values, skipped, strict=True)]
        starts = np.maximum(firsts - begins, 0).tolist() if is_partial else starts
    # The label distinguishes an empty column from a missing one, and separates the values of different columns.
    labels = [
        name.encode()
        + b"\0"
        + len(one).to_bytes(8, "little")
        + (start.to_bytes(8, "little") if is_partial and len(one) else b"")
        if given
        else b""
        for one, start, given in zip(values, starts, extra.given.tolist(), strict=True)
    ]
    return labels, values


def _starts(steps: Steps, name: str) -> Int64s:
    """Returns the token of each row's first value of a partial column; int64 (rows,)."""
    starts, extra = np.zeros(len(steps), np.int64), steps.extras.get(start_of(name))
    if extra is not None:
        starts[extra.given] = extra.values.values[extra.values.starts[extra.given]]
    return starts


def _plain_parts(steps: Steps) -> Iterator[Sequence[Any]]:
    for one in PLAIN_FIELDS:
        column: Ragged | None = getattr(steps, one.name)
        if column is not None:
            if one.label:
                yield [one.label] * len(steps)
            yield column.memory()


def _token_versions(steps: Steps, versions: Ragged) -> list[Any]:
    """Returns each row's policy versions per token; empty if they all equal the row's version, because clients may
    send or omit them then."""
    row_versions = steps.policy_versions.tolist()
    return [
        b"" if (array == version).all() else array
        for array, version in zip(versions.arrays(), row_versions, strict=True)
    ]


def _reward_digests(steps: Steps, rewards: Ragged) -> list[bytes]:
    return [
        b"" if pending else values_digest(values)
        for values, pending in zip(rewards.arrays(), steps.rewards_pending.tolist(), strict=True)
    ]


def values_digest(values: Array) -> bytes:
    """Returns a digest of the numbers that does not depend on their dtype."""
    return xxh3_128(bytes_of(values.astype(np.float64, copy=False))).digest()


def _small_fields(steps: Steps, reward_digests: Sequence[bytes]) -> list[bytes]:
    """Encodes each row's fields of fixed length."""
    pending = steps.rewards_pending.tolist()
    # Adding 0.0 turns a negative zero into a positive one.
    rewards = [0.0 if waits else reward + 0.0 for waits, reward in zip(pending, steps.rewards.tolist(), strict=True)]
    advantages = [0.0] * len(steps) if steps.advantages is None else (steps.advantages + 0.0).tolist()
    return [
        *map(
            _SMALL.pack,
            steps.prompt_lengths.tolist(),
            steps.response_lengths.tolist(),
            steps.policy_versions.tolist(),
            steps.is_last_steps.tolist(),
            pending,
            rewards,
            advantages,
            reward_digests,
        )
    ]
