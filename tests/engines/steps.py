"""Runs steps of a runner without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.execution.batch import SampledToken, SequenceSlice
from baton.engine.execution.runner_protocols import Runner


def execute(runner: Runner, batch: Sequence[SequenceSlice]) -> list[SampledToken | None]:
    """Run one step and wait for its results."""
    return runner.launch(batch).collect()


def leading_decodes(query_lens: Sequence[int]) -> int:
    """The number of one-token slices at the beginning."""
    return next((i for i, length in enumerate(query_lens) if length > 1), len(query_lens))
