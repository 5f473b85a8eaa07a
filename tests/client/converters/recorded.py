"""Output of real frameworks, read from data/ in the types that converters get. `make_data.py` recorded it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

DATA = Path(__file__).with_name("data")


@cache
def _text(framework: str) -> str:
    return (DATA / f"{framework}.json").read_text()


def load(framework: str, kind: Any = np.array) -> Any:
    """Read a framework's file again, with arrays made by `kind`."""
    return _values(json.loads(_text(framework)), kind)


def _values(value: Any, kind: Any) -> Any:
    if isinstance(value, list):
        return [_values(entry, kind) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "values"}:
        return kind(np.array(value["values"], value["dtype"]))
    if value.keys() == {"nested"}:
        rows = [torch.from_numpy(np.array(row["values"], row["dtype"])) for row in value["nested"]]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)
    return {name: _values(entry, kind) for name, entry in value.items()}


def verl_batch(kind: Any = np.array) -> Any:
    """The DataProto: `batch` holds tensors, `non_tensor_batch` arrays of objects."""
    recorded = load("verl", kind)
    others = {}
    for name, values in recorded["non_tensor_batch"].items():
        others[name] = np.empty(len(values), object)
        others[name][:] = list(values)
    return SimpleNamespace(batch=recorded["batch"], non_tensor_batch=others, meta_info={})


def verl_queue() -> tuple[list[str], dict[str, Any]]:
    recorded = load("verl")
    return recorded["queue_keys"], recorded["queue"]


def trl_output(kind: Any = np.array) -> dict[str, Any]:
    output: dict[str, Any] = load("trl", kind)["output"]
    return output


def trl_samples() -> list[Any]:
    return [SimpleNamespace(**sample) for sample in load("trl")["samples"]]


def skyrl_output(name: str) -> tuple[list[Any], dict[str, Any]]:
    """The trajectory ids of the generator's input, and its output."""
    recorded = load("skyrl")[name]
    output = recorded["output"]
    if output["trajectory_ids"] is not None:
        output["trajectory_ids"] = [SimpleNamespace(**entry) for entry in output["trajectory_ids"]]
    return [SimpleNamespace(**entry) for entry in recorded["trajectory_ids"]], output
