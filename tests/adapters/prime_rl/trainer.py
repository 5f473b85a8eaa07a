"""Replaces prime-rl's trainer: what it reads and writes in its run directory, in the order of
`src/prime_rl/trainer/rl/train.py` (prime-rl after 0.8.0). Its weights are the list of what it has trained.

As a process, which resumes from the newest checkpoint:

    python -m tests.adapters.prime_rl.trainer OUTPUT_DIR DP_SIZE MAX_STEPS CHECKPOINT_INTERVAL
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import msgspec

_POLL_S = 0.01


class Trainer:
    """weights: of each step that was trained, the tokens of each rank's micro-batches."""

    def __init__(self, output_dir: Path, dp_size: int) -> None:
        self.output_dir, self._dp_size = output_dir, dp_size
        self.step = 0
        self.weights: list[list[list[int]]] = []

    def broadcast(self) -> None:
        """Says that the weights of the last step are available; at the start the initial weights."""
        self._touch(f"broadcasts/step_{self.step}/STABLE")

    def is_given_a_step(self) -> bool:
        return all(path.exists() for path in self._files())

    def train(self) -> None:
        """Waits for the next step, trains it and broadcasts the weights."""
        while not self.is_given_a_step():
            time.sleep(_POLL_S)
        ranks = [msgspec.msgpack.decode(path.read_bytes()) for path in self._files()]
        self.step += 1
        self.weights.append([[token for micro in rank for token in micro[0]] for rank in ranks])
        self.broadcast()

    def save(self) -> None:
        saved = self.output_dir / f"checkpoints/step_{self.step}/trainer/weights.json"
        saved.parent.mkdir(parents=True, exist_ok=True)
        saved.write_text(json.dumps(self.weights))
        # As torch.distributed.checkpoint: the last file says that all are there.
        self._touch(f"checkpoints/step_{self.step}/trainer/.metadata")

    def resume(self) -> None:
        """From the newest complete checkpoint, if there is one."""
        saved = [
            int(path.parts[-3].removeprefix("step_")) for path in self.output_dir.glob("checkpoints/*/*/.metadata")
        ]
        self.step = max(saved, default=0)
        if self.step:
            self.weights = json.loads(
                (self.output_dir / f"checkpoints/step_{self.step}/trainer/weights.json").read_text()
            )

    def _files(self) -> list[Path]:
        step = self.output_dir / f"batches/step_{self.step + 1}"
        return [step / f"rank_{rank}.bin" for rank in range(self._dp_size)]

    def _touch(self, name: str) -> None:
        path = self.output_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def main(output_dir: Path, dp_size: int, max_steps: int, interval: int) -> None:
    trainer = Trainer(output_dir, dp_size)
    trainer.resume()
    trainer.broadcast()
    while trainer.step < max_steps:
        trainer.train()
        if trainer.step % interval == 0 or trainer.step == max_steps:
            trainer.save()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
