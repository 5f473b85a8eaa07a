"""Many threads write columns for the same shards, while the trainer is started again and runs are deleted."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from gristmill._wire.columns import Array
from gristmill.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    GristmillError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    StaleIncarnationError,
    UnavailableError,
)
from gristmill_service.monitoring.collectors.run_monitor import Monitor
from gristmill_service.pipeline.scheduling.plan import ShardAddress
from gristmill_service.run.machine.answers import BatchState
from gristmill_service.run.machine.decisions.resume import Checkpoint
from gristmill_service.storage.memory import MemoryShardStore
from tests.on_loop import Run, Runs
from tests.pipeline.written import column
from tests.run.harness import CONFIG, group_rows, table, wait_until
from tests.run.test_served_bytes import PATIENCE_S

BATCHES, WRITERS, LAUNCHES = 6, 6, 5
SETTINGS: dict[str, Any] = CONFIG | {
    "train_batch_size": 2,
    "dp_size": 2,
    "max_buffered_batches": BATCHES + 1,
    "advantage_estimator": "gae",
    "columns": [column("values"), column("verdict", scope="row")],
}
# What a writer meets that comes late, or too early, or second.
EXPECTED = (AlreadyExistsError, FailedPreconditionError, StaleIncarnationError, UnavailableError, NotFoundError)


def filled(runs: Runs) -> Run:
    runs.create("run", SETTINGS)
    run: Run = runs.get("run")
    for uid in range(2 * BATCHES):
        run.submit(table(*group_rows(str(uid))))
    return run


def columns_for(shard: dict[str, Array], number: float) -> dict[str, Array]:
    mask = shard["response_mask"]
    return {"values": np.full(mask.shape, number, np.float32), "verdict": np.full(len(mask), number, np.float32)}


def write(run: Run, stopped: threading.Event, seed: int) -> None:
    """Writes its incarnation for whatever a batch awaits, half of the writers and a half: who is first is kept."""
    draw = random.Random(seed)
    while not stopped.is_set():
        batch = draw.randrange(BATCHES)
        try:
            answer = run.batch(batch)
            incarnation = run.status().models[0].incarnation
            if answer.state is not BatchState.FORWARD:
                continue
            place = draw.choice(answer.awaits)
            shard = load(b"".join(run.read_shard(batch, ShardAddress("policy", *place[:2]))))
            sent = columns_for(shard, incarnation + 0.5 * draw.randint(0, 1))
            chosen = draw.choice([sent, {place.column: sent[place.column]}])
            run.write(batch, *place[:2], incarnation, chosen)
        except (*EXPECTED, InvalidArgumentError):
            # Not even its own shape is right where the shards were cut again since it read one.
            continue


def test_whichever_writer_wins_a_batch_is_made_of_one_incarnations_values_each_once() -> None:
    runs, stopped = Runs(MemoryShardStore(), make_monitor=Monitor), threading.Event()
    run = filled(runs)
    with ThreadPoolExecutor(WRITERS) as pool:
        writers = [pool.submit(write, run, stopped, seed) for seed in range(WRITERS)]
        try:
            for launch in range(LAUNCHES):
                threading.Event().wait(0.05)
                run.resume("policy", Checkpoint(None), str(launch), 1 + launch % 2)
            wait_until(lambda: run.status().batches_published == BATCHES)
        finally:
            stopped.set()
        for writer in writers:
            writer.result(PATIENCE_S)
    for batch in range(BATCHES):
        incarnations: set[int] = set()
        for mini_batch in range(2):
            for rank in range(run.config.dp_size):
                tensors = load(b"".join(run.read_shard(batch, ShardAddress("policy", mini_batch, rank))))
                real = tensors["is_padding"] == 0
                values = tensors["values"][real][tensors["response_mask"][real] == 1]
                assert len(set(values.tolist())) <= 1, "a column of a shard is one writer's"
                incarnations |= {int(value) for value in (*values, *tensors["verdict"][real])}
        assert len(incarnations) == 1, "and all of a batch are of one incarnation"
    held = sum(column.nbytes for batch in run._writer.state.batches.values() for column in batch.written.values())
    rows = sum(group.nbytes for batch in run._writer.state.batches.values() for group in batch.groups)
    assert run.status().row_bytes == held + rows
    runs.close(PATIENCE_S)


def test_a_run_that_is_deleted_while_it_is_written_ends_every_call_and_leaves_nothing() -> None:
    store = MemoryShardStore()
    runs = Runs(store, make_monitor=Monitor)
    for number in range(8):
        run, begun = filled(runs), threading.Barrier(WRITERS + 1)

        def load_it(seed: int, run: Run = run, begun: threading.Barrier = begun) -> type[GristmillError]:
            begun.wait(PATIENCE_S)
            draw = random.Random(seed)
            while True:
                try:
                    batch = draw.randrange(BATCHES)
                    for place in run.batch(batch).awaits:
                        shard = load(b"".join(run.read_shard(batch, ShardAddress("policy", *place[:2]))))
                        run.write(batch, *place[:2], 1, columns_for(shard, 1.0))
                except (FailedPreconditionError, UnavailableError, ResourceExhaustedError):
                    continue
                except NotFoundError as error:
                    return type(error)

        with ThreadPoolExecutor(WRITERS) as pool:
            writing = [pool.submit(load_it, seed) for seed in range(WRITERS)]
            begun.wait(PATIENCE_S)
            threading.Event().wait(0.01 * number)
            runs.delete("run")
            assert {one.result(PATIENCE_S) for one in writing} == {NotFoundError}
        with pytest.raises(NotFoundError):
            run.write(0, 0, 0, 1, {"values": np.zeros((1, 1), np.float32)})
        assert len(run._writer.rows) == 0
    runs.close(PATIENCE_S)
    assert store._batches == {}
