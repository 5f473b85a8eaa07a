"""The table of a batch, as trainers read it and as docs/table.md describes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from gristmill import NotFoundError, RolloutClient
from gristmill._wire.batch_table import BatchTable
from gristmill._wire.rows import from_rows
from gristmill_service.config import parse_config
from gristmill_service.pipeline import build_batch, plan_batch
from tests.client.whole_way import CONFIG, prompts, roll_out, trainer_of
from tests.on_loop import Service
from tests.rows import make_config, make_row

PAGE = Path(__file__).parents[2] / "docs/table.md"
VALUES = {"name": "values", "dtype": "float32", "scope": "response", "source": "trainer"}


def test_a_batch_s_table_has_the_rows_of_its_shards(service: Service, client: RolloutClient) -> None:
    client.create_run(CONFIG)
    roll_out(client, prompts(0, 2))
    with trainer_of(service, client) as trainer:
        batch = next(iter(trainer))
        table = batch.table()
        assert pyarrow.table(table).num_rows == batch.plan["rows"] == 4
        assert sum(table["loss_tokens"]) == sum(one["loss_tokens"] for one in batch.plan["mini_batches"])
        assert np.mean(table["advantage"]) == pytest.approx(0, abs=1e-6)
        for shard in batch.epoch():
            rows = shard["row"].numpy()
            assert set(table["mini_batch"][rows]) == {shard.position.mini_batch}
            for name in ("sample", "step_first", "step_last", "policy_version"):
                assert np.array_equal(table[name][rows], shard[name].numpy())
        table["tokens"] += 1
        batch.ack()
        assert np.array_equal(trainer.table(0)["tokens"] + 1, table["tokens"])
        with pytest.raises(NotFoundError, match="batch 1 is not published yet"):
            trainer.table(1)


def test_advantages_are_unknown_until_the_columns_that_they_depend_on_are_written(
    service: Service, client: RolloutClient
) -> None:
    client.create_run(CONFIG | {"advantage_estimator": "gae", "columns": [VALUES], "critic_mini_batch_size": 2})
    roll_out(client, prompts(0, 2))
    with trainer_of(service, client) as trainer:
        batch = next(iter(trainer))
        assert np.isnan(batch.table()["advantage"]).all()
        for shard in batch.forward():
            values = [micro["response_mask"].float() for micro in shard.micro_batches()]
            trainer.write(shard, {"values": values})
        next(batch.mini_batches())
        table = batch.table()
        assert not np.isnan(table["advantage"]).any()
        assert set(table["critic_rank"]) == {0}


def test_the_page_lists_every_column_with_its_type() -> None:
    critic: dict[str, Any] = {"critic_mini_batch_size": 1, "advantage_estimator": "gae", "columns": [VALUES]}
    cost = {"name": "patches", "dtype": "float32", "scope": "row", "source": "rollout"}
    flops: dict[str, Any] = {"columns": [cost], "flops": {"column": "patches"}, "balance": "flops"}
    columns = columns_of(**critic) | columns_of(**flops)
    described = {
        name: kind
        for names, kind in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (\w+) \|", PAGE.read_text(encoding="utf-8"), re.M)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert described == columns


def columns_of(**settings: Any) -> dict[str, str]:
    """The columns of a batch with these settings, and their types."""
    config = parse_config(make_config(**settings))
    more: dict[str, Any] = {one.name: 1.0 for one in config.columns if one.source == "rollout"}
    steps = from_rows([make_row(**more)], step_wise=True, columns=config.columns)
    _, table = plan_batch(steps, config, batch=0)
    columns = BatchTable.decode(table.encode()).by_row()
    return {name: "text" if values.dtype.kind in "OU" else str(values.dtype) for name, values in columns.items()}


def test_texts_are_exactly_those_of_the_rows() -> None:
    """Also where they end with NULs, which arrays of a fixed width would cut off."""
    table = build_batch(
        from_rows([make_row("a\0", 0, tag="\0"), make_row("a", 0, tag="1e5")]),
        parse_config(make_config(train_batch_size=2)),
        run="run",
        batch=0,
    ).table.by_row()
    assert (table["uid"].tolist(), table["tag"].tolist()) == (["a\0", "a"], ["\0", "1e5"])


def test_a_batch_whose_rows_are_all_stale_has_every_column() -> None:
    config = parse_config(make_config(stale="drop", max_staleness=0))
    steps = from_rows([make_row(policy_version=0)], step_wise=True, columns=())
    table = build_batch(steps, config, run="run", batch=0, policy_version=1).table
    columns = BatchTable.decode(table.encode()).by_row()
    assert {len(values) for values in columns.values()} == {0}
    assert {name: str(values.dtype) for name, values in columns.items() if values.dtype.kind != "U"} == {
        name: kind for name, kind in columns_of().items() if kind != "text"
    }
