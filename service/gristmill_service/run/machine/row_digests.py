"""Digests of rows: tell a repeated row from another one, and whole ones from damaged ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from struct import Struct
from typing import Any

import numpy as np
from xxhash import xxh3_128, xxh3_128_digest

from gristmill._wire.columns import Array, Ragged, bytes_of
from gristmill._wire.steps import PLAIN_FIELDS, Steps

_SMALL = Struct("<qqi??dd16s")


def row_digests(steps: Steps, shared: Collection[str] = ()) -> list[bytes]:
    """The digest of what the table itself has of each row. shared: as `RowDigests` has it."""
    return RowDigests(steps, shared).of_own()


class RowDigests:
    """The digests of a table's rows: of all of each but its key.

    What stands in place of a pending reward is not sent, and so does not count. shared: columns whose values a row may
    lack where the step before has them (`ColumnSpec.is_shared`); a later step's values of prompt tokens do not count.
    rewards: the digest of each row's rewards per token; empty where they are scalar or pending.
    """

    def __init__(self, steps: Steps, shared: Collection[str]) -> None:
        self._steps, self.rewards = steps, _reward_digests(steps)
        self._small = _small_fields(steps, self.rewards)
        # What has no fixed length comes behind what has.
        self._reasons = [*map(str.encode, steps.stop_reasons)]
        self._values: list[Sequence[Any]] = [steps.loss_mask.memory(), *_plain_parts(steps)]
        if steps.token_advantages is not None:
            self._values.append(steps.token_advantages.memory())
        if steps.token_versions is not None:
            self._values.append(_token_versions(steps, steps.token_versions))
        self._values += [part for name in sorted(steps.extras) for part in _extra_parts(steps, name, name in shared)]

    def of(self, tokens: Sequence[bytes]) -> list[bytes]:
        """tokens: of each row the digest of all its tokens."""
        parts = zip(self._small, self._reasons, tokens, *self._values, strict=True)
        if self._steps.extras:
            # Images are better not copied.
            return [_digest(one) for one in parts]
        return [*map(xxh3_128_digest, map(b"".join, parts))]

    def of_own(self) -> list[bytes]:
        """With the tokens that the table has of each row, and how many it lacks, where it lacks any."""
        found = [*map(xxh3_128_digest, self._steps.tokens.memory())]
        if self._steps.prefix_lengths is None:
            return self.of(found)
        lengths = self._steps.prefix_lengths.tolist()
        lacking = [length.to_bytes(8, "little") if length else b"" for length in lengths]
        return self.of([*map(bytes.__add__, found, lacking)])


def _digest(parts: Iterable[Any]) -> bytes:
    found = xxh3_128()
    for part in parts:
        found.update(part)
    return found.digest()


def _extra_parts(steps: Steps, name: str, is_shared: bool) -> tuple[list[bytes], list[Array]]:
    """For each row, that it has the column, and the column's values."""
    extra = steps.extras[name]
    values: list[Array] = extra.values.arrays()
    if is_shared:
        counts = np.where(steps.steps > 0, steps.response_lengths, extra.values.lengths).tolist()
        values = [one[max(0, len(one) - count) :] for one, count in zip(values, counts, strict=True)]
    # A column that is given with nothing in it is not one that is not given; and where one column's values end and
    # another column begins is part of what was sent.
    labels = [
        name.encode() + b"\0" + len(one).to_bytes(8, "little") if given else b""
        for one, given in zip(values, extra.given.tolist(), strict=True)
    ]
    return labels, values


def _plain_parts(steps: Steps) -> Iterator[Sequence[Any]]:
    for one in PLAIN_FIELDS:
        column: Ragged | None = getattr(steps, one.name)
        if column is not None:
            if one.label:
                yield [one.label] * len(steps)
            yield column.memory()


def _token_versions(steps: Steps, versions: Ragged) -> list[Any]:
    """Each row's versions per token; none where all are the row's own: a row may come with them beside rows without."""
    own = steps.policy_versions.tolist()
    return [b"" if (array == version).all() else array for array, version in zip(versions.arrays(), own, strict=True)]


def _reward_digests(steps: Steps) -> list[bytes]:
    if steps.token_rewards is None:
        return [b""] * len(steps)
    return [
        b"" if pending else values_digest(values)
        for values, pending in zip(steps.token_rewards.arrays(), steps.rewards_pending.tolist(), strict=True)
    ]


def values_digest(values: Array) -> bytes:
    """The same for equal numbers, whatever their width."""
    return xxh3_128(bytes_of(values.astype(np.float64, copy=False))).digest()


def _small_fields(steps: Steps, reward_digests: Sequence[bytes]) -> list[bytes]:
    """Each row's fields of a fixed length that are no columns of tokens."""
    pending = steps.rewards_pending.tolist()
    # A negative zero is the same number as the other one.
    rewards = [0.0 if waits else given + 0.0 for waits, given in zip(pending, steps.rewards.tolist(), strict=True)]
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
