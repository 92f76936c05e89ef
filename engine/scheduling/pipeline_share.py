"""The share of the decodes and prompt tokens that one step of a pipeline has: other steps are on
the other stages meanwhile, and none should wait for a larger one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...core.step_shape import StepShape
from ..kv.limits import EngineLimits
from .costs.step_cost_estimator import StepCostEstimator
from .queues import Queues
from .schedule import Schedule, step_shape
from .sequence import Sequence


def decodes_of_step(running: Iterable[Sequence], num_stages: int) -> StepShape:
    """The shape of a step of all decodes alone; in a pipeline, of one step's share of them."""
    shape = step_shape([s for s in running if not s.is_prefilling])
    return share_of(shape.num_decodes, shape.keys, num_stages)


def share_of(num_decodes: int, keys: int, num_stages: int) -> StepShape:
    """The share of these decodes that one step has."""
    return StepShape(num_decodes=-(-num_decodes // num_stages), keys=keys // num_stages)


@dataclass(slots=True)
class PipelineShare:
    """The shares of one scheduler, whose engine has several stages."""

    _limits: EngineLimits
    _queues: Queues
    _step_costs: StepCostEstimator
    _last_tokens: int = 0  # of prompts, in the last step

    @property
    def num_decodes(self) -> int:
        """The most that a step has, so that all have as many."""
        num_decodes = sum(not s.is_prefilling for s in self._queues.running)
        return -(-num_decodes // self._limits.num_stages)

    def limit_prompts(self, schedule: Schedule) -> None:
        """Leave prompt tokens for the next steps: a stage without a step is idle. n equal steps
        pass S stages in n + S - 1 step times: once the cost is measured, the step size is the one
        that makes that shortest."""
        queues, limits = self._queues, self._limits
        num_tokens = sum(s.num_unlaunched_tokens for s in queues.running if s.is_prefilling)
        num_tokens += queues.waiting.total_tokens
        cost = self._step_costs.estimate()
        known = 0 if cost is None else 2 * cost.max_rows  # beyond that the estimate is a guess
        sizes = [limits.max_num_batched_tokens >> halvings for halvings in range(4)]
        step_s = {
            size: cost.seconds(StepShape(num_prompt_tokens=size))
            for size in sizes
            if cost is not None and 0 < size <= known
        }
        if not step_s:
            share = -(-num_tokens // limits.num_stages)
            schedule.limit_prompts(max(share, limits.small_step_tokens))
            return
        behind = limits.num_stages - 1
        size = min(step_s, key=lambda size: (-(-num_tokens // size) + behind) * step_s[size])
        # Behind a larger step a smaller one waits for the next stage as long as a large one.
        if any(s.has_prefill_in_flight for s in queues.running):
            size = max(size, self._last_tokens)
        schedule.limit_prompts(size)

    def observe(self, schedule: Schedule) -> None:
        """Record a planned step; an empty one is not launched."""
        if not schedule.is_empty:
            self._last_tokens = schedule.num_prompt_tokens

    def most_in_flight(self) -> int:
        """The most steps: one for each stage, and without decodes one more, which the first stage
        computes while the host receives the results of the last stage. Decodes would wait for it.
        """
        is_decoding = any(
            not (s.is_prefilling or s.is_held or self._has_its_last(s))
            for s in self._queues.running
        )
        return self._limits.num_stages + (not is_decoding)

    def _has_its_last(self, sequence: Sequence) -> bool:
        """Whether a step in flight computes its last token."""
        num_tokens = len(sequence.token_ids) + sequence.num_awaited_tokens
        return num_tokens >= min(sequence.most_tokens, self._limits.max_model_len)
