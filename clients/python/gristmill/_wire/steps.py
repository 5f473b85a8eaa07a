"""Steps: the table of rows as rollout workers produce them, and the rules that each row obeys by itself.

The same table is built from Python lists, from files and from the wire, and is what the pipeline reads. Rules that
need more than one row (steps 0..T-1, samples in range, mixed batches) belong to the service.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill._wire.columns import FEW_ROWS, Array, Int64s, Ragged, least
from gristmill.errors import InvalidArgumentError

UNKNOWN = -1
LONGEST_TAG = 100
LONGEST_UID = LONGEST_STOP_REASON = 1000
INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
# Changing how NumPy treats errors costs as much as reading so many values.
_MANY = 16_384
_FINITE = "it must be finite, also as float32"


class RowField(NamedTuple):
    """A number that each row has.

    name: of the column of `Steps`, of `gristmill.v1.Rows`, and of stored tables. given: its name in a row as a mapping.
    dtype: of the column. default: of rows that do not say. lowest: what a row may have. is_required: whether a message
    has to say.
    """

    name: str
    given: str
    dtype: Any
    default: Any
    lowest: int | None = 0
    is_required: bool = False


class TokenField(NamedTuple):
    """A column with one value per response token.

    name: of the column of `Steps` and of stored tables. given: its name in a row as a mapping. message: in
    `gristmill.v1.Rows`. dtype: of the column.
    is_plain: nothing else of a row is derived from it, and it does not depend on another field: codecs, tables and
        digests need nothing but this entry.
    fill: of a plain field, the value in rows that lack it where others have it; None: such rows are refused.
    label: of a plain field, what precedes its values in digests of rows, so that they are not taken for those of
        another field.
    """

    name: str
    given: str
    message: str
    dtype: Any
    is_plain: bool = False
    fill: float | None = None
    label: bytes = b""


ROW_FIELDS = (
    RowField("rounds", "round", np.int32, 0),
    RowField("samples", "sample", np.int32, 0, is_required=True),
    RowField("steps", "step", np.int32, 0),
    RowField("attempts", "attempt", np.int32, 0),
    RowField("is_last_steps", "is_last_step", np.bool_, True, lowest=None),
    RowField("policy_versions", "policy_version", np.int32, UNKNOWN, lowest=UNKNOWN),
)
TOKEN_FIELDS = (
    TokenField("loss_mask", "loss_mask", "loss_mask", np.uint8),
    TokenField("logprobs", "rollout_logprobs", "rollout_logprobs", np.float32, is_plain=True),
    TokenField("token_rewards", "reward", "token_rewards", np.float64),
    TokenField("token_advantages", "advantage", "token_advantages", np.float32),
    TokenField("token_versions", "policy_versions", "token_policy_versions", np.int32),
)
"""The fields of rows, from which protobuf messages, rows as mappings, stored tables and digests take theirs. The order
is that of digests and stored tables: a new field comes last."""

PLAIN_FIELDS = tuple(one for one in TOKEN_FIELDS if one.is_plain)
_GIVEN = tuple(one.given for one in TOKEN_FIELDS)
_columns_of_tokens = attrgetter(*(one.name for one in TOKEN_FIELDS))


class TrajectoryKey(NamedTuple):
    """Names one trajectory of a run. `round` counts the times that a uid is sampled again."""

    round: int
    uid: str
    sample: int

    def __str__(self) -> str:
        where = f"uid {self.uid!r} sample {self.sample}"
        return f"{where} round {self.round}" if self.round else where


@dataclass(frozen=True, slots=True, eq=False)
class Extra:
    """The values of one declared column (`gristmill._wire.column_spec`).

    values: ragged, (n, *shape): of each row one a row, response token, token or item; none where the row does not have
        the column. Of a shared `token` column a row may lack those of its first tokens: they are the step before's.
    given: bool (rows,), whether the row has the column.
    before: of a table of one row, the pieces of values that it lacks, where a client holds them.
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
        """How many values a table's one row lacks."""
        return sum(map(len, self.before))

    def whole(self) -> Extra:
        """The same with the values that were left out."""
        if not self.before:
            return self
        values = np.concatenate([*self.before, self.values[0]])
        return Extra(Ragged.from_arrays([values], values.dtype), self.given)

    @property
    def element_bytes(self) -> int:
        """Bytes of one value."""
        return self.values.values.itemsize * math.prod(self.values.values.shape[1:])

    @property
    def row_bytes(self) -> Int64s:
        """Bytes of each row's values; (rows,)."""
        return self.values.lengths * self.element_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Rows as columns, in any order.

    uids, stop_reasons: (n,) Python strings, "" an unknown stop reason.
    rounds, samples, steps, attempts, policy_versions: int32 (n,); policy version -1 is unknown.
    is_last_steps: bool (n,).
    tokens: ragged int32, of each row the prompt and then the response.
    prompt_lengths: int64 (n,), how much of `tokens` is the prompt.
    loss_mask: ragged uint8 over the response.
    logprobs: ragged float32 over the response, or None when the rows have none.
    rewards: float64 (n,), the step's reward, or its sum where `token_rewards` are given.
    token_rewards: ragged float32 or float64 over the response, or None for scalar rewards.
    rewards_pending: bool (n,), rows whose reward is still to come.
    advantages: float64 (n,) or None; token_advantages: ragged float32 over the response or None.
    extras: the declared columns that any row has, by name.
    token_versions: ragged int32 over the response, the policy version that sampled each token, -1 unknown, or None
        where no row says; `policy_versions` are the oldest of them.
    tags: (n,) the environment or task of each row's group, "" where the row does not say, or None where none says.
    prefix_lengths: int64 (n,), how many of each row's first tokens `tokens` lacks, for another row has them; None where
        it has all of every row.
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
    prefix_lengths: Int64s | None = None

    def __len__(self) -> int:
        return len(self.uids)

    @property
    def response_lengths(self) -> Int64s:
        return self.loss_mask.lengths

    @property
    def token_columns(self) -> list[Ragged]:
        """The columns with one value per response token that the table has."""
        return [column for column in _columns_of_tokens(self) if column is not None]

    @property
    def sequence_lengths(self) -> Int64s:
        """Tokens of each row, those that `tokens` lacks too; int64 (n,)."""
        own = self.tokens.lengths
        return own if self.prefix_lengths is None else own + self.prefix_lengths

    def key(self, row: int) -> TrajectoryKey:
        return TrajectoryKey(int(self.rounds[row]), self.uids[row], int(self.samples[row]))

    def name(self, row: int) -> str:
        """The row, for a message."""
        return f"{self.key(row)} step {self.steps[row]}"

    def take(self, rows: Int64s) -> Steps:
        """The rows at these indices, in that order, sharing the token data."""

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
        """The rows of a slice without a step, sharing the token data: columns that are compact stay so."""

        def cut(column: Any) -> Any:
            if isinstance(column, dict):
                return {name: extra.part(rows) for name, extra in column.items()}
            if isinstance(column, Ragged):
                return column.part(rows)
            return None if column is None else column[rows]

        return Steps(**{field.name: cut(getattr(self, field.name)) for field in fields(self)})


def concat(tables: Sequence[Steps]) -> Steps:
    """The rows of all tables, one after another; token data is copied once.

    Raises InvalidArgumentError when some carry logprobs, per-token rewards or advantages and others do not.
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
    if name == "tags":
        return tags_of(tables)
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
        given = next(index for index, column in enumerate(columns) if column is not None)
        raise InvalidArgumentError(
            f"{name}: {tables[given].name(0)} has them and {tables[missing[0]].name(0)} does not; "
            "all rows of a run have them, or none has"
        )
    if isinstance(columns[0], Ragged):
        dtype = np.result_type(*(column.values.dtype for column in columns))
        return Ragged.from_arrays([view for column in columns for view in column.arrays()], dtype)
    return np.concatenate(columns)


_FILLED = {one.name: one for one in PLAIN_FIELDS if one.fill is not None}


def filled(table: Steps, field: TokenField) -> Ragged:
    """A plain field's column of rows that lack it."""
    lengths = table.response_lengths
    return Ragged.from_lengths(np.full(int(lengths.sum()), field.fill, field.dtype), lengths)


def _concat_extra(name: str, tables: Sequence[Steps]) -> Extra:
    """Rows of tables that do not have the column do not have it either."""
    model = next(table.extras[name].values.values for table in tables if name in table.extras)
    parts = [table.extras.get(name) or no_extra(len(table), model[:0]) for table in tables]
    return Extra(
        Ragged.from_arrays([view for part in parts for view in part.values.arrays()], model.dtype),
        np.concatenate([part.given for part in parts]),
    )


def no_extra(rows: int, empty: Array) -> Extra:
    """The column of rows that do not have it. empty: (0, *shape)."""
    nothing = np.zeros(rows, np.int64)
    return Extra(Ragged(empty, nothing, nothing), np.zeros(rows, np.bool_))


def versions_of_tokens(table: Steps) -> Ragged:
    """The policy version of each response token; a row that does not say per token has one for all of them."""
    if table.token_versions is not None:
        return table.token_versions
    lengths = table.response_lengths
    return Ragged.from_lengths(np.repeat(table.policy_versions, lengths), lengths)


def oldest_versions(token_versions: Ragged) -> NDArray[np.int32]:
    """The lowest known version of each row, -1 where none is known."""
    known = (array[array > UNKNOWN] for array in token_versions.arrays())
    return np.array([array.min(initial=INT32_MAX) if array.size else UNKNOWN for array in known], np.int32)


def tags_of(tables: Sequence[Steps]) -> list[str] | None:
    """The rows' tags, one table after another; None where no row has one."""
    if all(table.tags is None for table in tables):
        return None
    return [tag for table in tables for tag in ([""] * len(table) if table.tags is None else table.tags)]


def check_tag(tag: str, what: str) -> None:
    """Refuses a tag that is no name."""
    check_length(tag, LONGEST_TAG, f"{what}: tag", "name the environment or task")
    check_text(tag, f"{what}: tag")


def check(table: Steps) -> Steps:
    """The table itself, if every row obeys the rules that concern it alone.

    Raises InvalidArgumentError naming the first offending trajectory, the field, the value and the remedy.
    """
    _check_identity(table)
    _check_lengths(table)
    _check_tokens(table)
    if table.token_versions is not None:
        _check_versions(table, table.token_versions)
    _check_numbers(table)
    return table


def check_length(text: str, most: int, what: str, remedy: str) -> None:
    """Raises InvalidArgumentError for a string of more characters than that."""
    if len(text) > most:
        raise InvalidArgumentError(f"{what} has {len(text)} characters, and {most} are the most; {remedy}")


def check_text(text: str, what: str) -> None:
    """Raises InvalidArgumentError for a string that no file, message or metadata could hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"{what} is {text!r}, which is not valid Unicode: {error.reason}") from None


def check_uid(uid: str) -> None:
    """Refuses a uid that is no name: runs remember every one."""
    check_length(uid, LONGEST_UID, f"uid {uid[:50]!r}...", "name the prompt in fewer")
    check_text(uid, "uid")


_LOWEST = tuple((one.name, one.lowest) for one in ROW_FIELDS if one.lowest is not None)


def _check_identity(table: Steps) -> None:
    for name, lowest in _LOWEST:
        column = getattr(table, name)
        if column.size and least(column) < lowest:
            at = int((column < lowest).argmax())
            raise InvalidArgumentError(f"{table.name(at)}: {name[:-1]} is {column[at]}; it must be at least {lowest}")
    if "" in table.uids:
        raise InvalidArgumentError(
            f"row {list(table.uids).index('')}: uid is empty; name the prompt that it belongs to"
        )
    if max(map(len, table.uids), default=0) > LONGEST_UID:
        check_uid(max(table.uids, key=len))
    if max(map(len, table.stop_reasons), default=0) > LONGEST_STOP_REASON:
        reason = max(table.stop_reasons, key=len)
        what = f"{table.name(list(table.stop_reasons).index(reason))}: stop_reason {reason[:50]!r}..."
        check_length(reason, LONGEST_STOP_REASON, what, "name why the response ended, or shorten it")
    for tag in set(table.tags or ()):
        check_tag(tag, table.name(list(table.tags or ()).index(tag)))


def _check_lengths(table: Steps) -> None:
    responses = table.sequence_lengths - table.prompt_lengths
    parts = (("prompt_token_ids", "prompt", table.prompt_lengths), ("response_ids", "response", responses))
    for name, what, lengths in parts:
        if lengths.size and least(lengths) < 1:
            empty = int((lengths < 1).argmax())
            raise InvalidArgumentError(f"{table.name(empty)}: {name} is empty; a {what} has at least one token")
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
                f"{table.name(row)}: {name} has {column.lengths[row]} values and response_ids has {responses[row]}; "
                "they need one each"
            )


def _check_tokens(table: Steps) -> None:
    # One pass without temporaries on the good path; the search for the culprit runs only on the bad one.
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
        _refuse_value(table, "loss_mask", table.loss_mask, lambda values: values > 1, "each is 0 or 1")


def _check_versions(table: Steps, versions: Ragged) -> None:
    if versions.values.size and versions.values.min() < UNKNOWN:
        _refuse_value(
            table, "policy_versions", versions, lambda values: values < UNKNOWN, "each is at least -1, unknown"
        )
    oldest = oldest_versions(versions)
    row = _first(oldest != table.policy_versions)
    if row is not None:
        raise InvalidArgumentError(
            f"{table.name(row)}: policy_version is {table.policy_versions[row]}, and the oldest of its policy_versions "
            f"is {oldest[row]}; leave policy_version out"
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
    """Whether any may not be finite as float32, found without temporaries: NaN and infinity show in the sum, as may a
    sum that overflows; what float64 holds and float32 does not shows in the extremes, as NaN does."""
    if values.dtype == np.float32 and values.size > _MANY:
        with np.errstate(over="ignore", invalid="ignore"):
            return not math.isfinite(float(values.sum()))
    return not -FLOAT32_MAX <= values.min() <= values.max() <= FLOAT32_MAX


def _not_finite(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Also what is infinite as the float32 that shards hold."""
    fits: NDArray[np.bool_] = np.abs(values) <= FLOAT32_MAX
    return ~fits


def _refuse_value(table: Steps, name: str, column: Ragged, is_bad: Any, rule: str) -> None:
    for row, values in enumerate(column.arrays()):
        bad = _first(is_bad(values))
        if bad is not None:
            raise InvalidArgumentError(f"{table.name(row)}: {name}[{bad}] is {values[bad]}; {rule}")


def _response_columns(table: Steps) -> list[tuple[str, Ragged]]:
    columns = zip(_GIVEN, _columns_of_tokens(table), strict=True)
    return [(name, column) for name, column in columns if column is not None]


def _first(bad: NDArray[np.bool_]) -> int | None:
    """Index of the first true value."""
    index = int(bad.argmax()) if bad.size else 0
    return index if bad.size and bad[index] else None
