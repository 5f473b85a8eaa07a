"""Records rollouts of real frameworks in data/, one file each. They are read by tests that need no framework.

Run it in tests/ (verl's wheel brings a package of the name `tests`), with an environment that has the framework; verl
and TRL 1 do not live together. All with Python 3.11, torch==2.13.* (constraints.txt) and transformers==5.8.0:

    python -m client.converters.make_data verl    # verl==0.9.1 (--no-deps) tensordict==0.10.0 ray==2.56.0 hydra-core
                                                  # codetiming datasets peft torchdata cachetools pillow
    python -m client.converters.make_data trl     # trl==1.16.0 datasets==5.2.0 accelerate==1.15.0 aiohttp
    python -m client.converters.make_data skyrl   # skyrl==0.3.0 skyrl-gym==0.4.0 (--no-deps) ray==2.56.0 tensordict
                                                  # peft torchdata hydra-core loguru jaxtyping

An array is written as its dtype and its values, a nested tensor as a list of those.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from . import real

DATA = Path(__file__).with_name("data")


def plain(value: Any) -> Any:
    """The value as JSON has it."""
    if getattr(value, "is_nested", False):
        return {"nested": [plain(entry) for entry in value.unbind()]}
    if hasattr(value, "__array__") and getattr(value, "dtype", None) != np.dtype(object):
        array = np.asarray(value)
        return {"dtype": str(array.dtype), "values": array.tolist()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)) or hasattr(value, "tolist"):
        return [plain(entry) for entry in (value if isinstance(value, (list, tuple)) else value.tolist())]
    return value


def verl() -> dict[str, Any]:
    batch, (keys, rows) = real.verl_batch(), real.verl_queue()
    return {
        "batch": {name: plain(batch.batch[name]) for name in sorted(batch.batch.keys())},
        "non_tensor_batch": {name: plain(values) for name, values in sorted(batch.non_tensor_batch.items())},
        "queue_keys": keys,
        "queue": {name: plain(rows[name]) for name in sorted(rows.keys())},
    }


def trl() -> dict[str, Any]:
    return {"output": plain(real.trl_output()), "samples": plain(real.trl_samples())}


def skyrl() -> dict[str, Any]:
    made = {}
    for name, step_wise in (("whole", False), ("step_wise", True)):
        ids, output = real.skyrl_output(step_wise=step_wise)
        made[name] = {"trajectory_ids": plain(ids), "output": plain(output)}
    return made


MAKERS = {"verl": verl, "trl": trl, "skyrl": skyrl}


def main(framework: str) -> None:
    packages = (framework, "torch", "transformers")
    recorded = {"made_with": {package: version(package) for package in packages}, **MAKERS[framework]()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in recorded.items())
    (DATA / f"{framework}.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(sys.argv[1])
