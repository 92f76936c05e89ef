"""Stages of a pipeline between processes: gloo between CPUs, NCCL between GPUs.

    rank = stage * tensor_parallel_size + rank in the stage

    stage 0   rank 0   rank 1          tensor parallel: torch_communicator.py
                │        │
    stage 1   rank 2   rank 3          a process group for each column, made here

Every rank of a stage has the whole residual stream and sends it to the rank in the same column of
the next stage. Knows no model.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ...core.errors import StartupFailed
from ..model.stages import Stages

_MAX_TAG = 1 << 20


def set_up_nccl(device: torch.device) -> None:
    """Set up NCCL in this process, before its first group."""
    # On hosts whose GPUs are shared, a program that uses multicast can take all GPUs down.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Rank 0 detects hung ranks and ends the engine; torch's watchdog would end it without a reason.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    torch.cuda.set_device(device)


class GlooStages(Stages):
    """Stages on CPUs. A send returns at once; the tensor is kept until it has been sent."""

    def __init__(self, stage: int, num_stages: int, join: Callable[[], Any]) -> None:
        """`join` makes the group of this stage."""
        self.stage, self.num_stages, self._join = stage, num_stages, join
        self._group: Any = None
        self._num_received = self._num_sent = 0
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def connect(self) -> None:
        self._group = self._join()

    def receive(self, x: Tensor) -> None:
        self._group.recv([x], self.stage - 1, self._num_received % _MAX_TAG).wait()
        self._num_received += 1

    def send(self, x: Tensor) -> None:
        while len(self._sending) > self.num_stages:  # the number of steps that may be in flight
            work, _ = self._sending.popleft()
            work.wait()
        work = self._group.send([x], self.stage + 1, self._num_sent % _MAX_TAG)
        self._sending.append((work, x))
        self._num_sent += 1

    def least(self, value: int) -> int:
        values = torch.empty(self.num_stages, dtype=torch.int64)
        self._group._allgather_base(values, torch.tensor([value])).wait()
        return int(values.min())

    def broadcast(self, x: Tensor) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([x], options).wait()

    def close(self) -> None:
        self._sending.clear()
        self._group = None


class NcclStages(Stages):
    """Stages on GPUs of one host. Operations are launched on the current stream without waiting,
    and can be captured in CUDA graphs."""

    def __init__(
        self, store: c10d.Store, stage: int, num_stages: int, device: torch.device
    ) -> None:
        self.stage, self.num_stages = stage, num_stages
        self._store = store
        self._device = device
        self._group: Any = None

    def connect(self) -> None:
        set_up_nccl(self._device)
        options = c10d.ProcessGroupNCCL.Options()
        try:
            self._group = c10d.ProcessGroupNCCL(self._store, self.stage, self.num_stages, options)
            self.least(0)
            # Two neighbours connect with their first tensor: send it now, before any capture.
            word = torch.zeros(1, device=self._device)
            if self.stage > 0:
                self.receive(word)
            if self.stage + 1 < self.num_stages:
                self.send(word)
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise StartupFailed(f"NCCL does not connect the stages: {error}") from error

    def receive(self, x: Tensor) -> None:
        self._group.recv([x], self.stage - 1, 0).wait()  # only the stream waits

    def send(self, x: Tensor) -> None:
        self._group.send([x], self.stage + 1, 0).wait()

    def least(self, value: int) -> int:
        values = torch.empty(self.num_stages, dtype=torch.int64, device=self._device)
        options = c10d.AllgatherOptions()
        options.asyncOp = False
        mine = torch.tensor([value], device=self._device)
        self._group._allgather_base(values, mine, options)
        return int(values.min())

    def broadcast(self, x: Tensor) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
        self._group.broadcast([x], options)

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None
