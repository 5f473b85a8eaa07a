"""Copies tensors to a GPU while it computes: from pinned memory, on a separate stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch


class Copy(NamedTuple):
    """A started copy. `tensor` is on the device, and its values are valid after the event `is_there`."""

    tensor: torch.Tensor
    is_there: torch.cuda.Event

    def rows(self, begin: int, end: int) -> Copy:
        return Copy(self.tensor[begin:end], self.is_there)

    def awaited(self) -> torch.Tensor:
        """Return the tensor for use on the current stream, which waits for the copy. Does not block this thread."""
        current = torch.cuda.current_stream(self.tensor.device)
        current.wait_event(self.is_there)
        # The copying stream owns the memory, and must not reuse it while the current stream uses it.
        self.tensor.record_stream(current)
        return self.tensor


Copies = Mapping[str, Copy]


class SideStream:
    """Copies tensors to one device. `cuda` without an index is the current device of the first thread that copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def begin(self, tensor: torch.Tensor) -> Copy:
        """Start a copy of a tensor in host memory. The caller may change or free the tensor immediately."""
        if self._stream is None:
            if self._device.index is None:
                self._device = torch.device(self._device.type, torch.cuda.current_device())
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            copied = tensor.pin_memory().to(self._device, non_blocking=True)
            return Copy(copied, self._stream.record_event())


def side_stream(device: torch.device | str | None) -> SideStream | None:
    """Return a stream for copies to the device; None if the device is not a GPU."""
    if device is None or torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    return SideStream(torch.device(device))
