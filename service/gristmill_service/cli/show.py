"""`gristmill show` tells of shards on disk. It reads them as any trainer would, through safetensors."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from safetensors import SafetensorError, safe_open

from gristmill._wire.column_spec import BUILT_IN
from gristmill.errors import InvalidArgumentError, NotFoundError


@dataclass(frozen=True, slots=True)
class ShardFigures:
    """The figures of one shard. tokens: of real rows. elements: of all `sequences` tensors, padding included.
    column_bytes: of declared columns."""

    rows: int
    padding_rows: int
    tokens: int
    elements: int
    loss_tokens: int
    column_bytes: int

    @property
    def padding_share(self) -> float:
        return 1 - self.tokens / self.elements if self.elements else 0.0


def shard_table(directory: Path) -> Table:
    """Returns a table with a line a shard under `directory`, and a total. Raises NotFoundError where there is none."""
    paths = sorted(directory.rglob("*.safetensors"))
    if not paths:
        raise NotFoundError(
            f"{directory}: no shards (*.safetensors) found; give a directory that gristmill batch wrote"
        )
    table = Table(box=None, header_style="bold")
    table.add_column("shard")
    for name in ("rows", "padding rows", "tokens", "padding share", "loss tokens"):
        table.add_column(name, justify="right")
    figures = [read_figures(path) for path in paths]
    if has_columns := any(shard.column_bytes for shard in figures):
        table.add_column("declared columns", justify="right")
    for path, shard in zip(paths, figures, strict=True):
        table.add_row(str(path.relative_to(directory)), *_cells(shard, has_columns))
    total = ShardFigures(*(sum(getattr(shard, name) for shard in figures) for name in ShardFigures.__slots__))
    table.add_section()
    table.add_row("total", *_cells(total, has_columns), style="bold")
    return table


def read_figures(path: Path) -> ShardFigures:
    """Returns a shard's figures. Raises InvalidArgumentError for a file that is no shard, or only part of one."""
    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            if "is_padding" not in names or "row" not in names:
                raise InvalidArgumentError(
                    f"{path}: is a safetensors file but no gristmill shard (no tensor is_padding)"
                )
            padding = file.get_tensor("is_padding").astype(bool)
            micro_batches = json.loads(file.metadata()["micro_batches"])
            lengths = np.zeros(len(padding), np.int64)
            loss_tokens = elements = column_bytes = 0
            for name in names:
                prefix, _, column = name.rpartition("/")
                rows = micro_batches[int(prefix.removeprefix("micro_batch_"))] if prefix else slice(None)
                if column == "attention_mask":
                    lengths[rows] = file.get_tensor(name).sum(axis=1, dtype=np.int64)
                elif column == "cu_seqlens":
                    lengths[rows] = np.diff(file.get_tensor(name))
                elif column == "loss_mask":
                    loss_tokens += int(file.get_tensor(name).sum(dtype=np.int64))
                elif column == "sequences":
                    elements += int(np.prod(file.get_slice(name).get_shape()))
                elif column not in BUILT_IN:
                    column_bytes += _nbytes(file.get_slice(name))
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"{path}: is not a whole shard: {error}") from None
    return ShardFigures(
        len(padding), int(padding.sum()), int(lengths[~padding].sum()), elements, loss_tokens, column_bytes
    )


def _nbytes(tensor: Any) -> int:
    """Bytes of a tensor that is not read."""
    # "BOOL" has no number in it.
    bits = int(re.sub(r"\D", "", tensor.get_dtype()) or 8)
    shape: list[int] = tensor.get_shape()
    return math.prod(shape) * bits // 8


def _cells(shard: ShardFigures, has_columns: bool) -> list[str]:
    cells = [
        f"{shard.rows:,}",
        f"{shard.padding_rows:,}",
        f"{shard.tokens:,}",
        f"{shard.padding_share:.1%}",
        f"{shard.loss_tokens:,}",
    ]
    return [*cells, f"{shard.column_bytes / 1e6:,.1f} MB"] if has_columns else cells
