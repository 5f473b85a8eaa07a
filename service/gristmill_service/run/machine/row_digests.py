"""Digests of rows: tell a repeated row from another one, and whole ones from damaged ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from struct import Struct
from typing import Any

import numpy as np
from xxhash import xxh3_128

from gristmill._wire.columns import Array, Ragged, bytes_of
from gristmill._wire.steps import Steps

_SMALL = Struct("<qqi??dd16s")


def row_digests(steps: Steps, shared: Collection[str] = (), tokens: Sequence[bytes] | None = None) -> list[bytes]:
    """The digest of each row: of all of it but its key.

    What stands in place of a pending reward is not sent, and so does not count. shared: columns whose values a row may
    lack where the step before has them (`ColumnSpec.is_shared`); a later step's values of prompt tokens do not count.
    tokens: of each row the digest of all its tokens; None for the digests of what the table itself has of each row.
    """
    tokens = _own_tokens(steps) if tokens is None else tokens
    columns = [steps.loss_mask, steps.logprobs, steps.token_advantages]
    arrays: list[list[Any]] = [column.arrays() for column in columns if column is not None]
    if steps.token_versions is not None:
        arrays.append(_token_versions(steps, steps.token_versions))
    extras = [part for name in sorted(steps.extras) for part in _extra_parts(steps, name, name in shared)]
    found = []
    for small, of_tokens, *values in zip(_small_fields(steps), tokens, *arrays, *extras, strict=True):
        digest = xxh3_128(small + of_tokens)
        for array in values:
            digest.update(array)
        found.append(digest.digest())
    return found


def _own_tokens(steps: Steps) -> list[bytes]:
    """The digest of each row's tokens that the table has, and of how many it lacks, where it lacks any."""
    found = [xxh3_128(bytes_of(array)).digest() for array in steps.tokens.arrays()]
    if steps.prefix_lengths is None:
        return found
    lengths = steps.prefix_lengths.tolist()
    return [
        digest + length.to_bytes(8, "little") if length else digest
        for digest, length in zip(found, lengths, strict=True)
    ]


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


def _token_versions(steps: Steps, versions: Ragged) -> list[Any]:
    """Each row's versions per token; none where all are the row's own: a row may come with them beside rows without."""
    own = steps.policy_versions.tolist()
    return [b"" if (array == version).all() else array for array, version in zip(versions.arrays(), own, strict=True)]


def reward_digests(steps: Steps) -> list[bytes]:
    """The digest of each row's rewards per token; empty where they are scalar or pending."""
    if steps.token_rewards is None:
        return [b""] * len(steps)
    return [
        b"" if pending else values_digest(values)
        for values, pending in zip(steps.token_rewards.arrays(), steps.rewards_pending.tolist(), strict=True)
    ]


def values_digest(values: Array) -> bytes:
    """The same for equal numbers, whatever their width."""
    return xxh3_128(bytes_of(values.astype(np.float64, copy=False))).digest()


def _small_fields(steps: Steps) -> Iterator[bytes]:
    """Each row's fields that are no columns of tokens; those without a fixed length come last."""
    count = len(steps)
    columns = zip(
        steps.prompt_lengths.tolist(),
        steps.response_lengths.tolist(),
        steps.policy_versions.tolist(),
        steps.is_last_steps.tolist(),
        steps.rewards_pending.tolist(),
        steps.rewards.tolist(),
        [0.0] * count if steps.advantages is None else steps.advantages.tolist(),
        reward_digests(steps),
        steps.stop_reasons,
        strict=True,
    )
    for prompt, response, version, last, pending, reward, advantage, rewards, reason in columns:
        # A negative zero is the same number as the other one.
        given = 0.0 if pending else reward + 0.0
        yield _SMALL.pack(prompt, response, version, last, pending, given, advantage + 0.0, rewards) + reason.encode()
