"""The declared columns of a run (specification, section 8): their settings, and the conversion of their values.

The first axis of an array of values counts elements: rows, tokens or items. NumPy has no bfloat16, so its bits are
stored as uint16, which a column cannot declare.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from gristmill._wire.columns import Array
from gristmill._wire.lists import check_no_null
from gristmill._wire.row_fields import ROW_FIELDS, TEXT_FIELDS, TOKEN_FIELDS
from gristmill.errors import InvalidArgumentError

ColumnDtype = Literal[
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"
]  # fmt: skip
ColumnScope = Literal["row", "response", "token", "items"]
ColumnMerge = Literal["first", "last", "sum", "concat", "own", "equal"]
ColumnSource = Literal["rollout", "trainer"]

BFLOAT16 = np.dtype(np.uint16)
"""The type that stores the bits of bfloat16."""

DTYPES: tuple[ColumnDtype, ...] = get_args(ColumnDtype)
_INTEGERS = ("uint8", "int8", "int16", "int32", "int64")
MOST_COLUMNS = 64
MOST_AXES = 8
MOST_ELEMENT_BYTES = 1 << 24
# Padding tokens also have values, so a token's values must be small.
MOST_TOKEN_BYTES = 1 << 16
MOST_REPEATED_BYTES = 1 << 12
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_MERGES: dict[ColumnScope, tuple[ColumnMerge, ...]] = {
    "row": ("last", "first", "sum", "equal"),
    "response": ("own", "equal"),
    "token": ("first", "last", "equal"),
    "items": ("last", "concat", "equal"),
}
"""How a merged row gets its values from its steps, by scope. The first way is the default."""

LOSS_WEIGHT = "loss_weight"
"""The column of the weights of tokens in the loss. A run may declare it, so that rows contain it."""

AXIS_TENSORS = frozenset(
    ("cu_seqlens", "cu_seqlens_padded", "parents", "segment_starts", "segment_parents", "row_ends")
)
"""The tensors that describe where rows are on a token axis."""

CP_TENSORS = ("query_positions", "label_positions", "label_queries", "labels")
"""The tensors that shards of context-parallel ranks have in addition."""

SHARD_TENSORS = (
    *("sequences", "attention_mask", "position_ids", "response_mask", "loss_mask", "rewards", "advantages", "returns"),
    *("rollout_logprobs", "token_policy_version", "token_step", "loss_weight", "cu_seqlens", "cu_seqlens_padded"),
    *("parents", "segment_starts", "segment_parents", "row_ends"),
    *("row", "sample", "step_first", "step_last", "policy_version", "is_last_step", "is_padding"),
)
"""The names of the built-in tensors of shards."""

BUILT_IN = frozenset(
    (
        *SHARD_TENSORS,
        *("uid", "uids", "round", "rounds", "step", "steps", "attempt", "attempts", "prompt_token_ids", "response_ids"),
        *(one.key for one in (*ROW_FIELDS, *TOKEN_FIELDS, *TEXT_FIELDS)),
        *(one.name for one in TEXT_FIELDS),
        *("stop_reason", "stop_reasons", "prompt_len", "response_len"),
        *(
            "reward_components",
            "n_samples",
            "trajectory_ids",
            "samples",
            "loss_masks",
            "rollout_metrics",
        ),
        *("env_metrics", "trajectory_generation_times", "trajectory_time_splits"),
    )
) - {LOSS_WEIGHT}
"""Names that a column must not have: fields of rows and of generator outputs, and tensors of shards."""


@dataclass(frozen=True)
class ColumnSpec:
    """A declared column.

    scope: whether there is one value per step (`row`), per response token (`response`), per prompt and response token
    (`token`), or any number per step (`items`). shape: the shape of one value. fill: the value of padding and of absent
    values. merge: how a merged row gets its values from its steps; empty: the scope's default. partial: whether a step
    may have values for only some of its tokens, beginning at the index in the column's `start_column`.

    A ragged column has shape (None,), which means any number of values per token. Rows store it as two columns: its
    `values_column` with the concatenated values of all tokens, and its `offsets_column`.
    """

    name: str
    dtype: ColumnDtype
    scope: ColumnScope
    shape: tuple[int | None, ...] = ()
    fill: int | float = 0
    merge: ColumnMerge | Literal[""] = ""
    source: ColumnSource = "rollout"
    required: bool = True
    allow_nonfinite: bool = False
    partial: bool = False

    @classmethod
    def of(cls, declaration: object) -> ColumnSpec:
        """Reads a column of a configuration. Raises InvalidArgumentError that names the setting and the remedy."""
        if isinstance(declaration, cls):
            return declaration
        if not isinstance(declaration, Mapping):
            raise InvalidArgumentError(
                f"columns: {declaration!r:.200} is not a mapping; declare a mapping with name, dtype and scope"
            )
        known = [field.name for field in fields(cls)]
        where = f"columns: {declaration.get('name', '')!r:.80}"
        for name in declaration:
            if name not in known:
                raise InvalidArgumentError(f"{where}: unknown setting {name!r:.80}; expected {', '.join(known)}")
        missing = [name for name in known[:3] if name not in declaration]
        if missing:
            raise InvalidArgumentError(f"{where}: {' and '.join(missing)} must be set")
        shape = declaration.get("shape", ())
        if not isinstance(shape, list | tuple):
            raise InvalidArgumentError(f"{where}: shape is {shape!r:.80}; set a list of sizes, like [48, 8]")
        column = cls(**{**declaration, "shape": tuple(shape)})
        column._check()
        # A negative zero is stored as 0.
        fill = column.fill + 0 if column.is_float else int(column.fill)
        return cls(**column.settings | {"fill": fill, "merge": column.merge or _MERGES[column.scope][0]})

    def __str__(self) -> str:
        shape = f"[{', '.join('any' if size is None else str(size) for size in self.shape)}]" if self.shape else ""
        return f"{self.name} ({self.dtype}{shape} per {_UNITS[self.scope]})"

    @property
    def settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def storage(self) -> np.dtype[Any]:
        """The NumPy type in which values are stored."""
        return BFLOAT16 if self.dtype == "bfloat16" else np.dtype(self.dtype)

    @property
    def is_float(self) -> bool:
        return self.dtype == "bfloat16" or self.storage.kind == "f"

    @cached_property
    def element_bytes(self) -> int:
        """The bytes of one value."""
        return self.storage.itemsize * math.prod(self.value_shape)

    @property
    def is_ragged(self) -> bool:
        """Whether the number of values varies by token."""
        return self.shape == (None,)

    @property
    def value_shape(self) -> tuple[int, ...]:
        """The shape of one value. In a ragged column, this is one of several values of a token."""
        return tuple(size for size in self.shape if size is not None)

    @cached_property
    def fill_value(self) -> Array:
        """The fill in the storage type, as an array of shape ()."""
        value: Array = _as_dtype(np.array([self.fill]), self)[0]
        return value

    @cached_property
    def is_shared(self) -> bool:
        """Whether a step and the previous step have the same values for their common first tokens, which then need not
        be sent again.
        """
        return self.takes_first and self.source == "rollout" and not self.partial and not self.is_ragged

    @property
    def takes_first(self) -> bool:
        """Whether a token of a merged row has the value of the first step that contains the token."""
        return self.scope == "token" and self.merge == "first"

    @property
    def start_column(self) -> ColumnSpec:
        """The column in which rows store the token index of a step's first value. Steps without it begin at 0."""
        return ColumnSpec(start_of(self.name), "int64", "row", merge="last", required=False)

    @cached_property
    def values_column(self) -> ColumnSpec:
        """The column in which rows store the values of a ragged column, concatenated token by token."""
        return replace(self, scope="items", shape=(), merge="last", partial=False)

    @cached_property
    def offsets_column(self) -> ColumnSpec:
        """The column in which rows store the start of each token's values in a ragged column, followed by the end."""
        return ColumnSpec(of_column(self.name)[0], "int64", "items", merge="last", required=False)

    def empty(self) -> Array:
        """Returns an empty array of shape (0, *value_shape)."""
        return np.empty((0, *self.value_shape), self.storage)

    def array(self, values: Any, where: str) -> Array:
        """Converts lists or arrays of a compatible type to the storage type; (n, *shape). For scope `row`, `values` is
        one value, which becomes (1, *shape).

        Raises InvalidArgumentError that names both shapes or types.
        """
        array = _plain_array(values, self, where)
        if self.scope == "row":
            array = array[None]
        elif array.shape == (0,):
            return self.empty()
        if not array.ndim or array.shape[1:] != self.shape:
            actual = f"has values of shape {list(array.shape[1:])}" if array.ndim else "is a single number"
            raise InvalidArgumentError(
                f"{where}: {self.name} {actual}, but the column declares shape {list(self.shape)} for each value; pass "
                f"{_OF_SCOPE[self.scope]}"
            )
        if array.dtype == self.storage:
            return array
        _check_kind(array, self, where)
        return _as_dtype(array, self)

    def _check(self) -> None:
        where = f"columns: {self.name!r:.80}"
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidArgumentError(f"{where}: a name must be 1 to 63 of a-z, 0-9 and _, and begin with a letter")
        if self.name in BUILT_IN:
            raise InvalidArgumentError(f"{where}: is the name of a built-in column; choose another name")
        if taken := next((name for name in BUILT_IN if self.name in of_column(name)), None):
            raise InvalidArgumentError(
                f"{where}: a tensor would have the name of the built-in column {taken}; choose another name"
            )
        for name, allowed in (
            ("dtype", DTYPES),
            ("scope", tuple(_MERGES)),
            ("source", ("rollout", "trainer")),
        ):
            _check_choice(where, name, getattr(self, name), allowed)
        if self.merge:
            _check_choice(f"{where} of scope {self.scope}", "merge", self.merge, _MERGES[self.scope])
        if any(
            type(size) is not int or not 1 <= size <= MOST_ELEMENT_BYTES for size in self.shape if not self.is_ragged
        ):
            raise InvalidArgumentError(
                f"{where}: shape is {list(self.shape)}; set sizes from 1 to {MOST_ELEMENT_BYTES}, or [null] for any "
                "number of values per token"
            )
        most = MOST_TOKEN_BYTES if self.scope in ("token", "response") else MOST_ELEMENT_BYTES
        if len(self.shape) > MOST_AXES or self.element_bytes > most:
            raise InvalidArgumentError(
                f"{where}: one value of shape {list(self.shape)} has {self.element_bytes} bytes; the limits are "
                f"{most} bytes and {MOST_AXES} axes"
            )
        if self.element_bytes > MOST_REPEATED_BYTES:
            self._check_repeated(where)
        for name in ("required", "allow_nonfinite", "partial"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(f"{where}: {name} is {getattr(self, name)!r:.80}; set true or false")
        self._check_fill(where)
        if self.merge == "sum" and self.dtype == "bool":
            raise InvalidArgumentError(
                f"{where}: merge is sum, which adds numbers, but dtype is bool; use another dtype or merge"
            )
        if self.partial and (self.scope not in ("token", "response") or self.source == "trainer"):
            raise InvalidArgumentError(
                f"{where}: partial is true, but only columns of source: rollout and scope token or response may be "
                "partial; omit partial"
            )
        if self.is_ragged and (self.scope not in ("token", "response") or self.source == "trainer" or self.fill):
            raise InvalidArgumentError(
                f"{where}: shape is [null], which requires source: rollout, scope token or response, and no fill; "
                "change these settings, or set the sizes in shape"
            )
        if self.source == "trainer":
            self._check_written(where)

    def _check_repeated(self, where: str) -> None:
        """Refuses settings that require computing or copying large values many times."""
        size = f"one value of shape {list(self.shape)} has {self.element_bytes} bytes"
        if self.merge == "sum":
            raise InvalidArgumentError(
                f"{where}: {size}, and the limit for merge: sum is {MOST_REPEATED_BYTES}; use last or first"
            )
        if self.fill and self.scope in ("token", "response"):
            raise InvalidArgumentError(
                f"{where}: {size}, and values of more than {MOST_REPEATED_BYTES} bytes can only be filled with 0; omit "
                "fill"
            )

    def _check_written(self, where: str) -> None:
        if self.scope not in ("row", "response"):
            raise InvalidArgumentError(
                f"{where}: source is trainer, which requires one value per row or response token; set scope: row or "
                "response"
            )
        if self.merge not in ("", _MERGES[self.scope][0]):
            raise InvalidArgumentError(
                f"{where}: merge is {self.merge}, but rows are merged before trainers write a column (source: "
                "trainer); omit merge"
            )
        if not self.required:
            raise InvalidArgumentError(
                f"{where}: required is false, but a batch always waits for columns that trainers write (source: "
                "trainer); omit required"
            )

    def _check_fill(self, where: str) -> None:
        if (isinstance(self.fill, bool) and self.dtype != "bool") or not isinstance(self.fill, bool | int | float):
            raise InvalidArgumentError(f"{where}: fill is {self.fill!r:.80}; set a number")
        if isinstance(self.fill, float) and not math.isfinite(self.fill):
            raise InvalidArgumentError(f"{where}: fill is {self.fill}, which JSON cannot express; set a finite number")
        try:
            # JSON and YAML do not distinguish 1 from 1.0.
            is_whole = not self.is_float and float(self.fill).is_integer()
            _check_kind(np.array([int(self.fill) if is_whole else self.fill]), self, where)
            fits = is_finite(self.fill_value)
        except (InvalidArgumentError, OverflowError):
            fits = False
        if not fits:
            raise InvalidArgumentError(f"{where}: fill is {self.fill!s:.80}, which {self.dtype} cannot represent")


_UNITS: dict[ColumnScope, str] = {"row": "step", "response": "response token", "token": "token", "items": "item"}
_OF_SCOPE: dict[str, str] = {
    "row": "one per row",
    "response": "one per response token",
    "token": "one per prompt and response token",
    "items": "one per item",
}


def specs_of(declarations: Iterable[object]) -> tuple[ColumnSpec, ...]:
    """Reads all columns of a configuration, and checks them together. Raises InvalidArgumentError."""
    declared = list(declarations)
    if len(declared) > MOST_COLUMNS:
        raise InvalidArgumentError(f"columns: {len(declared)} are declared; the limit is {MOST_COLUMNS}")
    columns = tuple(map(ColumnSpec.of, declared))
    names: set[str] = set()
    for column in columns:
        # Also check names that this column does not use, because readers of shards find tensors by name.
        for name in (column.name, *of_column(column.name), start_of(column.name)):
            if name in names:
                raise InvalidArgumentError(f"columns: two columns would have a tensor {name}; rename one")
            names.add(name)
    return columns


def tensor_names(column: ColumnSpec) -> list[str]:
    """Returns the names of the column's tensors in shards."""
    offsets, presence, pieces = of_column(column.name)
    names = [column.name]
    if column.scope == "items" or column.is_ragged:
        names.append(offsets)
    elif column.partial:
        names.append(pieces)
    return names if column.required else [*names, presence]


def of_column(name: str) -> tuple[str, str, str]:
    """Returns the names of a column's additional tensors: the offsets of items or of tokens' values, the flags of rows
    that have the column, and the pieces of its tensor that are values and not fill."""
    return f"{name}_offsets", f"{name}_given", f"{name}_pieces"


def start_of(name: str) -> str:
    """Returns the name of the field with the index of a row's first value of a partial column."""
    return f"{name}_start"


def row_columns(columns: Sequence[ColumnSpec]) -> tuple[ColumnSpec, ...]:
    """Returns the columns that rows store: the declared columns (ragged ones as values and offsets), and the starts of
    partial columns."""
    return (
        *(column.values_column if column.is_ragged else column for column in columns),
        *(column.offsets_column for column in columns if column.is_ragged),
        *(column.start_column for column in columns if column.partial),
    )


def by_name(columns: Iterable[ColumnSpec]) -> dict[str, ColumnSpec]:
    return {column.name: column for column in columns}


def _check_choice(where: str, name: str, value: object, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise InvalidArgumentError(f"{where}: {name} is {value!r:.80}; expected one of {', '.join(allowed)}")


def _plain_array(values: Any, column: ColumnSpec, where: str) -> Array:
    """Converts lists, arrays and CPU tensors to an array of numbers."""
    if hasattr(values, "detach"):
        # NumPy cannot read a tensor that is part of a graph.
        values = values.detach()
    try:
        if "bfloat16" in str(getattr(values, "dtype", "")):
            bits = _bits_of(values)
            return bits if column.dtype == "bfloat16" else from_bfloat16(bits)
        array = np.asarray(values)
    except (ValueError, OverflowError, TypeError, RuntimeError) as error:
        if hasattr(values, "__array__"):
            reason = str(error).splitlines()[0]
            raise InvalidArgumentError(
                f"{where}: {column.name} cannot be read as an array ({reason}); pass .cpu() or .tolist()"
            ) from None
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        check_no_null(values, column.name, where)
        raise InvalidArgumentError(
            f"{where}: {column.name} is not an array of numbers of one shape; pass {_OF_SCOPE[column.scope]}"
        )
    return array


def _bits_of(values: Any) -> Array:
    """Returns the bits of an array, or CPU tensor, of bfloat16."""
    if isinstance(values, np.ndarray):
        return values.view(np.uint16)
    import torch

    return np.asarray(values.contiguous().view(torch.int16)).view(np.uint16)


def _check_kind(values: Array, column: ColumnSpec, where: str) -> None:
    """Refuses values that the column's type cannot represent: fractions in integer columns, integers out of range."""
    kind = values.dtype.kind
    if column.is_float:
        if kind in "iuf":
            return
    elif column.dtype == "bool":
        if kind == "b" or (kind in "iu" and ((values == 0) | (values == 1)).all()):
            return
    elif kind in "iu":
        limits = np.iinfo(column.storage)
        outside = np.less(values, limits.min) | np.greater(values, limits.max)
        if not outside.any():
            return
        bad = tuple(int(index) for index in np.argwhere(outside)[0])
        large = (
            name for name in _INTEGERS if np.iinfo(name).min <= values.min() and values.max() <= np.iinfo(name).max
        )
        raise InvalidArgumentError(
            f"{where}: {column.name}{list(bad)} is {values[bad]}, but the column's dtype {column.dtype} has the range "
            f"{limits.min}..{limits.max}; declare dtype {next(large, 'float64')}"
        )
    raise InvalidArgumentError(
        f"{where}: {column.name} has {values.dtype.name} values, but the column declares {column.dtype}; convert them"
    )


def _as_dtype(values: Array, column: ColumnSpec) -> Array:
    if column.dtype == "bfloat16":
        return to_bfloat16(values)
    with np.errstate(over="ignore"):
        return values.astype(column.storage)


def to_bfloat16(values: Array) -> Array:
    """Rounds numbers to bfloat16, ties to even; returns their bits, uint16 of the same shape."""
    if values.dtype == BFLOAT16:
        return values
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    # Rounding must not turn a NaN into infinity.
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded_bits: Array = np.where(is_nan, bits >> 16 | 0x40, rounded).astype(np.uint16)
    return rounded_bits


def from_bfloat16(bits: Array) -> Array:
    """Converts bits of bfloat16 to float32 of the same shape."""
    widened: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return widened


def is_finite(values: Array) -> bool:
    """Returns whether all values are finite. values: in the storage type."""
    if values.dtype == BFLOAT16:
        return not bool(((values & 0x7F80) == 0x7F80).any())
    if values.dtype.kind != "f" or not values.size:
        return True
    # This needs no temporary array: the minimum or maximum is not finite if any value is not.
    return math.isfinite(float(values.min())) and math.isfinite(float(values.max()))
