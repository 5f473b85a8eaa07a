"""Writes and reads data/rollout.json: what slime's own RolloutManager gives each rank of the samples in samples.py.

python -m tests.adapters.slime.golden path/to/slime
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.adapters.slime.samples import PARALLEL, arguments
from tests.adapters.slime.upstream import slime

GOLDEN = Path(__file__).parent / "data/rollout.json"


def plain(rank: dict[str, Any]) -> dict[str, Any]:
    """Train data as JSON has them: a tensor is its dtype and its values."""
    return {name: json.loads(json.dumps(values, default=_tensor)) for name, values in rank.items()}


def _tensor(value: torch.Tensor) -> list[Any]:
    return [str(value.dtype), value.tolist()]


def slime_s_own(source: Path, **changes: Any) -> list[dict[str, Any]]:
    """The train data of each rank for slime's first rollout."""
    with slime(source) as modules:
        args = arguments(sample_type=modules.types.Sample, **changes)
        manager = modules.rollout.RolloutManager.plain(args, None)
        manager.set_train_parallel_config(PARALLEL)
        return [box.inner for box in manager.generate(0)]


def main(source: Path) -> None:
    GOLDEN.write_text(json.dumps([plain(rank) for rank in slime_s_own(source)], indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
