"""How many tokens have chosen each expert, copied to the host without waiting for the device.

The device counts in every step; the counts are not read on a step's critical path. The values read
here are at most one second and one copy old.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from .experts import ExpertLoads

EVERY_S = 1.0


class ExpertLoadReader:
    """Reads the counts of one rank, since all ranks have the same routing."""

    def __init__(
        self, loads: ExpertLoads, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._loads = loads
        self._monotonic_s = monotonic_s
        self._latest = (0,) * loads.tokens.shape[1]
        self._started_s: float | None = None
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None  # in flight
        self._stream: torch.cuda.Stream | None = None

    def read(self) -> tuple[int, ...]:
        """Tokens by expert, summed over layers, since the start or `forget`; never waits."""
        now_s = self._monotonic_s()
        if self._copy is not None:
            host, is_done = self._copy
            if is_done.query():  # type: ignore[no-untyped-call]
                self._latest, self._copy = _summed(host), None
        elif self._started_s is None or now_s - self._started_s >= EVERY_S:
            self._started_s = now_s
            if self._loads.tokens.is_cuda:
                self._copy = self._begin_copy()
            else:
                self._latest = _summed(self._loads.tokens)
        return self._latest

    def forget(self) -> None:
        """Reset the counts to 0; waits for the device."""
        self._loads.tokens.zero_()
        if self._loads.tokens.is_cuda:
            torch.cuda.synchronize(self._loads.tokens.device)
        self._latest = (0,) * len(self._latest)
        self._copy = self._started_s = None

    def _begin_copy(self) -> tuple[Tensor, torch.cuda.Event]:
        """Copy on a stream of its own; the counts of concurrent steps may be included or not."""
        tokens = self._loads.tokens
        if self._stream is None:
            self._stream = torch.cuda.Stream(tokens.device)  # type: ignore[no-untyped-call]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            host.copy_(tokens, non_blocking=True)
            is_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            is_done.record()
        return host, is_done


def _summed(tokens: Tensor) -> tuple[int, ...]:
    return tuple(tokens.sum(dim=0).tolist())
