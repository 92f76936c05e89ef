"""Copies by one call of a simulated CUDA runtime."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from baton.engine.kv import cuda_memory
from baton.engine.kv.cuda_memory import batch_copy

STREAM = cast(torch.cuda.Stream, SimpleNamespace(cuda_stream=7))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """Targets, sources and lengths of each call."""
    found: list[list[list[int]]] = []

    def copy(*arguments: Any) -> int:
        pointers, n = arguments[:3], arguments[3].value
        found.append([list((ctypes.c_uint64 * n).from_address(one.value)) for one in pointers])
        return 0

    played = SimpleNamespace(cudaMemcpyBatchAsync=copy)
    monkeypatch.setattr(cuda_memory, "runtime", lambda: played)
    return found


def prepared(first: int) -> Any:
    columns = (np.arange(first + i, first + i + 3) for i in (0, 10, 20))
    return batch_copy(*columns, STREAM)


def test_the_pieces_are_still_there_when_they_are_copied(calls: list[list[list[int]]]) -> None:
    copies = [prepared(first) for first in (100, 200)]
    gc.collect()
    assert [copy() for copy in copies] == [0, 0]
    assert calls == [
        [[110, 111, 112], [100, 101, 102], [120, 121, 122]],
        [[210, 211, 212], [200, 201, 202], [220, 221, 222]],
    ]


def test_nothing_is_left_for_the_collector(calls: list[list[list[int]]]) -> None:
    """A copy leaves no reference cycles: a long prompt has hundreds of copies, and collecting
    thousands of cycles would pause the engine."""
    prepared(0)()
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            prepared(0)()
        assert gc.collect() < 20
    finally:
        gc.enable()
