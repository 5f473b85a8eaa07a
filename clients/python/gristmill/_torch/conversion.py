"""Converts a shard's tensors to a device and a dtype."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from gristmill._torch.device_copies import Copies, Copy, side_stream
from gristmill._torch.shard_files import Tensors
from gristmill._wire.column_spec import CP_TENSORS, SHARD_TENSORS
from gristmill.errors import InvalidArgumentError

_KINDS = {
    "tokens": ("sequences",),
    "masks": ("attention_mask", "response_mask", "loss_mask"),
    "floats": ("rewards", "advantages", "returns", "rollout_logprobs", "loss_weight"),
}


class Conversion:
    """Converts tensors to a device and a dtype at their first use.

    device: if None, tensors stay in the mapped file.
    dtypes: by the name of a tensor (for example `loss_mask` or a declared column), or by kind: `tokens`, `masks` and
        `floats`. Other tensors keep the file's dtype, which is int32, uint8 and float32 for these kinds.
    """

    def __init__(
        self, device: torch.device | str | None = None, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> None:
        dtypes = dict(dtypes or {})
        self._device = device
        self._side = side_stream(device)
        self._used: set[str] = set()
        self._named = dtypes.keys() - _KINDS.keys()
        of_kinds = {name: dtypes[kind] for kind, names in _KINDS.items() if kind in dtypes for name in names}
        self._dtypes = of_kinds | {name: dtypes[name] for name in self._named}

    def check(self, declared: Iterable[str]) -> None:
        """Raise InvalidArgumentError if `dtypes` has an unknown name. declared: the tensors of the run's columns."""
        known = [*SHARD_TENSORS, *CP_TENSORS, *declared]
        if unknown := sorted(self._named.difference(known)):
            raise InvalidArgumentError(
                f"dtypes contains {unknown[0]!r}; expected one of the kinds {', '.join(_KINDS)}, or of the tensors "
                f"{', '.join(known)}"
            )

    def begin(self, tensors: Tensors) -> Copies:
        """Start copying the tensors with names that earlier shards used. Does nothing if the device is not a GPU."""
        if self._side is None:
            return {}
        used = self._used.copy()
        return {name: self._side.begin(raw) for name, raw in tensors.items() if name.rpartition("/")[2] in used}

    def __call__(self, name: str, tensor: torch.Tensor, copy: Copy | None = None) -> torch.Tensor:
        """Convert a tensor; return it unchanged if no conversion is needed. copy: its copy, if one was started."""
        if self._side is not None:
            self._used.add(name.rpartition("/")[2])
            tensor = (copy or self._side.begin(tensor)).awaited()
        return tensor.to(device=self._device, dtype=self._dtypes.get(name))
