"""Declared columns: routed experts of a mixture-of-experts model, 192 times the bytes of their tokens."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from gristmill import RolloutClient
from gristmill._client.connection.transport import Transport
from gristmill._wire.codecs.submit_codec import encode
from gristmill._wire.columns import Ragged
from gristmill._wire.steps import Extra
from gristmill.v1 import run_pb2, trainer_pb2, trainer_pb2_grpc
from gristmill_service.config import RunConfig, parse_config
from gristmill_service.pipeline import build_batch
from gristmill_service.pipeline.rows.joins import extends
from gristmill_service.storage.shard_files import write_shards
from tests.tools.bench.bare import OPTIONS, bare
from tests.tools.bench.figures import Figure, paired, seconds
from tests.tools.bench.pipeline import TMPFS
from tests.tools.bench.processes import served
from tests.tools.bench.workloads import Workload, workload

SHAPE = (48, 8)
COLUMN: dict[str, Any] = {"name": "routed_experts", "dtype": "int16", "scope": "token", "shape": list(SHAPE)}
TOKENS, SUBMITTED_TOKENS = 2_000_000, 200_000
ROUNDS = 5
_CHUNK = 8 << 20


def figures() -> Iterator[Figure]:
    yield _pipeline()
    yield from _service()


def _pipeline() -> Figure:
    """From rows as the service holds them, each value once, to packed shards in shared memory."""
    work = with_experts(first_tokens(workload("agent"), TOKENS))
    config = _config(work, layout="packed")
    values = work.steps.extras["routed_experts"].values.values
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        target, size = Path(directory) / "batch", 0

        def ours() -> None:
            nonlocal size
            target.mkdir()
            batch = build_batch(work.steps, config, run="bench", batch=0)
            size = sum(write_shards(target, batch.shards).values())
            shutil.rmtree(target)

        ours()
        warm = np.ones(_CHUNK, np.uint8)

        def bound() -> None:
            for column in (*(column.values for column in work.columns()), values):
                column.reshape(-1).view(np.uint8)[: column.nbytes // 8 * 8].view(np.uint64).max()
            _write(Path(directory) / "bound", warm, size)

        ratio, limit = paired(ours, bound, ROUNDS)
    return Figure("columns.experts_ratio", ratio, "x bound", 1.5, limit, "s")


def _write(path: Path, warm: NDArray[np.uint8], size: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        while size > 0:
            size -= os.write(descriptor, warm[:size].data)
    finally:
        os.close(descriptor)
        path.unlink()


def _service() -> Iterator[Figure]:
    """Turns with experts, each sent by its trajectory; then a pull that leaves them out."""
    work = with_experts(first_tokens(workload("agent"), SUBMITTED_TOKENS))
    whole, experts = encode("bench", [work.steps]), whole_experts(work)
    pieces = [whole[at : at + _CHUNK // 2] for at in range(0, len(whole), _CHUNK // 2)]
    with bare() as limit, served([]) as service:
        ratios = []
        for number in range(ROUNDS + 1):
            name = f"columns-{number}"
            with RolloutClient(service.grpc_address, name) as client:
                client.create_run(_config(work, layout="left_padded").model_dump(mode="json", exclude_defaults=True))
                ours = seconds(lambda client=client: _roll_out(client, work, experts))  # type: ignore[misc]
            ratios.append(seconds(lambda: limit.send(pieces)) / ours)
            if number == ROUNDS:
                yield Figure("columns.skipped_bytes", _skipped(service.grpc_address, name), "bytes", 0.0)
            transport = Transport(service.grpc_address, 60.0, "bench")
            transport.call(transport.runs.DeleteRun, run_pb2.DeleteRunRequest(run=name))
            transport.close()
        ratio = statistics.median(ratios[1:])
        yield Figure("columns.submit_ratio", ratio, "x bare gRPC", 0.6, len(whole) / 1e6, "MB", at_most=False)


def _roll_out(client: RolloutClient, work: Workload, experts: list[NDArray[np.int16]]) -> None:
    steps = work.steps
    for row in range(len(steps)):
        tokens, split = steps.tokens[row], int(steps.prompt_lengths[row])
        if steps.steps[row] == 0:
            trajectory = client.trajectory(steps.uids[row], int(steps.samples[row]))
        trajectory.step(
            tokens[:split],
            tokens[split:],
            reward=1.0,
            is_last_step=bool(steps.is_last_steps[row]),
            columns={"routed_experts": experts[row]},
        )
    client.flush()


def _skipped(address: str, run: str) -> float:
    """Bytes that a rank was sent which are neither the header of the file without experts nor its tensors."""
    with grpc.insecure_channel(address, OPTIONS) as channel:
        trainers = trainer_pb2_grpc.TrainerServiceStub(channel)  # type: ignore[no-untyped-call]
        trainers.GetBatch(trainer_pb2.GetBatchRequest(run=run, batch=0, wait_s=60))
        request = trainer_pb2.ReadShardRequest(run=run, model=run_pb2.MODEL_POLICY, chooses_columns=True)
        data = b"".join(message.data for message in trainers.ReadShard(request))
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    del header["__metadata__"]
    assert "routed_experts" not in header
    return float(
        len(data) - size - sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
    )


def first_tokens(work: Workload, tokens: int) -> Workload:
    """The workload's first groups, of about that many distinct tokens."""
    fresh = np.cumsum(work.steps.tokens.lengths - shared_tokens(work))
    last = work.steps.uids[int(np.searchsorted(fresh, tokens))]
    rows = np.arange(work.steps.uids.index(last))
    return Workload(work.name, work.steps.take(rows), work.samples)


def shared_tokens(work: Workload) -> NDArray[np.int64]:
    """How many of each row's first tokens are the whole row before it of the trajectory; int64 (rows,)."""
    steps = work.steps
    follows = np.append(False, steps.steps[1:] > 0)
    follows[1:] &= steps.tokens.lengths[:-1] <= steps.prompt_lengths[1:]
    joins = extends(steps.tokens, follows)
    return np.where(joins, np.append(0, steps.tokens.lengths[:-1]), 0)


def with_experts(work: Workload) -> Workload:
    """The rows with experts as the service holds them: of each token once."""
    lengths = work.steps.tokens.lengths - shared_tokens(work)
    values = np.arange(int(lengths.sum()) * SHAPE[0] * SHAPE[1], dtype=np.int16).reshape(-1, *SHAPE)
    extra = Extra(Ragged.from_lengths(values, lengths), np.ones(len(work.steps), np.bool_))
    return Workload(work.name, replace(work.steps, extras={"routed_experts": extra}), work.samples)


def whole_experts(work: Workload) -> list[NDArray[np.int16]]:
    """Of each row the experts of all its tokens, as an engine returns them: views of one array."""
    longest = int(work.steps.tokens.lengths.max())
    values = np.arange(longest * SHAPE[0] * SHAPE[1], dtype=np.int16).reshape(-1, *SHAPE)
    return [values[:length] for length in work.steps.tokens.lengths.tolist()]


def _config(work: Workload, layout: str) -> RunConfig:
    groups = len(set(work.steps.uids))
    return parse_config(
        {
            "train_batch_size": groups,
            "n_samples_per_prompt": work.samples,
            "policy_mini_batch_size": groups,
            "step_wise": True,
            "merge": "prefix",
            "micro_batch": {"max_tokens": 65_536},
            "dp_size": 8 if layout == "packed" else 1,
            "layout": layout,
            "columns": [COLUMN],
            "max_buffered_bytes": 16 << 30,
        }
    )
