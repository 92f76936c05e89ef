"""A launched step on a GPU, and the conversion of device errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....core.errors import EngineFailed
from ....core.request.request import TokenLogprobs
from ..batch import SampledToken, StepBatch
from ..extras import Extras
from ..runner_protocols import LaunchedStep


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A LaunchedStep of one device."""

    number: int
    batch: StepBatch
    token_ids: Tensor  # [rows] in pinned memory, valid once `is_done`
    logprobs: Tensor
    extras: Extras | None
    begun: torch.cuda.Event
    is_done: torch.cuda.Event

    @property
    def device_s(self) -> float | None:
        with device_errors():
            return float(self.begun.elapsed_time(self.is_done)) / 1e3

    def behind(self, first: LaunchedStep | None) -> GpuStep:
        """This step with the beginning of `first`, if that was launched before it."""
        return replace(self, begun=first.begun) if isinstance(first, GpuStep) else self

    def has_completed(self) -> bool:
        with device_errors():
            return bool(self.is_done.query())  # type: ignore[no-untyped-call]

    def collect(self) -> list[SampledToken | None]:
        with device_errors():
            self.is_done.synchronize()
        tokens = SampledToken.many(self.token_ids.tolist(), self.logprobs.tolist())
        if self.extras is not None:
            self.extras.add_to(tokens)
        return self.batch.results(tokens)

    def prompt_logprobs(self) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        return {} if self.extras is None else self.extras.prompt_logprobs()


class device_errors:
    """Converts torch's device errors to EngineFailed."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise EngineFailed(
                "the GPU is out of memory: lower --gpu-memory-utilization or "
                f"--max-num-batched-tokens ({error})"
            ) from error
        if isinstance(error, RuntimeError):
            raise EngineFailed(f"the step failed: {error}") from error
