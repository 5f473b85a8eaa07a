"""The columns that a run declares beyond the built-in ones (specification, section 8): what each is, and its values.

Values are arrays whose first axis counts elements: rows, tokens or items. NumPy has no bfloat16, whose bits stand in
uint16 here, a type that no column may be declared with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from gristmill._wire.columns import Array
from gristmill._wire.lists import check_no_null
from gristmill._wire.steps import ROW_FIELDS, TOKEN_FIELDS
from gristmill.errors import InvalidArgumentError

ColumnDtype = Literal[
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"
]  # fmt: skip
ColumnScope = Literal["row", "response", "token", "items"]
ColumnMerge = Literal["first", "last", "sum", "concat", "own", "equal"]
ColumnSource = Literal["rollout", "trainer"]

BFLOAT16 = np.dtype(np.uint16)
"""The type of its bits."""

DTYPES: tuple[ColumnDtype, ...] = get_args(ColumnDtype)
MOST_COLUMNS = 64
MOST_AXES = 8
MOST_ELEMENT_BYTES = 1 << 24
# Padding has them, too: a few tokens must not ask for gigabytes.
MOST_TOKEN_BYTES = 1 << 16
MOST_REPEATED_BYTES = 1 << 12
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_MERGES: dict[ColumnScope, tuple[ColumnMerge, ...]] = {
    "row": ("last", "first", "sum", "equal"),
    "response": ("own", "equal"),
    "token": ("first", "last", "equal"),
    "items": ("last", "concat", "equal"),
}
"""How the values of merged steps become a row's; the first is the default."""

SHARD_TENSORS = (
    *("sequences", "attention_mask", "position_ids", "response_mask", "loss_mask", "rewards", "advantages", "returns"),
    *("rollout_logprobs", "token_policy_version", "cu_seqlens"),
    *("parents", "segment_starts", "segment_parents", "row_ends"),
    *("row", "sample", "step_first", "step_last", "policy_version", "is_last_step", "is_padding"),
)
"""The tensors of shards that need no declaration."""

BUILT_IN = frozenset(
    (
        *SHARD_TENSORS,
        *("uid", "uids", "round", "rounds", "step", "steps", "attempt", "attempts", "prompt_token_ids", "response_ids"),
        *(one.given for one in (*ROW_FIELDS, *TOKEN_FIELDS)),
        *("stop_reason", "stop_reasons", "prompt_len", "response_len"),
        *("tag", "tags", "n_samples", "trajectory_ids", "samples", "loss_masks", "rollout_metrics"),
        *("env_metrics", "trajectory_generation_times", "trajectory_time_splits"),
    )
)
"""The names of a row's fields, of a generator output's and of a shard's tensors, which no column may have."""


@dataclass(frozen=True)
class ColumnSpec:
    """One declared column.

    scope: whether there is a value a step (`row`), a response token (`response`), a prompt and response token
    (`token`), or any number a step (`items`). shape: of one value. fill: what stands where there is no value.
    merge: which values a row has that several steps became; empty for the scope's default.
    """

    name: str
    dtype: ColumnDtype
    scope: ColumnScope
    shape: tuple[int, ...] = ()
    fill: int | float = 0
    merge: ColumnMerge | Literal[""] = ""
    source: ColumnSource = "rollout"
    required: bool = True
    allow_nonfinite: bool = False

    @classmethod
    def of(cls, given: object) -> ColumnSpec:
        """The column that a configuration declares. Raises InvalidArgumentError naming the setting and the remedy."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise InvalidArgumentError(f"columns: each is a mapping with name, dtype and scope, got {given!r:.200}")
        known = [field.name for field in fields(cls)]
        where = f"columns: {given.get('name', '')!r:.80}"
        for name in given:
            if name not in known:
                raise InvalidArgumentError(f"{where}: unknown setting {name!r:.80}; known are {', '.join(known)}")
        missing = [name for name in known[:3] if name not in given]
        if missing:
            raise InvalidArgumentError(f"{where}: {' and '.join(missing)} must be given")
        shape = given.get("shape", ())
        if not isinstance(shape, list | tuple):
            raise InvalidArgumentError(f"{where}: shape is {shape!r:.80}; it is a list of sizes, as [48, 8]")
        column = cls(**{**given, "shape": tuple(shape)})
        column._check()
        # Of the two zeros a configuration tells one.
        fill = column.fill + 0 if column.is_float else int(column.fill)
        return cls(**column.settings | {"fill": fill, "merge": column.merge or _MERGES[column.scope][0]})

    def __str__(self) -> str:
        shape = f"[{', '.join(map(str, self.shape))}]" if self.shape else ""
        return f"{self.name} ({self.dtype}{shape} per {_UNITS[self.scope]})"

    @property
    def settings(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def storage(self) -> np.dtype[Any]:
        """The NumPy type of its values here."""
        return BFLOAT16 if self.dtype == "bfloat16" else np.dtype(self.dtype)

    @property
    def is_float(self) -> bool:
        return self.dtype == "bfloat16" or self.storage.kind == "f"

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of one value of its shape."""
        return self.storage.itemsize * math.prod(self.shape)

    @cached_property
    def fill_value(self) -> Array:
        """`fill` as one number of `storage`; ()."""
        value: Array = _as_dtype(np.array([self.fill]), self)[0]
        return value

    @cached_property
    def is_shared(self) -> bool:
        """Whether a step has the values that the step before has for the tokens that both begin with, so that they
        need not be sent again."""
        return self.scope == "token" and self.merge == "first" and self.source == "rollout"

    def empty(self) -> Array:
        """No values; (0, *shape)."""
        return np.empty((0, *self.shape), self.storage)

    def array(self, values: Any, where: str) -> Array:
        """Values as they were given, lists or arrays of any fitting type, as an array of `storage`; (n, *shape), or
        `shape` for one value of scope `row`, which becomes (1, *shape).

        Raises InvalidArgumentError naming both shapes or types.
        """
        array = _plain_array(values, self, where)
        if self.scope == "row":
            array = array[None]
        elif array.shape == (0,):
            return self.empty()
        if not array.ndim or array.shape[1:] != self.shape:
            given = list(array.shape[1:]) if array.ndim else "of a single number"
            raise InvalidArgumentError(
                f"{where}: {self.name} has values of shape {given} and its column declares {list(self.shape)}; give "
                f"one {_OF_SCOPE[self.scope]}"
            )
        if array.dtype == self.storage:
            return array
        _check_kind(array, self, where)
        return _as_dtype(array, self)

    def _check(self) -> None:
        where = f"columns: {self.name!r:.80}"
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidArgumentError(f"{where}: a name has 1 to 63 of a-z, 0-9 and _, and begins with a letter")
        if self.name in BUILT_IN:
            raise InvalidArgumentError(f"{where}: is the name of a built-in column; choose another")
        if taken := next((name for name in BUILT_IN if self.name in of_column(name)), None):
            raise InvalidArgumentError(
                f"{where}: its tensors would have a name of the built-in column {taken}; choose another name"
            )
        for name, allowed in (
            ("dtype", DTYPES),
            ("scope", tuple(_MERGES)),
            ("source", ("rollout", "trainer")),
        ):
            _check_choice(where, name, getattr(self, name), allowed)
        if self.merge:
            _check_choice(f"{where} of scope {self.scope}", "merge", self.merge, _MERGES[self.scope])
        if any(type(size) is not int or not 1 <= size <= MOST_ELEMENT_BYTES for size in self.shape):
            raise InvalidArgumentError(
                f"{where}: shape is {list(self.shape)}; each size is an integer, at least 1 and at most "
                f"{MOST_ELEMENT_BYTES}"
            )
        most = MOST_TOKEN_BYTES if self.scope in ("token", "response") else MOST_ELEMENT_BYTES
        if len(self.shape) > MOST_AXES or self.element_bytes > most:
            raise InvalidArgumentError(
                f"{where}: one value of shape {list(self.shape)} has {self.element_bytes} bytes; at most "
                f"{most}, and at most {MOST_AXES} axes, are possible"
            )
        if self.element_bytes > MOST_REPEATED_BYTES:
            self._check_repeated(where)
        for name in ("required", "allow_nonfinite"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(f"{where}: {name} is {getattr(self, name)!r:.80}; it is true or false")
        self._check_fill(where)
        if self.merge == "sum" and self.dtype == "bool":
            raise InvalidArgumentError(
                f"{where}: merge: sum adds numbers, and the dtype is bool; use another dtype or merge"
            )
        if self.source == "trainer":
            self._check_written(where)

    def _check_repeated(self, where: str) -> None:
        """Of large values, what has to be made rather than cut from what came."""
        size = f"one value of shape {list(self.shape)} has {self.element_bytes} bytes"
        if self.merge == "sum":
            raise InvalidArgumentError(
                f"{where}: {size}, and merge: sum adds values of at most {MOST_REPEATED_BYTES}; use last or first"
            )
        if self.fill and self.scope in ("token", "response"):
            raise InvalidArgumentError(
                f"{where}: {size}, and values of more than {MOST_REPEATED_BYTES} bytes are filled with 0 only; leave "
                "fill out"
            )

    def _check_written(self, where: str) -> None:
        if self.scope not in ("row", "response"):
            raise InvalidArgumentError(
                f"{where}: with source: trainer a column has one value for each row or response token; set scope: row "
                "or response"
            )
        if self.merge not in ("", _MERGES[self.scope][0]):
            raise InvalidArgumentError(
                f"{where}: merge is {self.merge}, and rows are merged before trainers write a column (source: "
                "trainer); leave merge out"
            )
        if not self.required:
            raise InvalidArgumentError(
                f"{where}: required is false, and a batch always waits for columns that trainers write (source: "
                "trainer); leave required out"
            )

    def _check_fill(self, where: str) -> None:
        if (isinstance(self.fill, bool) and self.dtype != "bool") or not isinstance(self.fill, bool | int | float):
            raise InvalidArgumentError(f"{where}: fill is {self.fill!r:.80}; it is a number")
        if isinstance(self.fill, float) and not math.isfinite(self.fill):
            raise InvalidArgumentError(
                f"{where}: fill is {self.fill}, which JSON cannot hold, as a configuration has to; give a finite number"
            )
        try:
            # JSON and YAML write 1 and 1.0 for the same number.
            is_whole = not self.is_float and float(self.fill).is_integer()
            _check_kind(np.array([int(self.fill) if is_whole else self.fill]), self, where)
            is_held = is_finite(self.fill_value)
        except (InvalidArgumentError, OverflowError):
            is_held = False
        if not is_held:
            raise InvalidArgumentError(f"{where}: fill is {self.fill!s:.80}, which {self.dtype} cannot hold")


_UNITS: dict[ColumnScope, str] = {"row": "step", "response": "response token", "token": "token", "items": "item"}
_OF_SCOPE: dict[str, str] = {
    "row": "a row",
    "response": "a response token",
    "token": "a prompt and response token",
    "items": "an item",
}


def specs_of(given: Iterable[object]) -> tuple[ColumnSpec, ...]:
    """The columns that a configuration declares, checked together. Raises InvalidArgumentError."""
    columns = tuple(map(ColumnSpec.of, given))
    if len(columns) > MOST_COLUMNS:
        raise InvalidArgumentError(f"columns: {len(columns)} are declared; at most {MOST_COLUMNS} are possible")
    names: set[str] = set()
    for column in columns:
        # Whether it has all of them or not: readers of a shard know the tensors that belong together by their names.
        for name in (column.name, *of_column(column.name)):
            if name in names:
                raise InvalidArgumentError(f"columns: two of them would have a tensor {name}; rename one")
            names.add(name)
    return columns


def tensor_names(column: ColumnSpec) -> list[str]:
    """The tensors that shards have of it."""
    offsets, given = of_column(column.name)
    names = [column.name, offsets] if column.scope == "items" else [column.name]
    return names if column.required else [*names, given]


def of_column(name: str) -> tuple[str, str]:
    """The tensors in addition to a column's own: where a row's items begin, and which rows have it."""
    return f"{name}_offsets", f"{name}_given"


def by_name(columns: Iterable[ColumnSpec]) -> dict[str, ColumnSpec]:
    return {column.name: column for column in columns}


def _check_choice(where: str, name: str, value: object, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise InvalidArgumentError(f"{where}: {name} is {value!r:.80}; it is one of {', '.join(allowed)}")


def _plain_array(values: Any, column: ColumnSpec, where: str) -> Array:
    """Lists, arrays and CPU tensors as an array of numbers."""
    if hasattr(values, "detach"):
        # NumPy takes no tensor that is part of a graph.
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
                f"{where}: {column.name} cannot be read as an array: {reason} Give .cpu() or .tolist()"
            ) from None
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        check_no_null(values, column.name, where)
        raise InvalidArgumentError(
            f"{where}: {column.name} is no array of numbers, all of one shape; give one {_OF_SCOPE[column.scope]}"
        )
    return array


def _bits_of(values: Any) -> Array:
    """The bits of an array, or CPU tensor, of bfloat16."""
    if isinstance(values, np.ndarray):
        return values.view(np.uint16)
    import torch

    return np.asarray(values.contiguous().view(torch.int16)).view(np.uint16)


def _check_kind(found: Array, column: ColumnSpec, where: str) -> None:
    """Refuses what the column's type cannot hold: fractions as integers, integers beyond its range."""
    given = found.dtype.kind
    if column.is_float:
        if given in "iuf":
            return
    elif column.dtype == "bool":
        if given == "b" or (given in "iu" and ((found == 0) | (found == 1)).all()):
            return
    elif given in "iu":
        limits = np.iinfo(column.storage)
        outside = np.less(found, limits.min) | np.greater(found, limits.max)
        if not outside.any():
            return
        bad = tuple(int(index) for index in np.argwhere(outside)[0])
        raise InvalidArgumentError(
            f"{where}: {column.name}{list(bad)} is {found[bad]}, and its column's dtype {column.dtype} holds "
            f"{limits.min}..{limits.max}"
        )
    raise InvalidArgumentError(
        f"{where}: {column.name} holds {found.dtype.name} values and its column declares {column.dtype}"
    )


def _as_dtype(found: Array, column: ColumnSpec) -> Array:
    if column.dtype == "bfloat16":
        return to_bfloat16(found)
    with np.errstate(over="ignore"):
        return found.astype(column.storage)


def to_bfloat16(values: Array) -> Array:
    """The bits of the nearest bfloat16 of each number, ties to even; uint16 of the same shape."""
    if values.dtype == BFLOAT16:
        return values
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    # A NaN stays one, whatever rounding would make of its bits.
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded_bits: Array = np.where(is_nan, bits >> 16 | 0x40, rounded).astype(np.uint16)
    return rounded_bits


def from_bfloat16(bits: Array) -> Array:
    """float32 of the same shape."""
    widened: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return widened


def is_finite(values: Array) -> bool:
    """Whether all are; `values` as they are stored."""
    if values.dtype == BFLOAT16:
        return not bool(((values & 0x7F80) == 0x7F80).any())
    if values.dtype.kind != "f" or not values.size:
        return True
    # Without temporaries: NaN and infinity show in the extremes.
    return math.isfinite(float(values.min())) and math.isfinite(float(values.max()))
