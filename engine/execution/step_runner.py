"""Runs the steps of one rank: what the engine launches, what is drafted for it, blocks copied.

    launch ─► a draft model's KV of prompts ─► CpuSteps or GpuSteps ─► LaunchedStep

Made by runner.py, which loads the model. Knows no configuration.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.errors import EngineFailed
from ...kernels.kv.kv_blocks import copy_blocks
from .batch import LaunchedStep, SequenceSlice, StepBatch
from .step_builder import BuiltSteps


class StepRunner:
    """A `batch.Runner`, and a `batch.Drafter` where a draft model or a head was built."""

    def __init__(self, built: BuiltSteps, device: torch.device) -> None:
        self.kv, self._steps, self._draft_steps = built
        self._head_steps = self._steps.head
        self._device = device

    @property
    def runs_ahead(self) -> bool:
        """See `batch.Runner`."""
        return self._steps.runs_ahead

    def launch(self, batch: Sequence[SequenceSlice]) -> LaunchedStep:
        """See `batch.Runner`."""
        try:
            with torch.inference_mode():
                batch = StepBatch.of(batch)
                if self._draft_steps is None:
                    return self._steps.launch(batch)
                first = self._draft_steps.compute_prompts(batch.others)
                step = self._steps.launch(batch)
                return step if first is None else step.behind(first)
        except RuntimeError as error:  # torch's: out of memory, device lost
            raise EngineFailed(f"the step failed: {error}") from error

    def draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
        """See `batch.Drafter`; `--speculative-config` asks for a draft model or a head."""
        drafter = self._draft_steps or self._head_steps
        assert drafter is not None
        return drafter.draft(batch)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `batch.Runner`; no target may repeat.

        Waits for the device: no fence keeps the sources from being handed out while they are read.
        """
        device = self._device
        sources, targets = zip(*pairs, strict=True) if pairs else ((), ())
        copy_blocks(
            self.kv.tensor,
            torch.tensor(sources, dtype=torch.int64, device=device),
            torch.tensor(targets, dtype=torch.int64, device=device),
        )
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
