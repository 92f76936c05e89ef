"""The promised time of steps with decodes: it limits their prompt tokens, and rejects requests."""

from __future__ import annotations

from itertools import chain

from ...core.errors import PromiseRefused
from ...core.request.request import Request
from ...core.step_cost import LEAST_PROMPT_TOKENS, StepCost
from ...core.step_shape import StepShape
from ..kv.limits import EngineLimits
from .costs.step_cost_estimator import StepCostEstimator
from .pipeline_share import share_of
from .queues import Queues
from .schedule import Schedule, step_shape

# Times the promised time, for decodes that outlast the promise: they are few, and prompts wait.
OUTLASTING = 2.0
_LEAVING_S = 0.75  # of steps, in which it is still kept: most of the decodes are moved by then


class StepPromise:
    """`tbt_target_s`: the longest time of steps with decodes, if cutting prompts can keep it; None:
    prompts are computed as fast as possible. `is_promising`: whether new requests are promised it.
    If not, it is kept for earlier decodes for _LEAVING_S, and then OUTLASTING times as long."""

    def __init__(self, limits: EngineLimits, queues: Queues, step_costs: StepCostEstimator) -> None:
        self.tbt_target_s: float | None = None
        self.is_promising = True
        self.num_refusals = 0
        self.in_front_s = 0.0  # of the step on the device
        self.outlasting_s = 0.0  # of steps since the promise was withdrawn; 0: it was not
        self._limits = limits
        self._queues = queues
        self._step_costs = step_costs

    @property
    def target_s(self) -> float | None:
        """The longest time of a step with decodes. None: no target, or it was withdrawn and there
        are no decodes that it was promised to."""
        promised_s = self.promised_s
        is_kept = self.is_promising or self.outlasting_s < _LEAVING_S
        return promised_s if promised_s is None or is_kept else promised_s * OUTLASTING

    @property
    def promised_s(self) -> float | None:
        """The time that the decodes were promised: the engine's target, or the strictest of theirs,
        but at least half of the engine's, so that one request does not hold up all prompts. In a
        pipeline a decode waits for a step of each other stage."""
        if self.tbt_target_s is None:
            return None
        if not self.is_promising and all(s.is_held for s in self._queues.running):
            return None
        here = (s.request for s in self._queues.running if not s.is_held)
        targets_ms = (request.sampling.tbt_target_ms for request in here)
        strictest_s = min([self.tbt_target_s, *(ms / 1000 for ms in targets_ms if ms)])
        return max(strictest_s, self.tbt_target_s / 2) / self._limits.num_stages

    def observe(self, seconds: float) -> None:
        """Record a step's time while the promise is withdrawn, and of the first step after that."""
        self.outlasting_s = 0.0 if self.is_promising else self.outlasting_s + seconds

    def keep(self, schedule: Schedule) -> None:
        """Limit the prompt tokens beside the step's decodes to what can be computed in time."""
        prefills = [s for s in self._queues.running if s.is_prefilling]
        if prefills or self._queues.waiting:
            self.keep_behind(schedule, prefills[0].num_launched_tokens if prefills else 0)

    def keep_behind(self, schedule: Schedule, context: int) -> None:
        """The same for a prompt behind `context`: the more its tokens attend to, the longer each
        takes."""
        schedule.limit_prompts(self.room_behind(schedule, context))
        schedule.most_context = context

    def room_behind(self, schedule: Schedule, context: int) -> int:
        """How many tokens of a prompt behind `context` can be computed in time."""
        cost, target_s = self._step_costs.estimate(), self.target_s
        if cost is None or target_s is None:
            return LEAST_PROMPT_TOKENS
        most = max(schedule.num_budget_tokens, schedule.num_chunk_tokens)
        beside = step_shape(schedule.clear, schedule.others)
        return self._tokens_within(target_s, cost, beside, context, most)

    def _tokens_within(
        self, target_s: float, cost: StepCost, beside: StepShape, context: int, most: int
    ) -> int:
        """How many tokens of a prompt a step has that takes no longer than `target_s`: as many as
        fill a CUDA graph without padding. If no graph has room for LEAST_PROMPT_TOKENS in that
        time, or the largest is too small, as many as the estimate gives.

        A step that fits no graph takes the host long to launch: the one in front ends meanwhile,
        and its tokens wait.
        """
        overrun = self._step_costs.overruns.factor
        num_tokens = promised_tokens(cost, target_s / overrun(), beside, context, most)
        graph_rows, most = self._limits.graph_rows, min(most, 2 * cost.max_rows)
        if not graph_rows:
            return num_tokens
        least, in_graph = num_tokens_due(beside), self._limits.graph_prompt_tokens
        largest = min(graph_rows[-1] - beside.num_rows, in_graph - beside.num_prompt_tokens)
        if num_tokens >= largest:
            if self.in_front_s + self._step_costs.launch_s <= target_s:
                return num_tokens
            num_tokens = max(largest, min(num_tokens, least))
        for rows in reversed(graph_rows):
            filling = rows - beside.num_rows
            if least <= filling <= min(most, largest):
                seconds = cost.seconds(beside.with_prompt(filling, context))
                if seconds * overrun(rows) <= target_s:
                    return filling
                num_tokens = min(num_tokens, filling)
        return num_tokens

    def check(self, request: Request, num_coming: int = 0) -> None:
        """Raise PromiseRefused if steps of all decodes, with this request and `num_coming` others,
        would break the promise without any prompt tokens. Accepts if the request alone would, or
        if nothing is measured or promised."""
        cost, target_s = self._step_costs.estimate(), self.target_s
        if cost is None or target_s is None:
            return
        if own_ms := request.sampling.tbt_target_ms:
            own_s, least_s = own_ms / 1000, (self.tbt_target_s or 0.0) / 2
            num_stages = self._limits.num_stages
            target_s = max(min(target_s, own_s / num_stages), least_s / num_stages)
        shape = self.step_with(request, num_coming)
        alone = StepShape(num_decodes=1, keys=request.num_known_tokens)
        if cost.seconds(shape) > target_s >= cost.seconds(alone):
            self.num_refusals += 1
            raise PromiseRefused(
                f"a step of {shape.num_decodes} decodes takes longer than {target_s * 1e3:.1f} ms"
            )

    def step_with(self, request: Request, num_coming: int) -> StepShape:
        """A step of all sequences once their prompts are computed, with this request, its forks,
        and `num_coming` more like it that the engine does not have yet."""
        queues = self._queues
        every = chain(queues.parked, queues.waiting, queues.loading, queues.running)
        others = [s for s in every if not s.is_held]
        lengths = [s.num_tokens for s in others]
        for s in others:
            if s.group is None or not s.group.is_forked:
                lengths += [s.num_tokens] * s.num_to_come
        num_more = request.num_sequences + num_coming
        keys = sum(lengths) + num_more * request.num_known_tokens
        return share_of(len(lengths) + num_more, keys, self._limits.num_stages)


def promised_tokens(
    cost: StepCost, promise_s: float, beside: StepShape, context: int, most: int
) -> int:
    """How many tokens of a prompt, behind `context` computed ones, a step takes that keeps a
    promise to the decodes `beside`: at least what `num_tokens_due` is, and not many more than any
    measured step had."""
    most = min(most, max(LEAST_PROMPT_TOKENS, 2 * cost.max_rows))
    room = cost.prompt_tokens_within(promise_s, beside, context, most)
    return max(room, min(most, num_tokens_due(beside)))


def num_tokens_due(shape: StepShape) -> int:
    """Prompt tokens that the step lacks of the least that it has where prompts wait."""
    return max(0, LEAST_PROMPT_TOKENS - shape.num_prompt_tokens)
