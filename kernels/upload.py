"""Small host arrays to the device without waiting for it.

A copy from ordinary memory waits until the device has done all earlier work; one from pinned memory
does not. torch's pinned allocator gives a buffer out again only once its copy has been made.
What it has none of it takes from the system, for which it waits: see pinned_memory.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def pin(values: NDArray[Any], device: torch.device) -> Tensor:
    """`values` in host memory that `device` can read by itself; as they are for a CPU."""
    host = torch.from_numpy(values)
    return host.pin_memory() if device.type == "cuda" else host


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """`values` as a tensor on `device`, ordered before whatever is launched after this."""
    return pin(values, device).to(device, non_blocking=True)


def upload_numbers(values: Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """The same of a list: int64, or float32."""
    return upload(torch.tensor(values).numpy(), device)


def upload_into(target: Tensor, values: NDArray[Any]) -> None:
    """Overwrite the first len(values) elements, or rows, of a device tensor."""
    target[: len(values)].copy_(pin(values, target.device), non_blocking=True)
