"""A fake runner with a fake draft model: each reads every token back from its own KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fakes.runner import FakeRunner, FakeStep

from baton.core.request.request import mix64
from baton.engine.execution.batch import SampledToken, SequenceSlice
from baton.engine.execution.drafting.draft_steps import DraftSteps
from baton.kernels.sampling.sample_spec import SampleSpec


class FakeDraftSteps(FakeRunner):
    """Drafts what the fake runner will output, at a share `rate` of positions: always the same
    ones.

    As with GPU steps any number may be in flight, and a token that follows another one is found by
    its row. KV of another sequence is an error.
    """

    def __init__(self, *args: int, rate: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rate = rate
        self._rows: list[SampledToken] = []
        self.num_late_rows = 0  # computed for drafts, in addition to sampled rows

    def launch(self, batch: Sequence[SequenceSlice]) -> FakeStep:
        if self.on_execute is not None:
            self.on_execute(batch)
        step = FakeStep(self, [s._replace(block_table=[*s.block_table]) for s in batch])
        self._in_flight.append(step)
        if not any(one.sample for one in batch):
            step.collect()  # no other code will
        return step

    def _with_token(self, one: SequenceSlice) -> SequenceSlice:
        if one.follows is None:
            return one
        return one._replace(token_ids=[self._rows[one.follows].token_id], follows=None)

    def _compute(self, batch: Sequence[SequenceSlice]) -> list[SampledToken | None]:
        found = super()._compute(batch)
        drawn = [one for one in found if one is not None]
        self._rows = [row for one in drawn for row in (*one.at_drafts, one)]
        self.num_late_rows += len(self._rows) - len(drawn)
        return found

    def _sampled(self, chain: int, spec: SampleSpec) -> SampledToken:
        token = super()._sampled(chain, spec)
        if mix64(chain ^ spec.key) < self._rate * 2**64:
            return token
        return token._replace(token_id=(token.token_id + 1) % self._vocab_size)


class DraftingRunner(FakeRunner):
    """A Runner and a Drafter."""

    def __init__(self, *args: int, rate: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kwargs.pop("on_completed", None)
        steps = FakeDraftSteps(*args, rate=rate, **kwargs)
        self.draft_steps = steps
        self._drafts = DraftSteps(steps, most_tokens=7)  # type: ignore[arg-type]
        self.draft = self._drafts.draft

    def launch(self, batch: Sequence[SequenceSlice]) -> FakeStep:
        self._drafts.compute_prompts(batch)
        return super().launch(batch)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        super().copy_blocks(pairs)
        self.draft_steps.copy_blocks(pairs)

    def read_block(self, block_id: int) -> bytes:
        return super().read_block(block_id) + self.draft_steps.read_block(block_id)

    def write_block(self, block_id: int, content: bytes) -> None:
        super().write_block(block_id, content[: self.block_bytes])
        self.draft_steps.write_block(block_id, content[self.block_bytes :])
