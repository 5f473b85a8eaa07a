"""Bytes of declared columns are reported: by metrics of a run, and by `gristmill show` of shards on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gristmill._wire.rows import from_rows
from gristmill_service.cli.offline.show import read_figures
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.storage.shard_files import write_shards
from tests.cli.terminal import gristmill
from tests.rows import make_config

COLUMNS = [
    {"name": "experts", "dtype": "int16", "scope": "token", "shape": [4]},
    {"name": "pixels", "dtype": "bfloat16", "scope": "items", "shape": [3], "required": False},
    {"name": "is_hard", "dtype": "bool", "scope": "row"},
]
CONFIG: dict[str, Any] = make_config(n_samples_per_prompt=2, micro_batch={"size": 2}, columns=COLUMNS, step_wise=False)
ROWS = [
    {"uid": "a", "sample": sample, "prompt_token_ids": [1, 2], "response_ids": [3], "loss_mask": [1], "reward": 1.0}
    | {"experts": [[0] * 4] * 3, "is_hard": True}
    | ({"pixels": [[1, 2, 3]]} if sample else {})
    for sample in range(2)
]  # fmt: skip


def test_bytes_are_those_of_the_file_by_column(tmp_path: Path) -> None:
    config = parse_config(CONFIG)
    batch = build_batch(from_rows(ROWS, step_wise=False, columns=config.columns), config, run="r", batch=0)
    stats = batch.stats()
    # Two rows of 3 tokens; one item, three offsets and two flags; a flag a row.
    assert stats.column_bytes == {"experts": 2 * 3 * 4 * 2, "pixels": 3 * 2 + 3 * 8 + 2, "is_hard": 2}
    write_shards(tmp_path, batch.shards)
    figures = read_figures(tmp_path / "policy-000/rank-000.safetensors")
    assert figures.column_bytes == sum(stats.column_bytes.values())
    shown = gristmill("show", tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "declared columns" in " ".join(shown.stdout.split())
