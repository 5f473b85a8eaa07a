"""Reads rollout files, JSON lines (gzip by extension) and Parquet, as tables of steps, one table per batch.

A lengths file contains `prompt_len, response_len` instead of tokens, masks and rewards; it can only be planned.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
from numpy.typing import NDArray

from gristmill._wire.columns import Ragged
from gristmill._wire.extras import check_extras
from gristmill._wire.row_fields import MOST_OF_RUN
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import Steps
from gristmill.errors import InvalidArgumentError
from gristmill_service.config import MOST_TAGS, RunConfig

Progress = Callable[[int], None]
"""A function that is called with the number of bytes read so far."""

_NO_ROW = object()
_LENGTH_FIELDS = ("prompt_len", "response_len")


def read_batches(
    path: Path, config: RunConfig, progress: Progress, takes_remainder: bool = False
) -> tuple[list[Steps], bool]:
    """Returns the file's batches in order, and whether it is a lengths file.

    takes_remainder: whether groups that do not fill a batch become a smaller last batch, as when a run is finished.
    Raises InvalidArgumentError that names the file and the line or trajectory, also if groups do not fill a batch and
    may not.
    """
    try:
        rows = _sampled(_read_parquet(path) if path.suffix == ".parquet" else _read_lines(path, progress))
        first = next(rows, _NO_ROW)
        if first is _NO_ROW:
            raise InvalidArgumentError("has no rows; write one row per line")
        is_lengths = isinstance(first, Mapping) and not first.keys().isdisjoint(_LENGTH_FIELDS)
        has_versions: list[bool] = []
        every = _noted(_chain(first, rows), has_versions)
        table = _lengths_table(every, config) if is_lengths else _rows_table(every, config)
        _check_tags(table)
        return _split(table, np.array(has_versions), config, takes_remainder), is_lengths
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise InvalidArgumentError(f"{path} does not exist; pass a file of rollouts") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidArgumentError(f"{path}: cannot be read to its end: {error}; restore the file") from None


def _rows_table(rows: Iterator[Any], config: RunConfig) -> Steps:
    return check_extras(from_rows(rows, step_wise=config.step_wise, columns=config.columns), config.columns)


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def _sampled(rows: Iterator[Any]) -> Iterator[Any]:
    """Yields the rows without those that say that their trajectory was aborted."""
    for row in rows:
        if not isinstance(row, Mapping) or "aborted" not in row:
            yield row
        elif row["aborted"] is None:
            # A column of a Parquet file has a null in the other rows.
            yield {name: value for name, value in row.items() if name != "aborted"}


def _noted(rows: Iterator[Any], has_versions: list[bool]) -> Iterator[Any]:
    """Yields the rows, and appends to `has_versions` whether each has policy versions of tokens."""
    for row in rows:
        has_versions.append(isinstance(row, Mapping) and row.get("policy_versions") is not None)
        yield row


def _read_lines(path: Path, progress: Progress) -> Iterator[Any]:
    with path.open("rb") as raw:
        # A pipe does not report a position.
        is_file = raw.seekable()
        lines: BinaryIO = gzip.open(raw) if path.suffix == ".gz" else raw  # type: ignore[assignment]  # noqa: SIM115
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse(line, number)
            if is_file:
                progress(raw.tell())


def _parse(line: bytes, number: int) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    try:
        # The slower parser accepts NaN and Infinity. They are rejected later, in an error that names the trajectory.
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"line {number} is not valid JSON ({error}); write one row per line") from None


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise InvalidArgumentError("Parquet needs pyarrow, not installed; pip install pyarrow") from None
    try:
        table = pq.read_table(path).combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowException) as error:
        raise InvalidArgumentError(f"is not a readable Parquet file: {error}; restore the file") from None
    columns = {name: _column_values(table.column(name), pa) for name in table.column_names}
    for row in range(table.num_rows):
        yield {name: values(row) for name, values in columns.items()}


def _column_values(column: Any, pa: Any) -> Callable[[int], Any]:
    """Returns a function that maps a row's index to its value: a NumPy view of a list column, else a Python value."""
    chunk = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    is_flat = _is_list(chunk.type, pa) and not pa.types.is_nested(chunk.type.value_type)
    # NumPy would replace a null with NaN, but it must be rejected as a null.
    if not is_flat or chunk.values.null_count:
        values: list[Any] = chunk.to_pylist()
        return values.__getitem__
    flat = chunk.values.to_numpy(zero_copy_only=False)
    edges: list[int] = chunk.offsets.to_pylist()
    valid: list[bool] = chunk.is_valid().to_pylist()
    return lambda row: flat[edges[row] : edges[row + 1]] if valid[row] else None


def _is_list(kind: Any, pa: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _lengths_table(rows: Iterator[Any], config: RunConfig) -> Steps:
    """Returns steps with lengths but without tokens."""
    if config.merging.joins:
        raise InvalidArgumentError(f"is a lengths file, without tokens for merge: {config.merge}; set merge: none")
    prompts: list[int] = []
    responses: list[int] = []

    def stand_in(row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        for name, lengths in zip(_LENGTH_FIELDS, (prompts, responses), strict=True):
            length = row.get(name)
            if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length < 2**31:
                where = f"uid {row.get('uid')!r} sample {row.get('sample')}"
                raise InvalidArgumentError(f"{where}: {name} {length!r} is not a length; write an integer, at least 1")
            lengths.append(length)
        rest = {name: value for name, value in row.items() if name not in _LENGTH_FIELDS}
        return {**rest, "prompt_token_ids": [0], "response_ids": [0], "loss_mask": [1], "reward": 0.0}

    table = from_rows(map(stand_in, rows), step_wise=config.step_wise)
    nothing, starts = np.empty(0, np.int32), np.zeros(len(table), np.int64)
    prompt_lengths, response_lengths = np.array(prompts, np.int64), np.array(responses, np.int64)
    return replace(
        table,
        tokens=Ragged(nothing, starts, prompt_lengths + response_lengths),
        prompt_lengths=prompt_lengths,
        loss_mask=Ragged(nothing.astype(np.uint8), starts, response_lengths),
        advantages=np.zeros(len(table)) if config.estimator.takes_advantages else None,
    )


def _check_tags(table: Steps) -> None:
    names = set(table.tags or ()) - {""}
    if len(names) > MOST_TAGS:
        raise InvalidArgumentError(f"has {len(names)} tags, and the limit is {MOST_TAGS}; use one tag per task")
    for name, most in MOST_OF_RUN.items():
        names = set(getattr(table, name) or ()) - {""}
        if len(names) > most:
            raise InvalidArgumentError(f"has {len(names)} {name}, and the limit is {most}; use fewer")


def _split(table: Steps, has_versions: NDArray[np.bool_], config: RunConfig, takes_remainder: bool) -> list[Steps]:
    """Splits the rows into batches of `train_batch_size` prompt groups each, in order of first appearance.

    has_versions: bool (rows,). A batch has policy versions of tokens if any of its rows has them.
    """
    size = config.train_batch_size
    index: dict[tuple[int, str], int] = {}
    keys = zip(table.rounds.tolist(), table.uids, strict=True)
    groups = np.fromiter((index.setdefault(key, len(index)) for key in keys), np.int64, len(table))
    if len(index) % size and not takes_remainder:
        raise InvalidArgumentError(
            f"has {len(index)} prompt groups, that is {len(index) // size} batches of train_batch_size: {size} and "
            f"{len(index) % size} extra groups; complete the last batch, change train_batch_size, or use "
            "gristmill plan --json, which accepts a smaller last batch"
        )
    batches = groups // size
    split = []
    for number in range(-(-len(index) // size)):
        rows = np.flatnonzero(batches == number)
        batch = table.take(rows)
        split.append(batch if has_versions[rows].any() else replace(batch, token_versions=None))
    return split
