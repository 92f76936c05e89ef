"""Steps of a runner alone."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.execution.batch import Runner, SampledToken, SequenceSlice


def execute(runner: Runner, batch: Sequence[SequenceSlice]) -> list[SampledToken | None]:
    """Run one and wait for it."""
    return runner.launch(batch).collect()
