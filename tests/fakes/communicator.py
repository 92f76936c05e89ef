"""Ranks as threads of one process: a fake of `engine.model.communicator.Communicator`."""

from __future__ import annotations

import queue
import threading

import torch
from torch import Tensor

from baton.engine.model.communicator import Communicator
from baton.engine.model.stages import Stages


class ThreadGroup:
    """The shared state of the ranks of one engine."""

    def __init__(self, size: int, timeout_s: float = 20.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._given: list[Tensor | None] = [None] * size

    def ranks(self) -> list[ThreadCommunicator]:
        return [ThreadCommunicator(self, rank) for rank in range(self.size)]

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """The x of every rank. A missing rank breaks the barrier for all."""
        self._given[rank] = x.clone()
        self._meet()
        parts = [part for part in self._given if part is not None]
        assert len({part.shape for part in parts}) == 1, "ranks disagree about what they do"
        self._meet()
        return parts

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RuntimeError("a rank is missing") from error

    def abort(self) -> None:
        self._barrier.abort()


class ThreadCommunicator(Communicator):
    """The communicator of one rank."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank, self.size = rank, group.size
        self._group = group

    def connect(self) -> None:
        self._group.exchange(self.rank, torch.zeros(1))
        self.stages.connect()

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._group.exchange(self.rank, x)
        total = first.clone()
        for other in others:
            total += other
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._group.exchange(self.rank, x), dim=1)

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._group.exchange(self.rank, x)[0])

    def least(self, value: int) -> int:
        return min(int(part) for part in self._group.exchange(self.rank, torch.tensor(value)))


class ThreadStages(Stages):
    """A stage of a pipeline of threads; `links` as from `stage_links`."""

    def __init__(self, stage: int, links: list[queue.SimpleQueue[Tensor]]) -> None:
        self.stage, self.num_stages = stage, len(links) + 1
        self._links = links

    def receive(self, x: Tensor) -> None:
        x.copy_(self._links[self.stage - 1].get(timeout=20))

    def send(self, x: Tensor) -> None:
        self._links[self.stage].put(x.clone())


def stage_links(num_stages: int) -> list[queue.SimpleQueue[Tensor]]:
    """The queues between neighbouring stages."""
    return [queue.SimpleQueue() for _ in range(num_stages - 1)]
