"""prime-rl's own readers take what the bridge writes. Needs a checkout of prime-rl's source:

PRIME_RL_SOURCE=path/to/prime-rl python -m pytest tests/adapters/prime_rl/test_upstream.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill import RolloutClient, TrainerClient
from gristmill.adapters.prime_rl import Encoding, Files, Transport, Zmq
from gristmill.torch import MicroBatch
from tests.adapters.prime_rl.conftest import Running
from tests.adapters.prime_rl.make_golden import DATA
from tests.adapters.prime_rl.rollouts import COLUMNS, CONFIG, DP_SIZE, STREAMS, rows
from tests.adapters.prime_rl.test_zmq import HOST, port  # noqa: F401
from tests.adapters.prime_rl.upstream import prime_rl
from tests.on_loop import Service

SOURCE = Path(os.environ.get("PRIME_RL_SOURCE", ""))
pytestmark = [
    pytest.mark.skipif("PRIME_RL_SOURCE" not in os.environ, reason="PRIME_RL_SOURCE names no checkout"),
    # prime-rl's own.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

ENCODING = Encoding(pad_to_multiple_of=4)


@contextmanager
def upstream(rank: int) -> Iterator[SimpleNamespace]:
    """prime-rl's modules as a process of this rank has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(DP_SIZE))
        patch.setenv("LOCAL_WORLD_SIZE", str(DP_SIZE))
        with prime_rl(SOURCE) as modules:
            yield modules


@pytest.fixture(params=["filesystem", "zmq"])
def wire(request: pytest.FixtureRequest, port: int, tmp_path: Path) -> Iterator[tuple[Transport, Any]]:  # noqa: F811
    """A transport, and prime-rl's settings of it."""
    transport: Transport = (
        Files(tmp_path, DP_SIZE, tmp_path / "rollouts") if request.param == "filesystem" else Zmq(HOST, port, DP_SIZE)
    )
    yield transport, SimpleNamespace(type=request.param, host=HOST, port=port, hwm=10)
    transport.close()


def test_prime_rl_s_loader_gives_every_rank_the_tensors_of_its_shard(
    service: Service,
    rollouts: RolloutClient,
    bridge: Callable[..., Running],
    wire: tuple[Transport, Any],
    tmp_path: Path,
) -> None:
    rollouts.create_run(CONFIG | {"columns": COLUMNS})
    rollouts.submit(rows(with_columns=True))
    transport, settings = wire
    bridge(transport=transport, encoding=ENCODING)
    loaders = []
    for rank in range(DP_SIZE):
        with upstream(rank) as modules:
            loaders.append(modules.data.DataLoader(tmp_path, 1, DP_SIZE, settings))
    for rank, loader in enumerate(loaders):
        loader.wait_for_batch()
        (loaded,) = loader.get_batch()
        with TrainerClient(service.grpc_address, rollouts.run, rank, auto_commit=False) as client:
            (shard,) = next(iter(client)).mini_batches()
            (micro,) = shard.micro_batches()
            _check(loaded, micro)
        loader.receiver.close()


def _check(given: dict[str, Any], micro: MicroBatch) -> None:
    """Each tensor, before the padding to a multiple, is the shard's."""
    count = len(micro["sequences"])
    assert given["input_ids"].shape == (1, count + -count % 4)

    def own(name: str) -> torch.Tensor:
        tensor: torch.Tensor = given[name][0, :count]
        return tensor

    assert torch.equal(own("input_ids"), micro["sequences"].long())
    assert torch.equal(own("position_ids"), micro["position_ids"].long())
    assert torch.equal(own("loss_mask"), micro["loss_mask"].bool())
    assert torch.equal(own("advantages"), micro["advantages"])
    assert torch.equal(own("inference_logprobs"), micro["rollout_logprobs"])
    assert torch.equal(own("routed_experts"), micro["routed_experts"].int())
    for name in STREAMS:
        assert torch.equal(own(name), micro[name])
    lengths = micro["cu_seqlens"].diff().tolist()
    assert own("temperatures").tolist() == micro["temperatures"].repeat_interleave(torch.tensor(lengths)).tolist()
    names = [name for name, length in zip(micro.metadata["tags"], lengths, strict=True) for _ in range(length)]
    assert given["env_names"][:count] == names
    assert sum(given["sequence_lengths"]) == given["seq_lens"].sum() == given["input_ids"].numel()


def test_the_golden_files_are_prime_rl_s(tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in DATA.iterdir()}
    subprocess.run([sys.executable, "-m", "tests.adapters.prime_rl.make_golden", str(SOURCE)], check=True)
    assert {path.name: path.read_bytes() for path in DATA.iterdir()} == before
