"""`gristmill show` prints figures of shards on disk. It reads them through safetensors, like a trainer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError, safe_open

from gristmill._wire.column_spec import BUILT_IN
from gristmill._wire.columns import Array
from gristmill._wire.context_parallel import own_tokens
from gristmill.errors import InvalidArgumentError, NotFoundError
from gristmill_service.cli.terminal import printable


class TagFigures(NamedTuple):
    """Figures of the real rows with a tag."""

    rows: int
    tokens: int
    loss_tokens: int


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """The figures of one shard.

    tokens: tokens of real rows. distinct_tokens: stored tokens, fewer than `tokens` if rows share tokens. elements:
    elements of all `sequences` tensors, including padding. column_bytes: bytes of declared columns. by_tag: the rows of
    each tag, with "" for rows without a tag; empty if no row has a tag.
    """

    rows: int
    padding_rows: int
    tokens: int
    distinct_tokens: int
    elements: int
    loss_tokens: int
    column_bytes: int
    by_tag: Mapping[str, TagFigures]

    @property
    def padding_share(self) -> float:
        return 1 - self.distinct_tokens / self.elements if self.elements else 0.0


def shard_tables(directory: Path) -> list[Table]:
    """Returns a table with one line per shard under `directory` and a total. If groups have tags, a table with one line
    per tag precedes it. Raises NotFoundError if there is no shard."""
    paths = sorted(directory.rglob("*.safetensors"))
    if not paths:
        raise NotFoundError(f"{directory} contains no shards (*.safetensors); pass an output of gristmill batch")
    table = _table("shard", "rows", "padding rows", "tokens", "padding share", "loss tokens")
    figures = [read_figures(path) for path in paths]
    if has_tree := any(shard.distinct_tokens < shard.tokens for shard in figures):
        table.add_column("distinct tokens", justify="right")
    if has_columns := any(shard.column_bytes for shard in figures):
        table.add_column("declared columns", justify="right")
    for path, shard in zip(paths, figures, strict=True):
        table.add_row(str(path.relative_to(directory)), *_cells(shard, has_tree, has_columns))
    table.add_section()
    table.add_row("total", *_cells(_total(figures), has_tree, has_columns), style="bold")
    return [*_tag_tables(figures), table]


def _tag_tables(shards: Sequence[ShardFigures]) -> list[Table]:
    tags = sorted({tag for shard in shards for tag in shard.by_tag})
    if not tags:
        return []
    table = _table("tag", "rows", "tokens", "loss tokens")
    for tag in tags:
        tagged = [shard.by_tag[tag] for shard in shards if tag in shard.by_tag]
        table.add_row(Text(printable(tag) or "(none)"), *(f"{sum(figures):,}" for figures in zip(*tagged, strict=True)))
    return [table]


def _table(first: str, *names: str) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column(first)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _total(shards: Sequence[ShardFigures]) -> ShardFigures:
    names = [field.name for field in fields(ShardFigures) if field.name != "by_tag"]
    return ShardFigures(**{name: sum(getattr(shard, name) for shard in shards) for name in names}, by_tag={})


def read_figures(path: Path) -> ShardFigures:
    """Returns a shard's figures. Raises InvalidArgumentError for a file that is not a shard, or an incomplete one."""
    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            if "is_padding" not in names or "row" not in names:
                raise InvalidArgumentError(
                    f"{path} is not a gristmill shard (no tensor is_padding); pass a file that gristmill batch wrote"
                )
            padding = file.get_tensor("is_padding").astype(bool)
            metadata = file.metadata()
            micro_batches = json.loads(metadata["micro_batches"])
            lengths, losses = np.zeros(len(padding), np.int64), np.zeros(len(padding), np.int64)
            elements = column_bytes = 0
            distinct = 0
            for name in names:
                prefix, _, column = name.rpartition("/")
                rows = micro_batches[int(prefix.removeprefix("micro_batch_"))] if prefix else slice(None)
                if column == "attention_mask":
                    lengths[rows] = file.get_tensor(name).sum(axis=1, dtype=np.int64)
                elif column == "cu_seqlens":
                    lengths[rows] = np.diff(file.get_tensor(name))
                elif column == "row_ends":
                    ends = file.get_tensor(name)
                    lengths[rows] = file.get_tensor(f"{prefix}/position_ids")[ends] + 1
                    distinct += int(own_tokens(file.get_tensor(f"{prefix}/parents"), ends)[1][~padding[rows]].sum())
                elif column == "loss_mask":
                    losses[rows] = _row_sums(file.get_tensor(name), _edges(file, prefix, names))
                elif column == "sequences":
                    elements += int(np.prod(file.get_slice(name).get_shape()))
                elif column not in BUILT_IN:
                    column_bytes += _nbytes(file.get_slice(name))
            tags = np.array(json.loads(metadata["tags"]), object) if "tags" in metadata else None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{path} is not a complete shard: {error}; run gristmill batch again") from None
    real = ~padding
    tokens = int(lengths[real].sum())
    by_tag = {}
    if tags is not None:
        for tag in sorted(set(tags[real])):
            is_tagged = real & (tags == tag)
            by_tag[tag] = TagFigures(int(is_tagged.sum()), int(lengths[is_tagged].sum()), int(losses[is_tagged].sum()))
    return ShardFigures(
        len(padding),
        int(padding.sum()),
        tokens,
        distinct or tokens,
        elements,
        int(losses.sum()),
        column_bytes,
        by_tag,
    )


def _edges(file: Any, prefix: str, names: Sequence[str]) -> Array | None:
    """Returns where each row's own tokens start on the token axis, and the end of the last; None without one."""
    if f"{prefix}/row_ends" in names:
        return np.append(0, file.get_tensor(f"{prefix}/row_ends") + 1)
    name = next((name for name in ("cu_seqlens_padded", "cu_seqlens") if f"{prefix}/{name}" in names), None)
    return None if name is None else file.get_tensor(f"{prefix}/{name}")


def _row_sums(mask: Array, edges: Array | None) -> Array:
    """Sums each row's mask. edges: (rows + 1,) on a token axis; None: the mask is (rows, width)."""
    if edges is None:
        sums: Array = mask.sum(axis=1, dtype=np.int64)
        return sums
    totals = np.append(0, np.cumsum(mask, dtype=np.int64))
    return np.diff(totals[edges])


def _nbytes(tensor: Any) -> int:
    """Returns the bytes of a tensor without reading it."""
    # "BOOL" contains no number of bits.
    bits = int(re.sub(r"\D", "", tensor.get_dtype()) or 8)
    shape: list[int] = tensor.get_shape()
    return math.prod(shape) * bits // 8


def _cells(shard: ShardFigures, has_tree: bool, has_columns: bool) -> list[str]:
    cells = [
        f"{shard.rows:,}",
        f"{shard.padding_rows:,}",
        f"{shard.tokens:,}",
        f"{shard.padding_share:.1%}",
        f"{shard.loss_tokens:,}",
    ]
    cells += [f"{shard.distinct_tokens:,}"] if has_tree else []
    return [*cells, f"{shard.column_bytes / 1e6:,.1f} MB"] if has_columns else cells
