"""Trainings as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.trainers.trl.train import Job

ROOT = Path(__file__).parents[3]


@contextmanager
def started(job: Job, path: Path, ranks: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """A training as a process, which does not outlive the block. What it says is in `path`.log."""
    command = [sys.executable, "-m"]
    if ranks > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command += ["tests.trainers.trl.train", str(job.write(path.with_suffix(".json")))]
    with path.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=30)


def run(job: Job, path: Path, ranks: int = 1) -> int:
    """The exit status of a training."""
    with started(job, path, ranks) as process:
        return process.wait(timeout=300)


def said(path: Path) -> str:
    """The end of what it said."""
    return path.with_suffix(".log").read_text()[-2000:]
