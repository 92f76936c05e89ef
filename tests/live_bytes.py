"""The peak memory of tensors during a call."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Measures the peak bytes of tensors created within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._storages:
            return
        self._storages.add(address)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._storages.discard(address)
        self.now -= size
