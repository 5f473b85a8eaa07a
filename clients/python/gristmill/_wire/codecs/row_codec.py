"""Encodes steps as protobuf rows, and decodes them. Buffers are little-endian. The reader does not copy them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire import components
from gristmill._wire.column_spec import BFLOAT16, DTYPES, MOST_AXES, MOST_ELEMENT_BYTES
from gristmill._wire.columns import FEW_ROWS, Array, Int64s, Ragged, greatest, least, starts_of, sum_of
from gristmill._wire.row_fields import PLAIN_FIELDS, ROW_FIELDS, TEXT_FIELDS, TOKEN_FIELDS, UNKNOWN
from gristmill._wire.steps import Extra, Steps, check, oldest_versions, strings_of
from gristmill.errors import InvalidArgumentError
from gristmill.v1 import rows_pb2

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("gristmill sends raw little-endian buffers; use a little-endian machine")

BUFFERS = ("tokens", *(one.message for one in TOKEN_FIELDS))
"""The fields with values per token. All other fields except declared columns are small."""

COLUMN_VALUES = "column_values"

_NUMBERS = [(one.name, one.dtype, None if one.is_required else one.default) for one in ROW_FIELDS]

Buffers = Mapping[str, memoryview]


class Prefixes(NamedTuple):
    """The first tokens of rows, which are not sent because the previous step begins with the same tokens.

    lengths: int64 (rows,), at most the length of the prompt. checksums: uint32 (rows,), CRC-32 of the omitted bytes.
    """

    lengths: Int64s
    checksums: NDArray[np.uint32]


class Sent(NamedTuple):
    """Received rows, unchecked.

    steps: `tokens` contains only sent tokens. prefixes: the omitted tokens; None if rows are whole.
    """

    steps: Steps
    prefixes: Prefixes | None

    def take(self, rows: Int64s) -> Sent:
        """Returns the rows at these indices, in this order. Drops declared columns that none of them has."""
        steps, prefixes = self.steps.take(rows), self.prefixes
        given = {name: extra for name, extra in steps.extras.items() if extra.given.any()}
        return Sent(
            replace(steps, extras=given),
            None if prefixes is None else Prefixes(prefixes.lengths[rows], prefixes.checksums[rows]),
        )


def encode(table: Steps) -> rows_pb2.Rows:
    """Encodes a table as a message."""
    message = small_fields([table])
    for name, column in buffers(table).items():
        setattr(message, name, column.compact().values.tobytes())
    for name, extra in table.extras.items():
        message.columns.append(described(name, [table], None))
        message.column_values.append(extra.values.compact().values.tobytes())
    return message


def described(name: str, tables: Sequence[Steps], left_out: Int64s | None) -> rows_pb2.Column:
    """Returns the description of a declared column for the rows of all tables. left_out: (rows,) how many values of
    each row are not sent."""
    extras = [table.extras.get(name) for table in tables]
    model = next(extra.values.values for extra in extras if extra is not None)
    nothing = [np.full(len(table), -1) for table in tables]
    counts = np.concatenate(
        [
            none if extra is None else np.where(extra.given, extra.values.lengths, none)
            for extra, none in zip(extras, nothing, strict=True)
        ]
    )
    return rows_pb2.Column(
        name=name,
        dtype="bfloat16" if model.dtype == BFLOAT16 else model.dtype.name,
        shape=model.shape[1:],
        counts=(counts if left_out is None else counts - left_out).tolist(),
    )


def small_fields(tables: Sequence[Steps], prefixes: Prefixes | None = None) -> rows_pb2.Rows:
    """Encodes the rows of all tables, without buffers and declared columns."""
    first = tables[0]
    rewards = first.token_rewards is None
    numbers: dict[str, Any] = {name: _unless(_column(tables, name), default) for name, _, default in _NUMBERS}
    texts: dict[str, Any] = {one.name: strings_of(one.name, tables) or () for one in TEXT_FIELDS}
    return rows_pb2.Rows(
        uids=[uid for table in tables for uid in table.uids],
        prompt_lengths=_column(tables, "prompt_lengths").tolist(),
        response_lengths=_column(tables, "response_lengths").tolist(),
        rewards=_column(tables, "rewards").tolist() if rewards else (),
        rewards_pending=_unless(_column(tables, "rewards_pending"), False),
        advantages=() if first.advantages is None else _column(tables, "advantages").tolist(),
        stop_reasons=_stop_reasons(tables),
        reward_components=[
            rows_pb2.RewardComponents(values=components.from_text(text))
            for text in strings_of("reward_components", tables) or ()
        ],
        prefix_lengths=() if prefixes is None else prefixes.lengths.tolist(),
        prefix_checksums=() if prefixes is None else prefixes.checksums.tolist(),
        **numbers,
        **texts,
    )


def buffers(table: Steps) -> dict[str, Ragged]:
    """Returns the columns to send as buffers. A loss mask of ones is not sent."""
    sent = {"tokens": table.tokens}
    for one in TOKEN_FIELDS:
        column = getattr(table, one.name)
        if column is not None and (column is not table.loss_mask or not column.values.all()):
            sent[one.message] = column
    return sent


def decode(message: rows_pb2.Rows) -> Steps:
    """Decodes a message to a checked table, which references the message's buffers.

    Raises InvalidArgumentError that names the field and both sizes if a column does not fit the number of rows or
    tokens. Also raises it for rows without their prefixes, and for the reasons of `gristmill._wire.steps.check`.
    """
    return check(whole(read(message, {})))


def whole(sent: Sent) -> Steps:
    """Returns the rows. Raises InvalidArgumentError if they lack their prefixes."""
    if sent.prefixes is not None:
        raise InvalidArgumentError(
            "prefix_lengths is set, but only SubmitRows accepts rows without their first tokens; send whole rows"
        )
    return sent.steps


def read(message: rows_pb2.Rows, apart: Buffers, column_values: Sequence[memoryview] = ()) -> Sent:
    """Decodes a message to a table, without checking its values.

    apart: buffers that the caller has separated from the message. Raises InvalidArgumentError that names the field and
    both sizes if a column does not fit the number of rows or tokens.
    """

    def buffer(name: str) -> bytes | memoryview:
        return getattr(message, name) or apart.get(name, b"")

    uids = list(message.uids)
    count = len(uids)
    prompts = _per_row(message.prompt_lengths, "prompt_lengths", count, np.int64, None)
    responses = _per_row(message.response_lengths, "response_lengths", count, np.int64, None)
    for name, lengths in (("prompt_lengths", prompts), ("response_lengths", responses)):
        if least(lengths) < 0:
            raise InvalidArgumentError(f"{name} has {lengths.min()}; send lengths of 0 or more")
    prefixes = _prefixes(message, prompts)
    lengths = prompts + responses if prefixes is None else prompts + responses - prefixes.lengths
    tokens = _Rows(lengths).ragged(buffer("tokens"), "tokens", np.int32)
    if tokens is None:
        raise InvalidArgumentError("tokens is empty; every row needs a prompt and a response")
    of_responses = _Rows(responses)
    # The default is a mask of ones, which all rows share. It is not longer than the received tokens.
    loss_mask = of_responses.ragged(buffer("loss_mask"), "loss_mask", np.uint8) or ones(responses)
    token_rewards = _token_rewards(buffer("token_rewards"), of_responses)
    rewards = (
        _per_row(message.rewards, "rewards", count, np.float64, 0.0 if len(message.rewards_pending) else None)
        if token_rewards is None
        else token_rewards.row_sums()
    )
    numbers: dict[str, Any] = {
        name: _per_row(getattr(message, name), name, count, dtype, default) for name, dtype, default in _NUMBERS
    }
    token_versions = of_responses.ragged(buffer("token_policy_versions"), "token_policy_versions", np.int32)
    if token_versions is not None:
        versions = numbers["policy_versions"]
        numbers["policy_versions"] = np.where(versions == UNKNOWN, oldest_versions(token_versions), versions)
    plain: dict[str, Any] = {
        one.name: of_responses.ragged(buffer(one.message), one.message, one.dtype) for one in PLAIN_FIELDS
    }
    texts: dict[str, Any] = {
        one.name: _strings(sent, one.name, count) for one in TEXT_FIELDS if (sent := getattr(message, one.name))
    }
    steps = Steps(
        uids=uids,
        stop_reasons=_strings(message.stop_reasons, "stop_reasons", count),
        tokens=tokens,
        prompt_lengths=prompts,
        loss_mask=loss_mask,
        rewards=rewards,
        token_rewards=token_rewards,
        rewards_pending=_per_row(message.rewards_pending, "rewards_pending", count, np.bool_, False),
        advantages=(
            _per_row(message.advantages, "advantages", count, np.float64, None) if message.advantages else None
        ),
        token_advantages=of_responses.ragged(buffer("token_advantages"), "token_advantages", np.float32),
        extras=_extras(message.columns, [*column_values, *message.column_values], count) if message.columns else {},
        token_versions=token_versions,
        reward_components=_components(message, uids) if message.reward_components else None,
        prefix_lengths=None if prefixes is None else prefixes.lengths,
        **plain,
        **numbers,
        **texts,
    )
    return Sent(steps, prefixes)


def _extras(columns: Sequence[rows_pb2.Column], values: Sequence[bytes | memoryview], count: int) -> dict[str, Extra]:
    if len(columns) != len(values):
        raise InvalidArgumentError(
            f"columns has {len(columns)} entries, but column_values has {len(values)}; send values for each column"
        )
    extras = {column.name: _extra(column, buffer, count) for column, buffer in zip(columns, values, strict=True)}
    if len(extras) < len(columns):
        names = [column.name for column in columns]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgumentError(f"columns: {twice!r} is sent twice; send each column once")
    return extras


def _extra(column: rows_pb2.Column, buffer: bytes | memoryview, count: int) -> Extra:
    name, shape = column.name, tuple(column.shape)
    is_possible = len(shape) <= MOST_AXES and min(shape, default=1) >= 1 and math.prod(shape) <= MOST_ELEMENT_BYTES
    if column.dtype not in DTYPES or not is_possible:
        raise InvalidArgumentError(
            f"column {name!r} has values of dtype {column.dtype!r:.80} and shape {list(shape[: MOST_AXES + 1])}; send "
            "the dtype and shape that the run declares"
        )
    counts = _per_row(column.counts, f"counts of column {name!r}", count, np.int64, None)
    if least(counts) < -1:
        raise InvalidArgumentError(f"counts of column {name!r} has {counts.min()}; send counts of -1 or more")
    lengths = np.maximum(counts, 0)
    dtype = BFLOAT16 if column.dtype == "bfloat16" else np.dtype(column.dtype)
    expected = sum_of(lengths) * dtype.itemsize * math.prod(shape)
    if len(buffer) != expected:
        raise InvalidArgumentError(
            f"column {name!r} has {len(buffer)} bytes, but its counts need {expected} ({column.dtype} of shape "
            f"{list(shape)} each); send values for all counts"
        )
    if dtype == np.bool_ and len(buffer) and np.frombuffer(buffer, np.uint8).max() > 1:
        raise InvalidArgumentError(f"column {name!r} has a byte other than 0 and 1; send 0 or 1 for each bool")
    values = np.frombuffer(buffer, dtype) if len(buffer) else np.empty(0, dtype)
    return Extra(Ragged.from_lengths(values.reshape(-1, *shape), lengths), counts >= 0)


def _column(tables: Sequence[Steps], name: str) -> Array:
    columns = [getattr(table, name) for table in tables]
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _unless(column: Array, default: Any) -> Sequence[Any]:
    """Returns the column's values; an empty list if all are the default. default: if None, always sends values."""
    values: list[Any] = column.tolist()
    return [] if values.count(default) == len(values) else values


def _stop_reasons(tables: Sequence[Steps]) -> list[str]:
    reasons = [reason for table in tables for reason in table.stop_reasons]
    return reasons if any(reasons) else []


def few_of(count: int, dtype: Any, default: Any) -> Array:
    """Returns a column with the default in each row. Small columns are cached, because most tables have few rows."""
    return _few_of(count, dtype, default) if count <= FEW_ROWS else np.full(count, default, dtype)


@lru_cache(256)
def _few_of(count: int, dtype: Any, default: Any) -> Array:
    column = np.full(count, default, dtype)
    column.flags.writeable = False
    return column


def _per_row(values: Any, name: str, count: int, dtype: Any, default: Any) -> Array:
    if not len(values) and default is not None:
        return few_of(count, dtype, default)
    if len(values) != count:
        raise InvalidArgumentError(f"{name} has {len(values)} entries for {count} rows (uids); send one per row")
    return np.fromiter(values, dtype, count)


def _strings(values: Any, name: str, count: int) -> list[str]:
    if not len(values):
        return [""] * count
    if len(values) != count:
        raise InvalidArgumentError(f"{name} has {len(values)} entries for {count} rows (uids); send one per row")
    return list(values)


def _components(message: rows_pb2.Rows, uids: Sequence[str]) -> list[str]:
    sent = message.reward_components
    if len(sent) != len(uids):
        raise InvalidArgumentError(
            f"reward_components has {len(sent)} entries for {len(uids)} rows (uids); send one per row"
        )
    return [components.to_text(dict(one.values), f"uid {uid!r}") for uid, one in zip(uids, sent, strict=True)]


def _prefixes(message: rows_pb2.Rows, prompts: Int64s) -> Prefixes | None:
    if not len(message.prefix_lengths):
        return None
    lengths = _per_row(message.prefix_lengths, "prefix_lengths", len(prompts), np.int64, None)
    checksums = _per_row(message.prefix_checksums, "prefix_checksums", len(prompts), np.uint32, None)
    bad = (lengths < 0) | (lengths > prompts)
    if bad.any():
        row = int(bad.argmax())
        raise InvalidArgumentError(
            f"prefix_lengths[{row}] is {lengths[row]}, but the prompt has {prompts[row]} tokens; omit at most these"
        )
    return Prefixes(lengths, checksums) if lengths.any() else None


class _Rows:
    """Reads columns from buffers with the concatenated values of all rows."""

    def __init__(self, lengths: Int64s) -> None:
        self._lengths, self._starts, self.total = lengths, starts_of(lengths), sum_of(lengths)

    def ragged(self, buffer: bytes | memoryview, name: str, dtype: Any) -> Ragged | None:
        if not len(buffer):
            return None
        expected = self.total * np.dtype(dtype).itemsize
        if len(buffer) != expected:
            raise InvalidArgumentError(
                f"{name} has {len(buffer)} bytes, but the rows' lengths need {expected} ({np.dtype(dtype).name} each)"
            )
        return Ragged(np.frombuffer(buffer, dtype), self._starts, self._lengths)


def ones(lengths: Int64s) -> Ragged:
    """Returns a mask of ones for rows of these lengths. All rows share its memory."""
    return Ragged(np.ones(int(greatest(lengths)), np.uint8), _per_row((), "", len(lengths), np.int64, 0), lengths)


def _token_rewards(buffer: bytes | memoryview, rows: _Rows) -> Ragged | None:
    return rows.ragged(buffer, "token_rewards", np.float64 if len(buffer) == 8 * rows.total else np.float32)
