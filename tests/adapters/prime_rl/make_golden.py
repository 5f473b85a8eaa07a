"""Writes data/: what prime-rl's own packer and sender make of the rollouts in rollouts.py.

python -m tests.adapters.prime_rl.make_golden path/to/prime-rl
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.adapters.prime_rl.rollouts import DP_SIZE, MAX_TOKENS, training_samples
from tests.adapters.prime_rl.upstream import prime_rl

DATA = Path(__file__).parent / "data"
PAD_TO_MULTIPLE_OF = 3


def main(source: Path) -> None:
    with prime_rl(source) as upstream, TemporaryDirectory() as directory:
        for step, with_columns in ((1, False), (2, True)):
            samples = training_samples(upstream.types, with_columns=with_columns)
            grid = upstream.batch.prepare_batch(
                samples,
                MAX_TOKENS,
                DP_SIZE,
                upstream.batch.build_bin_cost(None),
                pad_to_multiple_of=PAD_TO_MULTIPLE_OF if with_columns else 1,
            )
            sender = upstream.rollouts.FileSystemMicroBatchSender(Path(directory), DP_SIZE, step)
            asyncio.run(sender.send(grid))
            for rank in range(DP_SIZE):
                written = Path(directory) / "rollouts" / f"step_{step}" / f"rank_{rank}.bin"
                (DATA / f"{'columns' if with_columns else 'plain'}-rank-{rank}.bin").write_bytes(written.read_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
