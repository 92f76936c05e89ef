"""Copies small host arrays to the device without waiting for it.

A copy from pageable memory waits until the device has finished all earlier work; one from pinned
memory does not. torch's pinned allocator reuses a buffer only after its copy has completed.
Allocating new pinned memory from the system waits for the device: see pinned_memory.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def pin(values: NDArray[Any], device: torch.device) -> Tensor:
    """`values` in pinned host memory for a GPU; unchanged for a CPU."""
    host = torch.from_numpy(values)
    return host.pin_memory() if device.type == "cuda" else host


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """`values` as a tensor on `device`, ordered before all later launches."""
    return pin(values, device).to(device, non_blocking=True)


def upload_numbers(values: Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """`upload` of a list, as int64 or float32."""
    return upload(torch.tensor(values).numpy(), device)


def upload_into(target: Tensor, values: NDArray[Any]) -> None:
    """Overwrite the first len(values) elements, or rows, of a device tensor."""
    target[: len(values)].copy_(pin(values, target.device), non_blocking=True)
