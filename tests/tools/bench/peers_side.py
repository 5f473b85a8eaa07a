"""TransferQueue's side of tests/tools/bench/peers.py, run by the Python of .venv-peers, where nothing of ours is
installed.

`python tests/tools/bench/peers_side.py ROWS.npz` starts Ray and TransferQueue here, and for each line `long`, `short`
or `turns` puts those rows and answers with seconds, as JSON. The defaults of TransferQueue are left as they are: its
own storage in memory, two storage units.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any, TextIO

os.environ.setdefault("TQ_NUM_THREADS", str(os.cpu_count()))  # more makes it warn at every call

import numpy as np
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

Columns = dict[str, list[Any]]
NAMES = ("prompt_token_ids", "response_ids", "rollout_logprobs")


def put_batch(columns: Columns, partition: str) -> float:
    """Seconds from arrays to the answer: the tensors that its call takes are made meanwhile, as ours makes messages."""
    count = len(columns["response_ids"])
    begin = time.perf_counter()
    keys = [f"prompt-{row // 8}_{row % 8}" for row in range(count)]
    fields: dict[str, torch.Tensor] = {name: _jagged(columns[name]) for name in NAMES}
    fields["rewards"] = torch.ones(count)
    tags = [{"uid": row // 8, "sample": row % 8} for row in range(count)]
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=TensorDict(fields, batch_size=count), tags=tags)
    taken = time.perf_counter() - begin
    assert len(tq.kv_list(partition_id=partition)[partition]) == count
    tq.kv_clear(keys=keys, partition_id=partition)
    return taken


def put_turns(columns: Columns, partition: str) -> list[float]:
    """Seconds of each row alone, put one after another and waited for."""
    times, keys = [], []
    for number, row in enumerate(zip(*(columns[name] for name in NAMES), strict=True)):
        begin = time.perf_counter()
        fields = {name: torch.from_numpy(values) for name, values in zip(NAMES, row, strict=True)}
        fields["rewards"] = torch.tensor(1.0)
        keys.append(f"turn-{number}")
        tq.kv_put(key=keys[-1], partition_id=partition, fields=fields, tag={"uid": number // 8, "sample": number % 8})
        times.append(time.perf_counter() - begin)
    tq.kv_clear(keys=keys, partition_id=partition)
    return times


def _jagged(rows: list[Any]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.from_numpy(row) for row in rows], layout=torch.jagged)


def _read(path: str) -> dict[str, Columns]:
    """Each kind's columns, of values end to end and rows' lengths."""
    with np.load(path) as stored:
        return {
            kind: {name: np.split(stored[f"{kind}.{name}"], stored[f"{kind}.{name}.ends"][:-1]) for name in NAMES}
            for kind in ("long", "short", "turns")
        }


def main(path: str, answers: TextIO) -> None:
    rows = _read(path)
    with tempfile.TemporaryDirectory() as directory:
        memory = 256 << 20
        ray.init(
            num_cpus=4,  # places, not cores: one each for its controller and its storage units
            object_store_memory=memory,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=directory,
        )
        tq.init()
        print("ready", file=answers, flush=True)
        for number, line in enumerate(sys.stdin):
            kind = line.strip()
            put = put_turns if kind == "turns" else put_batch
            print(json.dumps(put(rows[kind], f"{kind}-{number}")), file=answers, flush=True)
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    # What Ray and TransferQueue print goes where errors go.
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(sys.argv[1], ANSWERS)
