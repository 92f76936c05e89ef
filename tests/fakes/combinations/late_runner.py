"""A CPU runner with the order of a GPU: it runs ahead, and computes a step as late as possible, or
after it was polled a few times.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.request.request import TokenLogprobs
from baton.engine.execution.batch import SampledToken, SequenceSlice
from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.runner_protocols import LaunchedStep
from baton.engine.lora.adapter_files import HostAdapter
from baton.engine.lora.rank_adapters import RankAdapters
from baton.kernels.sampling.sample_spec import Counts


@dataclass(eq=False)
class LateStep:
    runner: LateRunner
    batch: Sequence[SequenceSlice]
    number = 0
    device_s = None
    done: LaunchedStep | None = None
    num_looks: int = 2  # polls before the step completes

    def has_completed(self) -> bool:
        self.num_looks -= 1
        if self.num_looks < 0:
            self.runner.compute(self)
        return self.done is not None

    def collect(self) -> list[SampledToken | None]:
        return self.runner.compute(self).collect()

    def prompt_logprobs(self) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        return self.runner.compute(self).prompt_logprobs()


@dataclass(eq=False)
class LateRunner:
    """A Runner and Drafter, and the Adapters of its engine: changes of blocks or adapters happen
    after the steps that were launched before. At most `most_in_flight` steps are in flight."""

    runner: ModelRunner
    most_in_flight: int = 2
    runs_ahead = True
    _waiting: deque[LateStep] = field(default_factory=deque)
    _last: Sequence[SampledToken | None] = ()

    def launch(self, batch: Sequence[SequenceSlice]) -> LateStep:
        assert len(self._waiting) < self.most_in_flight, "too many steps in flight"
        step = LateStep(self, [_as_now(one) for one in batch])
        self._waiting.append(step)
        return step

    def compute(self, until: LateStep) -> LaunchedStep:
        while until.done is None:
            self._compute_next()
        return until.done

    def _compute_next(self) -> None:
        step = self._waiting.popleft()
        step.done = self.runner.launch([self._with_token(one) for one in step.batch])
        self._last = step.done.collect()

    def _with_token(self, one: SequenceSlice) -> SequenceSlice:
        if one.follows is None:
            return one
        sampled = self._last[one.follows]
        assert sampled is not None
        return one._replace(token_ids=(sampled.token_id,), follows=None)

    def _compute_all(self) -> None:
        while self._waiting:
            self._compute_next()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._compute_all()
        self.runner.copy_blocks(pairs)

    def draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
        assert not self._waiting, "drafts behind tokens that are not known"
        return self.runner.draft(batch)

    @property
    def _adapters(self) -> RankAdapters:
        assert self.runner.adapters is not None
        return self.runner.adapters

    def load(self, slot: int, digest: str) -> None:
        self._compute_all()
        self._adapters.load(slot, digest)

    def keep(self, adapter: HostAdapter) -> None:
        self._adapters.keep(adapter)

    def forget(self, adapter: HostAdapter) -> None:
        self._adapters.forget(adapter)

    def drop(self, digest: str) -> None:
        self._adapters.drop(digest)


def _as_now(one: SequenceSlice) -> SequenceSlice:
    """Copies what may change while the step waits, as an upload to a device does."""
    one = one._replace(block_table=array("i", one.block_table))
    sample = one.sample
    if sample is not None and sample.counts is not None:
        counts = Counts(*(each.copy() for each in sample.counts))
        one = one._replace(sample=sample._replace(counts=counts))
    return one
