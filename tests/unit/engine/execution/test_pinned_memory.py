"""Pinned memory is allocated before the first step."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch

from baton.kernels.pinned_memory import reserve_pinned_memory


def test_every_size_is_there_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least four buffers of each size are held at once: memory freed earlier might be reused by
    torch's allocator."""
    empty, held, most = torch.empty, Counter[int](), Counter[int]()

    def take(size: int, *, pin_memory: bool, **more: Any) -> torch.Tensor:
        assert pin_memory
        tensor = empty(size, **more)
        held[size] += 1
        most[size] = max(most[size], held[size])
        weakref.finalize(tensor, held.subtract, [size])
        return tensor

    monkeypatch.setattr(torch, "empty", take)
    reserve_pinned_memory()
    assert min(most) == 1 and max(most) == 4 << 20
    assert all(2 * size in most for size in most if size < max(most))
    assert all(most[size] >= 4 for size in most)
    assert not held.total()
