"""Steps: the table of rows that rollout workers submit, and the rules for single rows.

Tables are built from Python lists, files and messages, and are the pipeline's input. The service checks the rules for
several rows (steps 0..T-1, the range of samples, mixed batches).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import FEW_ROWS, Array, Int64s, Ragged, least
from gristmill._wire.row_fields import (
    LONGEST_COMPONENT,
    LONGEST_TAG,
    LONGEST_TEXT,
    LONGEST_UID,
    MOST_COMPONENTS,
    OPTIONAL_STRINGS,
    PLAIN_FIELDS,
    ROW_FIELDS,
    TEXT_FIELDS,
    TOKEN_FIELDS,
    UNKNOWN,
    TokenField,
)
from gristmill._wire.texts import check_length, check_text
from gristmill.errors import InvalidArgumentError

INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
# np.errstate takes as long as reading about this number of values.
_MANY = 16_384
_FINITE = "it must be finite in float32"


_KEYS = tuple(one.key for one in TOKEN_FIELDS)
_columns_of_tokens = attrgetter(*(one.name for one in TOKEN_FIELDS))


class TrajectoryKey(NamedTuple):
    """Identifies a trajectory of a run. `round` counts the passes over the prompts."""

    round: int
    uid: str
    sample: int

    def __str__(self) -> str:
        where = f"uid {self.uid!r} sample {self.sample}"
        return f"{where} round {self.round}" if self.round else where


@dataclass(frozen=True, slots=True, eq=False)
class Extra:
    """The values of one declared column (`gristmill._wire.column_spec`).

    values: ragged, (n, *shape), one value per row, response token, token or item; empty if the row does not have the
        column. A row may omit the first values of a shared `token` column if the previous step has them.
    given: bool (rows,), whether the row has the column.
    before: in a client's table of one row, the omitted values, in pieces.
    """

    values: Ragged
    given: NDArray[np.bool_]
    before: Sequence[Array] = ()

    def take(self, rows: Any) -> Extra:
        return Extra(self.values.take(rows), self.given[rows])

    def part(self, rows: slice) -> Extra:
        return Extra(self.values.part(rows), self.given[rows])

    @property
    def left_out(self) -> int:
        """The number of values that the only row of the table omits."""
        return sum(map(len, self.before))

    def whole(self) -> Extra:
        """Returns the column with the omitted values."""
        if not self.before:
            return self
        values = np.concatenate([*self.before, self.values[0]])
        return Extra(Ragged.from_arrays([values], values.dtype), self.given)

    @property
    def element_bytes(self) -> int:
        """The bytes of one value."""
        return self.values.values.itemsize * math.prod(self.values.values.shape[1:])

    @property
    def row_bytes(self) -> Int64s:
        """The bytes of each row's values; (rows,)."""
        return self.values.lengths * self.element_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Rows as columns, in any order.

    uids, stop_reasons: (n,) Python strings, "" if the stop reason is unknown.
    rounds, samples, steps, attempts, policy_versions: int32 (n,); policy version -1 is unknown.
    is_last_steps: bool (n,).
    tokens: ragged int32, each row's prompt followed by its response.
    prompt_lengths: int64 (n,), the number of prompt tokens.
    loss_mask: ragged uint8, one per response token.
    logprobs: ragged float32, one per response token; None if rows have none.
    rewards: float64 (n,), the step's reward; the sum of its `token_rewards` if it has any.
    token_rewards: ragged float32 or float64, one per response token; None for scalar rewards.
    rewards_pending: bool (n,), whether the reward will be set later.
    advantages: float64 (n,) or None. token_advantages: ragged float32, one per response token, or None.
    extras: the declared columns that any row has, by name.
    token_versions: ragged int32, the policy version that sampled each response token, -1 if unknown; None if no row has
        any. `policy_versions` is then the oldest version of each row.
    tags: (n,) the environment or task of each row's group, "" if the row has none; None if no row has any.
    reward_components: (n,) the components of rewards on last steps, as JSON, "" for other rows; None if no row has any.
    step_keys: (n,) a key of each step, such as a hash of a state, "" if the step has none; None if no row has any.
    agents, episodes: (n,) the role and the joint rollout of each row's trajectory, "" if it has none; None if no row
        has any. partitions: (n,) likewise, which rows may be in one micro-batch.
    prefix_lengths: int64 (n,), how many first tokens of each row are omitted in `tokens` because another row has them;
        None if all rows are whole.
    """

    uids: Sequence[str]
    rounds: NDArray[np.int32]
    samples: NDArray[np.int32]
    steps: NDArray[np.int32]
    attempts: NDArray[np.int32]
    is_last_steps: NDArray[np.bool_]
    stop_reasons: Sequence[str]
    policy_versions: NDArray[np.int32]
    tokens: Ragged
    prompt_lengths: Int64s
    loss_mask: Ragged
    logprobs: Ragged | None
    rewards: NDArray[np.float64]
    token_rewards: Ragged | None
    rewards_pending: NDArray[np.bool_]
    advantages: NDArray[np.float64] | None = None
    token_advantages: Ragged | None = None
    extras: Mapping[str, Extra] = field(default_factory=dict)
    token_versions: Ragged | None = None
    tags: Sequence[str] | None = None
    reward_components: Sequence[str] | None = None
    step_keys: Sequence[str] | None = None
    agents: Sequence[str] | None = None
    episodes: Sequence[str] | None = None
    partitions: Sequence[str] | None = None
    prefix_lengths: Int64s | None = None

    def __len__(self) -> int:
        return len(self.uids)

    @property
    def response_lengths(self) -> Int64s:
        return self.loss_mask.lengths

    @property
    def token_columns(self) -> list[Ragged]:
        """The table's columns with one value per response token."""
        return [column for column in _columns_of_tokens(self) if column is not None]

    @property
    def sequence_lengths(self) -> Int64s:
        """The number of tokens of each row, including tokens that are omitted in `tokens`; int64 (n,)."""
        stored = self.tokens.lengths
        return stored if self.prefix_lengths is None else stored + self.prefix_lengths

    def key(self, row: int) -> TrajectoryKey:
        return TrajectoryKey(int(self.rounds[row]), self.uids[row], int(self.samples[row]))

    def name(self, row: int) -> str:
        """Returns a description of the row for messages."""
        return f"{self.key(row)} step {self.steps[row]}"

    def take(self, rows: Int64s) -> Steps:
        """Returns the rows at these indices, in this order. Token data is shared."""

        def pick(column: Any) -> Any:
            if isinstance(column, Ragged):
                return column.take(rows)
            if isinstance(column, np.ndarray):
                return column[rows]
            if isinstance(column, dict):
                return {name: extra.take(rows) for name, extra in column.items()}
            return None if column is None else [column[row] for row in rows.tolist()]

        return Steps(**{field.name: pick(getattr(self, field.name)) for field in fields(self)})

    def part(self, rows: slice) -> Steps:
        """Returns the rows of a slice with step 1. Token data is shared, and compact columns stay compact."""

        def cut(column: Any) -> Any:
            if isinstance(column, dict):
                return {name: extra.part(rows) for name, extra in column.items()}
            if isinstance(column, Ragged):
                return column.part(rows)
            return None if column is None else column[rows]

        return Steps(**{field.name: cut(getattr(self, field.name)) for field in fields(self)})


def concat(tables: Sequence[Steps]) -> Steps:
    """Concatenates tables. Token data is copied once.

    Raises InvalidArgumentError if only some tables have logprobs, rewards or advantages per token.
    """
    if len(tables) == 1:
        return tables[0]
    return Steps(**{field.name: _concat_column(field.name, tables) for field in fields(Steps)})


def _concat_column(name: str, tables: Sequence[Steps]) -> Any:
    columns = [getattr(table, name) for table in tables]
    if name == "extras":
        return {
            extra: _concat_extra(extra, tables) for extra in dict.fromkeys(key for column in columns for key in column)
        }
    if name in ("uids", "stop_reasons"):
        return [value for column in columns for value in column]
    if name in OPTIONAL_STRINGS:
        return strings_of(name, tables)
    if name == "token_versions" and any(column is not None for column in columns):
        columns = [versions_of_tokens(table) for table in tables]
    if name in _FILLED and any(column is not None for column in columns):
        fill = _FILLED[name]
        columns = [
            filled(table, fill) if column is None else column for table, column in zip(tables, columns, strict=True)
        ]
    missing = [index for index, column in enumerate(columns) if column is None]
    if len(missing) == len(columns):
        return None
    if missing:
        present = next(index for index, column in enumerate(columns) if column is not None)
        raise InvalidArgumentError(
            f"{name}: {tables[present].name(0)} has them, but {tables[missing[0]].name(0)} does not; "
            "send them in all rows of a run, or in none"
        )
    if isinstance(columns[0], Ragged):
        dtype = np.result_type(*(column.values.dtype for column in columns))
        return Ragged.from_arrays([view for column in columns for view in column.arrays()], dtype)
    return np.concatenate(columns)


_FILLED = {one.name: one for one in PLAIN_FIELDS if one.fill is not None}


def filled(table: Steps, field: TokenField) -> Ragged:
    """Returns a column of the plain field's fill values, for a table without the field."""
    lengths = table.response_lengths
    return Ragged.from_lengths(np.full(int(lengths.sum()), field.fill, field.dtype), lengths)


def _concat_extra(name: str, tables: Sequence[Steps]) -> Extra:
    """Concatenates a declared column. Some tables may not have the column."""
    model = next(table.extras[name].values.values for table in tables if name in table.extras)
    parts = [table.extras.get(name) or no_extra(len(table), model[:0]) for table in tables]
    return Extra(
        Ragged.from_arrays([view for part in parts for view in part.values.arrays()], model.dtype),
        np.concatenate([part.given for part in parts]),
    )


def no_extra(rows: int, empty: Array) -> Extra:
    """Returns a declared column for rows that do not have it. empty: an array of shape (0, *shape)."""
    nothing = np.zeros(rows, np.int64)
    return Extra(Ragged(empty, nothing, nothing), np.zeros(rows, np.bool_))


def versions_of_tokens(table: Steps) -> Ragged:
    """Returns the policy version of each response token: the row's version if the table has none per token."""
    if table.token_versions is not None:
        return table.token_versions
    lengths = table.response_lengths
    return Ragged.from_lengths(np.repeat(table.policy_versions, lengths), lengths)


def oldest_versions(token_versions: Ragged) -> NDArray[np.int32]:
    """Returns the lowest known version of each row; -1 if none is known."""
    known = (array[array > UNKNOWN] for array in token_versions.arrays())
    return np.array([array.min(initial=INT32_MAX) if array.size else UNKNOWN for array in known], np.int32)


def strings_of(name: str, tables: Sequence[Steps]) -> list[str] | None:
    """Returns the strings of an optional column of all tables, such as `tags`; None if no table has it."""
    columns: list[Sequence[str] | None] = [getattr(table, name) for table in tables]
    if all(column is None for column in columns):
        return None
    parts = ([""] * len(table) if column is None else column for table, column in zip(tables, columns, strict=True))
    return [text for part in parts for text in part]


def check_tag(tag: str, subject: str) -> None:
    """Refuses a tag that is too long, or not valid Unicode."""
    check_length(tag, LONGEST_TAG, f"{subject}: tag", "name the environment or task")
    check_text(tag, f"{subject}: tag")


def check(table: Steps) -> Steps:
    """Returns the table if every row obeys the rules for single rows.

    Raises InvalidArgumentError that names the first invalid row, the field, the value and the remedy.
    """
    _check_identity(table)
    _check_lengths(table)
    _check_tokens(table)
    if table.token_versions is not None:
        _check_versions(table, table.token_versions)
    _check_numbers(table)
    return table


def check_uid(uid: str) -> None:
    """Refuses a uid that is too long, because runs store every uid."""
    check_length(uid, LONGEST_UID, f"uid {uid[:50]!r}...", "shorten it")
    check_text(uid, "uid")


_LONGEST = (
    ("stop_reasons", "stop_reason", LONGEST_TEXT),
    *((one.name, one.key, one.longest) for one in TEXT_FIELDS if one.name != "tags"),
)
_LOWEST = tuple((one.name, one.lowest) for one in ROW_FIELDS if one.lowest is not None)


def _check_identity(table: Steps) -> None:
    for name, lowest in _LOWEST:
        column = getattr(table, name)
        if column.size and least(column) < lowest:
            at = int((column < lowest).argmax())
            raise InvalidArgumentError(f"{table.name(at)}: {name[:-1]} is {column[at]}; it must be at least {lowest}")
    if "" in table.uids:
        raise InvalidArgumentError(f"row {list(table.uids).index('')}: uid is empty; set the uid of the row's prompt")
    if max(map(len, table.uids), default=0) > LONGEST_UID:
        check_uid(max(table.uids, key=len))
    for name, key, longest in _LONGEST:
        texts = getattr(table, name)
        if texts is not None and max(map(len, texts), default=0) > longest:
            row, text = max(enumerate(texts), key=lambda numbered: len(numbered[1]))
            check_length(text, longest, f"{table.name(row)}: {key} {text[:50]!r}...", "shorten it")
    for row, text in enumerate(table.reward_components or ()):
        if text:
            _check_components(table, row, json.loads(text))
    for tag in set(table.tags or ()):
        check_tag(tag, table.name(list(table.tags or ()).index(tag)))


def _check_components(table: Steps, row: int, components: Mapping[str, float]) -> None:
    where, count = f"{table.name(row)}: reward_components", len(components)
    if not table.is_last_steps[row]:
        raise InvalidArgumentError(f"{where} is set, and is_last_step is false; send it with the last step")
    if count > MOST_COMPONENTS:
        raise InvalidArgumentError(f"{where} has {count} names, and the limit is {MOST_COMPONENTS}; send fewer")
    for name, number in components.items():
        if not name:
            raise InvalidArgumentError(f"{where} has an empty name; name each component")
        check_length(name, LONGEST_COMPONENT, f"{where}: the name {name[:20]!r}...", "shorten it")
        check_text(name, where)
        if not abs(number) <= FLOAT32_MAX:
            raise InvalidArgumentError(f"{where}.{name} is {number}; {_FINITE}")


def _check_lengths(table: Steps) -> None:
    responses = table.sequence_lengths - table.prompt_lengths
    parts = (("prompt_token_ids", "prompt", table.prompt_lengths), ("response_ids", "response", responses))
    for name, part, lengths in parts:
        if lengths.size and least(lengths) < 1:
            empty = int((lengths < 1).argmax())
            raise InvalidArgumentError(f"{table.name(empty)}: {name} is empty; a {part} must have at least one token")
    seen: list[Int64s] = []
    for name, column in _response_columns(table):
        if any(column.lengths is lengths for lengths in seen):
            continue
        seen.append(column.lengths)
        if len(responses) <= FEW_ROWS and column.lengths.tolist() == responses.tolist():
            continue
        row = _first(column.lengths != responses)
        if row is not None:
            raise InvalidArgumentError(
                f"{table.name(row)}: {name} has {column.lengths[row]} values, but response_ids has {responses[row]}; "
                "send one value per response token"
            )


def _check_tokens(table: Steps) -> None:
    # Check all values in one pass without a temporary array. Search for the position only if a value is invalid.
    if table.tokens.values.size and table.tokens.values.min() < 0:
        for row, tokens in enumerate(table.tokens.arrays()):
            bad = _first(tokens < 0)
            if bad is not None:
                split = int(table.prompt_lengths[row])
                at = bad + int(table.sequence_lengths[row]) - len(tokens)
                field, index = ("prompt_token_ids", at) if at < split else ("response_ids", at - split)
                raise InvalidArgumentError(
                    f"{table.name(row)}: {field}[{index}] is {tokens[bad]}; token ids are 0..{INT32_MAX}"
                )
    if table.loss_mask.values.size and table.loss_mask.values.max() > 1:
        _refuse_value(table, "loss_mask", table.loss_mask, lambda values: values > 1, "it must be 0 or 1")


def _check_versions(table: Steps, versions: Ragged) -> None:
    if versions.values.size and versions.values.min() < UNKNOWN:
        _refuse_value(
            table, "policy_versions", versions, lambda values: values < UNKNOWN, "it must be at least -1 (unknown)"
        )
    oldest = oldest_versions(versions)
    row = _first(oldest != table.policy_versions)
    if row is not None:
        raise InvalidArgumentError(
            f"{table.name(row)}: policy_version is {table.policy_versions[row]}, but the oldest of its policy_versions "
            f"is {oldest[row]}; omit policy_version"
        )


def _check_numbers(table: Steps) -> None:
    if len(table) > FEW_ROWS or not all(abs(reward) <= FLOAT32_MAX for reward in table.rewards.tolist()):
        row = _first(_not_finite(table.rewards) & ~table.rewards_pending)
        if row is not None and table.token_rewards is None:
            raise InvalidArgumentError(f"{table.name(row)}: reward is {table.rewards[row]}; {_FINITE}")
    if table.advantages is not None:
        row = _first(_not_finite(table.advantages))
        if row is not None:
            raise InvalidArgumentError(f"{table.name(row)}: advantage is {table.advantages[row]}; {_FINITE}")
    for name, column in _response_columns(table):
        values = column.values
        if values.dtype.kind == "f" and values.size and _is_suspicious(values):
            _refuse_value(table, name, column, _not_finite, _FINITE)


def _is_suspicious(values: Array) -> bool:
    """Returns whether some value may not be finite in float32, without a temporary array. If a value is NaN or
    infinite, so is the sum (which may also overflow). If a value exceeds float32, so does the minimum or maximum."""
    if values.dtype == np.float32 and values.size > _MANY:
        with np.errstate(over="ignore", invalid="ignore"):
            return not math.isfinite(float(values.sum()))
    return not -FLOAT32_MAX <= values.min() <= values.max() <= FLOAT32_MAX


def _not_finite(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns which values are not finite in float32, the type in shards."""
    fits: NDArray[np.bool_] = np.abs(values) <= FLOAT32_MAX
    return ~fits


def _refuse_value(table: Steps, name: str, column: Ragged, is_bad: Any, rule: str) -> None:
    for row, values in enumerate(column.arrays()):
        bad = _first(is_bad(values))
        if bad is not None:
            raise InvalidArgumentError(f"{table.name(row)}: {name}[{bad}] is {values[bad]}; {rule}")


def _response_columns(table: Steps) -> list[tuple[str, Ragged]]:
    columns = zip(_KEYS, _columns_of_tokens(table), strict=True)
    return [(name, column) for name, column in columns if column is not None]


def _first(bad: NDArray[np.bool_]) -> int | None:
    """Returns the index of the first true value, if any."""
    index = int(bad.argmax()) if bad.size else 0
    return index if bad.size and bad[index] else None
