"""Copies to a GPU during its computation: from pinned memory, on a separate stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch


class Copy(NamedTuple):
    """A copy that was started. `tensor` is on the device, and has its values once `is_there` has happened."""

    tensor: torch.Tensor
    is_there: torch.cuda.Event

    def rows(self, begin: int, end: int) -> Copy:
        return Copy(self.tensor[begin:end], self.is_there)

    def awaited(self) -> torch.Tensor:
        """Return the tensor for use on the current stream, which waits for the copy; this thread does not."""
        current = torch.cuda.current_stream(self.tensor.device)
        current.wait_event(self.is_there)
        # The copying stream owns the memory, and must not reuse it while the current stream computes with it.
        self.tensor.record_stream(current)
        return self.tensor


Copies = Mapping[str, Copy]


class SideStream:
    """Copies to one device. `cuda` without a number is the current device of the first thread that copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def begin(self, tensor: torch.Tensor) -> Copy:
        """Start a copy of a tensor in host memory, which may be changed or freed at once."""
        if self._stream is None:
            if self._device.index is None:
                self._device = torch.device(self._device.type, torch.cuda.current_device())
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            copied = tensor.pin_memory().to(self._device, non_blocking=True)
            return Copy(copied, self._stream.record_event())


def side_stream(device: torch.device | str | None) -> SideStream | None:
    """Return a stream for copies to the device; None if it is no GPU."""
    if device is None or torch.device(device).type != "cuda" or not torch.cuda.is_available():
        return None
    return SideStream(torch.device(device))
