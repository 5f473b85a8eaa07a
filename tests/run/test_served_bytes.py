"""However rows come, a run serves the bytes that the offline command writes of the same rows. The real pipeline."""

import json
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill._wire.codecs.row_codec import encode
from gristmill._wire.column_spec import specs_of
from gristmill._wire.rows import from_rows
from gristmill._wire.steps import TrajectoryKey
from gristmill.errors import BatchFailedError
from gristmill_service.config import parse_config
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.layout.iovec import join
from gristmill_service.pipeline.plan_document import decode_plan
from gristmill_service.run.machine.answers import BatchState, Position
from gristmill_service.storage.memory import MemoryShardStore
from tests.on_loop import Run, Runs
from tests.run.harness import CONFIG, Bench, group_rows, reward_of, row, table, wait_until
from tests.strategies import Row, batches_and_settings, batches_with_columns

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    serving = Runs(MemoryShardStore(), clock=lambda: 0.0, make_monitor=Monitor)
    yield serving
    serving.close(PATIENCE_S)


def await_batch(run: Run, number: int) -> bytes:
    """The batch's plan, when it is there."""
    wait_until(lambda: run.batch(number).state is not BatchState.PENDING)
    plan: bytes = run.batch(number).plan
    return plan


def served(run: Run, number: int) -> tuple[bytes, dict[str, bytes]]:
    """All that ranks see of a batch: its plan, and each shard's bytes by its path."""
    plan = await_batch(run, number)
    shards = {}
    for part in json.loads(plan)["mini_batches"]:
        for rank in range(run.config.dp_size):
            view = run.shard(part["model"], rank, Position(number, 0, part["index"]), 0)
            assert view.address is not None
            shards[view.address.path] = b"".join(run.read_shard(number, view.address))
    return plan, shards


@st.composite
def deliveries(draw: st.DrawFn, count: int) -> list[list[tuple[int, bool]]]:
    """Requests that bring that many rows, each at least once, in any order: their numbers, and whose reward is late."""
    late = [draw(st.booleans()) for _ in range(count)]
    sent = draw(st.permutations([*range(count), *draw(st.lists(st.integers(0, count - 1), max_size=4))]))
    cuts = sorted(draw(st.sets(st.integers(0, len(sent)), max_size=4)))
    edges = [0, *cuts, len(sent)]
    return [[(index, late[index]) for index in sent[a:b]] for a, b in pairwise(edges)]


@settings(max_examples=60, deadline=None)
@given(
    batches_and_settings(seal_order="admission")
    | batches_and_settings(seal_order="admission", layout="prefix_tree")
    | batches_with_columns(seal_order="admission"),
    st.data(),
)
def test_a_run_serves_what_the_offline_pipeline_makes_of_the_same_rows(
    runs: Runs, drawn: tuple[list[Row], dict[str, object]], data: st.DataObject
) -> None:
    rows, config = drawn
    uids = list(dict.fromkeys(sent["uid"] for sent in rows))
    checked = parse_config(config)
    whole = from_rows(rows, columns=checked.columns)
    expected = build_batch(whole, checked, run="run", batch=0, policy_version=0)
    runs.create("run", config)
    run = runs.get("run")
    try:
        run.begin_groups(0, uids)
        absent = {(uid, sample) for uid in uids for sample in range(3)} - {(s["uid"], s["sample"]) for s in rows}
        run.abort_trajectories([TrajectoryKey(0, *trajectory) for trajectory in sorted(absent)], "not sampled")
        for request in data.draw(deliveries(len(rows))):
            _deliver(run, [rows[index] | ({"reward": None} if late else {}) for index, late in request])
            run.set_rewards([reward_of(rows[index]) for index, late in request if late])
        plan, shards = served(run, 0)
        assert decode_plan(plan) == expected.plan
        assert shards == {shard.address.path: join(shard.iovec()) for shard in expected.shards}
    finally:
        runs.delete("run")


def _deliver(run: Run, rows: list[Row]) -> None:
    columns = run.config.columns
    run.submit(from_rows(rows, columns=columns))
    assert {outcome.name for outcome in run.submit(from_rows(rows, columns=columns)).outcomes} <= {
        "DUPLICATE",
        "SEALED",
    }


def test_a_batch_that_cannot_be_aligned_fails_with_the_setting_to_change_and_the_run_goes_on(runs: Runs) -> None:
    config = CONFIG | {
        "train_batch_size": 1,
        "dp_size": 4,
        "micro_batch": {"max_tokens": 8},
        "on_misaligned": "drop_trailing",
    }
    runs.create("misaligned", config)
    run = runs.get("misaligned")
    run.submit(table(*group_rows("a")))
    with pytest.raises(BatchFailedError, match=r"batch 0 failed: .*on_misaligned"):
        await_batch(run, 0)
    with pytest.raises(BatchFailedError, match="on_misaligned"):
        run.shard("policy", 0, Position(0), 0)
    run.submit(table(*(row("b", sample, step, last=step == 1) for sample in range(2) for step in range(2))))
    assert json.loads(await_batch(run, 1))["rows"] == 4
    assert run.shard("policy", 0, None, 0).position == Position(1), "ranks step over what failed"
    for rank in range(4):
        run.acknowledge("policy", rank, Position(1), 0, commit=False)
    status = run.status()
    assert (status.groups_dropped, list(status.failed_batches)) == ({"batch_failed": 1}, [0])


def test_an_export_comes_in_parts_of_moderate_size_whatever_the_rows_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill_service.run.batch_builder._EXPORTED_BYTES", 4000)
    columns = [{"name": "image", "dtype": "uint8", "scope": "items"}]
    bench = Bench(train_batch_size=1, n_samples_per_prompt=8, columns=columns)
    sizes = [3900, 15000, 10, 900, 3000, 50, 50, 12000]
    rows = [
        row("a", sample, reward=[0.5] * 100, response=[7] * 100, image=np.zeros(size, np.uint8))
        for sample, size in enumerate(sizes)
    ]
    bench.run.submit(from_rows(rows, columns=specs_of(columns)))
    parts = list(bench.run.export(0))
    assert [sample for part in parts for sample in part.samples.tolist()] == list(range(8))
    assert all(len(part) == 1 or encode(part).ByteSize() < 4000 + 1000 for part in parts)
