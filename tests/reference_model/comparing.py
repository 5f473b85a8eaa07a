"""What a command or a service made of rows, against the reference: every field of a plan, every tensor of a shard."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from tests.reference_model.batch import Expected
from tests.reference_model.layout import ARRAYS, Tensors

# Computed in float64, stored as float32.
RELATIVE, ABSOLUTE = 1e-6, 1e-8
# What costs is of the service's own making.
_NOT_SPECIFIED = {"shard_bytes"}


class Disagreement(AssertionError):
    """The reference has another value than what was made."""


def compare(want: Expected, plan: dict[str, Any], shards: dict[tuple[str, int, int], bytes] | None) -> None:
    """shards: None where only a plan was made."""
    got = {**plan, "metrics": {name: plan["metrics"][name] for name in plan["metrics"] if name not in _NOT_SPECIFIED}}
    _same("plan", dict(want.plan), got)
    if shards is None:
        return
    _same("shards", sorted(want.shards), sorted(shards))
    for key, data in shards.items():
        tensors, labels = want.shards[key]
        _compare_shard(f"shard {key}", tensors, labels, data)


def _same(where: str, want: Any, got: Any) -> None:
    if isinstance(want, dict) and isinstance(got, dict):
        _same(f"{where}: names", sorted(want), sorted(got))
        for name, value in want.items():
            _same(f"{where}.{name}", value, got[name])
    elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        for place, (one, other) in enumerate(zip(want, got, strict=True)):
            _same(f"{where}[{place}]", one, other)
    elif isinstance(want, float) or isinstance(got, float):
        if not math.isclose(want, got, rel_tol=1e-9, abs_tol=1e-9):
            raise Disagreement(f"{where}: expected {want}, got {got}")
    elif want != got:
        raise Disagreement(f"{where}: expected {want}, got {got}")


def _compare_shard(where: str, want: Tensors, labels: dict[str, Any], data: bytes) -> None:
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    _same(f"{where} metadata", labels, {name: json.loads(text) for name, text in header.pop("__metadata__").items()})
    _same(f"{where}: tensors", sorted(want), sorted(header))
    for name, (dtype, shape, values) in want.items():
        entry = header[name]
        _same(f"{where} {name}", [dtype, shape], [entry["dtype"], entry["shape"]])
        first, last = entry["data_offsets"]
        got: np.ndarray[Any, Any] = np.frombuffer(data[begin + first : begin + last], ARRAYS[dtype]).reshape(shape)
        if dtype == "BF16":
            got = (got.astype(np.uint32) << 16).view(np.float32)
        expected = np.array(values, np.float64 if got.dtype.kind == "f" else got.dtype).reshape(shape)
        is_same = np.isclose(got, expected, RELATIVE, ABSOLUTE) if got.dtype.kind == "f" else got == expected
        if not is_same.all():
            place = tuple(int(index) for index in np.argwhere(~is_same)[0])
            raise Disagreement(
                f"{where} {name}{list(place)}: expected {expected[place]}, got {got[place]}\n"
                f"  expected {expected.tolist()}\n  got      {got.tolist()}"
            )
