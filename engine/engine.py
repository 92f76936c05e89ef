"""One engine: requests in (live_sequences.py), tokens out, one step at a time.

    step()  =  schedule -> launch on the runner -> collect -> advance its sequences, measure

    runner that runs ahead (a GPU):    step n     schedule n | launch n | collect n-1, advance
                                       device     | n-1 ................. | n ................
The host schedules step n without knowing the tokens of n-1: it assumes that each sequence
continues, and the device fills in the token. What n computes for a sequence that ended with n-1 is
discarded. Where drafts pay (speculation/) the host waits instead, and launches n once it has the
tokens of n-1. A pipeline has one step in flight for each stage, each with other sequences: a part
of the decodes, or the next chunks of prompts; with prompts alone there is one more.

Owns no tensor and communicates with no other process. Everything runs on the caller's thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import TypeAlias

from .engine_parts import EngineParts
from .engine_stats import EngineStats
from .first_steps import measure_first_steps
from .grammar_masks import find_masks
from .input_batch import InputBatch
from .live_sequences import LiveSequences
from .scheduling.outputs import ChunkOutput, PromptLogprobs, StepOutput
from .scheduling.schedule import Schedule, step_shape
from .scheduling.sequence import Sequence, SequenceState
from .step_in_flight import StepInFlight

Meanwhile: TypeAlias = Callable[[], bool]

# The next step is launched this share of the current step's estimated time before its end. A late
# launch after decodes delays all streams, and most steps have decodes.
_EARLY, _EARLY_BEHIND_DECODES, _LEAST_EARLY_S = 0.05, 0.25, 0.0015


class Engine(LiveSequences):
    """`pool`: transports open fences on the blocks that they fill; `prefixes`: shared with other
    engines; `promise`: the longest time of a step with decodes; `stats`: load and counts.
    """

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self.pool = parts.pool
        self.prefixes = parts.prefixes
        self.promise = parts.scheduler.promise
        self.stats = EngineStats(parts, self.by_key)
        self._clock = parts.clock
        self._step_costs = parts.step_costs
        self._host = parts.host
        self._speculator = parts.speculator
        self._input_batch = InputBatch(self.limits.block_size, self._eos_token_ids)
        self._ended_s = 0.0  # when the last collected step had ended on the device
        self._collected_s = 0.0  # when it was collected
        self._launching_s: dict[bool, float] = {}  # of the last step with prompts, and without
        self._in_flight: deque[StepInFlight] = deque()  # steps complete in this order

    def measure_first_steps(self, budget_s: float) -> float:
        """See first_steps.py; call before the first request. Returns the seconds that it took."""
        assert not self.by_key, "their blocks would be overwritten"
        return measure_first_steps(self._parts, budget_s)

    @property
    def has_work(self) -> bool:
        """Whether a step could do anything; False also while all requests wait for memory."""
        if self._in_flight or (self._host is not None and self._host.has_work):
            return True
        queues = self._scheduler.queues
        is_stalled = queues.stalled_at == queues.opportunities
        return bool(queues.running or queues.waiting) and not is_stalled

    def step(self, meanwhile: Meanwhile | None = None) -> StepOutput:
        """Launch one step and collect one: the same, or the previous one if the runner runs ahead;
        in a pipeline launch as many as have room, and collect the oldest.

        `meanwhile` is called repeatedly while the step to be collected is on the device. It waits a
        moment for events and returns whether there were any; it may call this engine as between two
        steps. If the duration of the step on the device is known, the next one is launched only
        shortly before its end, so that requests that arrive meanwhile can be in it. If there was
        nothing to launch then, a request that arrives is launched at once.

        The output is empty if there is nothing to do. EngineFailed of the runner is passed on; the
        engine cannot be used after it.
        """
        output, steps = StepOutput(), self._in_flight
        queues, pipeline = self._scheduler.queues, self._scheduler.pipeline
        if steps and pipeline is None:
            if (step := self._launch_behind(steps.popleft(), output, meanwhile)) is not None:
                steps.append(step)
            return output
        self._fill(output)
        if not steps:  # nothing to compute until a request, or a copy from host memory, arrives
            queues.stalled_at = queues.opportunities
            if meanwhile is not None and self._host is not None and self._host.has_work:
                meanwhile()
        elif pipeline is not None or not self._runner.runs_ahead:
            while meanwhile is not None and not steps[0].launched.has_completed():
                if meanwhile() | self.poll_host():
                    self._fill(output)
            self._collect(steps.popleft(), output)
        return output

    def _launch_behind(
        self, previous: StepInFlight, output: StepOutput, meanwhile: Meanwhile | None
    ) -> StepInFlight | None:
        """Launch the next step, which is returned, and collect the previous one: in this order
        unless the next step needs its tokens, or it has completed before the next one was due."""
        due_s = -math.inf if meanwhile is None else self._launch_due_s(previous)
        # Drafts, verified by the previous step or due, need its tokens.
        must_wait = previous.has_drafts or (
            self._speculator is not None and self._speculator.is_due(self._scheduler.queues)
        )
        if must_wait:
            due_s = math.inf
        step, has_tried = None, self._clock.monotonic_s() >= due_s
        if has_tried:
            step = self._launch(previous, output)
        while meanwhile is not None and not previous.launched.has_completed():
            has_arrivals = meanwhile() | self.poll_host()
            if has_arrivals and not must_wait:
                due_s = min(due_s, self._launch_due_s(previous))  # prompts take longer to launch
            is_due = step is None and self._clock.monotonic_s() >= due_s
            if is_due and (has_arrivals or not has_tried):
                has_tried = True
                step = self._launch(previous, output)
        self._collect(previous, output, step)
        if not has_tried:
            step = self._launch(None, output, is_waited_for=must_wait)
        return step

    def _fill(self, output: StepOutput) -> None:
        """Launch the first step; in a pipeline as many as have room, or until one has completed:
        that is collected first, so that its sequences are in the next step."""
        steps, pipeline = self._in_flight, self._scheduler.pipeline
        while len(steps) < (1 if pipeline is None else pipeline.most_in_flight()):
            has_completed = bool(steps) and steps[0].launched.has_completed()
            if has_completed or (step := self._launch(None, output)) is None:
                return
            steps.append(step)

    def _launch_due_s(self, previous: StepInFlight) -> float:
        """When to launch the step after `previous`: late, so that prompts that arrive meanwhile are
        in it, but early enough for the launch itself and an error of the estimate."""
        lasts_s = self._step_costs.expected_s(previous.shape)
        if lasts_s is None:
            return -math.inf
        early_s = _EARLY * lasts_s
        if previous.shape.num_decodes:
            early_s = max(_EARLY_BEHIND_DECODES * lasts_s, _LEAST_EARLY_S)
        began_s = max(previous.launched_s, self._ended_s)
        has_prompts = self._scheduler.queues.has_prompts_to_launch
        launching_s = self._launching_s.get(has_prompts, previous.launching_s)
        return began_s + lasts_s - early_s - launching_s

    def _launch(
        self, previous: StepInFlight | None, output: StepOutput, *, is_waited_for: bool = False
    ) -> StepInFlight | None:
        """Schedule and launch the step after `previous`; None if there is nothing to do.

        `is_waited_for`: it was delayed until the previous step was collected, to have drafts.
        """
        began_s = self._clock.monotonic_s()
        schedule = self._plan(previous, output)
        if schedule is None:
            return None
        clear, others, sequences = schedule.clear, schedule.others, schedule.sequences
        fresh = self._mark_started(sequences, output)
        shape = step_shape(clear, others)
        places = {} if previous is None else previous.fence.places
        batch = self._input_batch.launch(schedule, places)
        fence = self._tables.open_step(dict(zip(sequences, count())))
        launched_s = self._clock.monotonic_s()
        launched = self._runner.launch(batch)
        took_s = self._clock.monotonic_s() - launched_s
        self._step_costs.observe_launch(shape, took_s)
        has_drafts = False
        if self._speculator is not None:
            has_drafts = self._speculator.settle(shape)
            if is_waited_for:  # the device was idle meanwhile
                launched_s += took_s
                self._speculator.waited(launched_s - self._ended_s)
        promise, promise_s = self._scheduler.promise, None
        if promise.tbt_target_s is not None and shape.num_decodes:
            promise_s = promise.promised_s
        launching_s = self._clock.monotonic_s() - began_s
        self._launching_s[shape.num_prompt_tokens > 0] = launching_s
        step = StepInFlight(
            *(clear, others, fence, launched, shape, launched_s, launching_s, promise_s),
            has_drafts=has_drafts,
            num_in_flight=1 + len(self._in_flight),
            previous_ended=previous is not None and previous.launched.has_completed(),
        )
        for sequence, num_tokens in others:
            if num_tokens > 1:
                self._tables.prepare_store(sequence)
        for sequence in fresh:
            self._tables.store(sequence)  # pulled blocks: earlier would delay its first step
        if number := launched.number:
            for held in (one for one, _ in others if one.is_held):
                is_last, num_tokens = not held.is_prefilling, held.num_launched_tokens
                output.chunks.append(ChunkOutput(held.key, num_tokens, is_last, step=number))
        return step

    def _plan(self, previous: StepInFlight | None, output: StepOutput) -> Schedule | None:
        """What the step after `previous` computes, None if nothing. Sequences that cannot continue
        fail."""
        while True:
            self.poll_host()
            if self.beams.by_key:
                self.beams.advance(output)
            if previous is None and self._speculator is not None:
                make_room = self._scheduler.preemption.make_room_for_drafts
                self._speculator.draft(self._scheduler.queues, make_room)
            in_front_s = None if previous is None else self._step_costs.expected_s(previous.shape)
            self._scheduler.promise.in_front_s = in_front_s or 0.0
            schedule = self._scheduler.schedule()
            if schedule.is_empty and not schedule.failed:
                return None
            sampled = [*schedule.clear, *(one.sequence for one in schedule.others if one.samples)]
            constrained = [one for one in sampled if one.constrained is not None]
            if constrained and self._parts.constraints is not None:
                find_masks(self._parts.constraints, constrained, schedule)
            for sequence, error in schedule.failed:
                self._fail(sequence, error, output)
            if schedule.failed:
                schedule.drop_preempted()
            if not schedule.is_empty:
                return schedule
            # All have failed: there may be room for sequences that waited for theirs.

    def _mark_started(self, sequences: list[Sequence], output: StepOutput) -> list[Sequence]:
        """Report the sequences that are in a step for the first time, and return them."""
        fresh = [sequence for sequence in sequences if not sequence.has_started]
        for sequence in fresh:
            sequence.has_started = True
            keys = (sequence.key,) if sequence.group is None else sequence.group.keys
            output.started |= dict.fromkeys(keys, sequence.num_cached_tokens)
        return fresh

    def poll_host(self) -> bool:
        """Process completed copies to and from host memory; returns whether a prompt can run."""
        if self._host is None or not self._host.poll():
            return False
        self._scheduler.preemption.finish_loads()
        self._scheduler.queues.stalled_at = None
        return True

    def _collect(
        self, step: StepInFlight, output: StepOutput, behind: StepInFlight | None = None
    ) -> None:
        """Wait for a step and output its tokens. `behind`: the step that was launched while `step`
        was on the device."""
        results = step.launched.collect()
        prompts = step.launched.prompt_logprobs()
        self._tables.close_step(step.fence)
        self._measure(step, behind)
        live = step.fence.places  # without sequences that ended or were preempted in flight
        n = len(step.clear)
        for index, logprobs in prompts.items():
            if (sequence := step.others[index - n].sequence) in live and logprobs:
                first = sequence.next_prompt_logprob
                output.prompt_logprobs.append(PromptLogprobs(sequence.key, first, logprobs))
                sequence.next_prompt_logprob += len(logprobs)
        self._advance_clear(step.clear, results[:n], live, output)
        for (sequence, num_tokens), sampled in zip(step.others, results[n:], strict=True):
            if sequence not in live or sequence.state is SequenceState.ENDED:  # with its search
                continue
            if not sequence.draft_token_ids or sampled is None or self._speculator is None:
                self._advance(sequence, num_tokens, sampled, output)
                continue
            self._totals.num_decode_tokens -= num_tokens  # only those that are output count
            for token in self._speculator.accepted_tokens(sequence, sampled):
                self._advance(sequence, 1, token, output)
                self._totals.num_decode_tokens += 1
        if self.beams.by_key and self.beams.advance(output):
            self._scheduler.queues.stalled_at = None

    def _measure(self, step: StepInFlight, behind: StepInFlight | None) -> None:
        """Record how long a step took: as its device measured it, or else from its launch, or the
        end of the previous step, to its end. In a pipeline the time of one stage counts: with fewer
        steps in flight than stages, that is less than the time between two ends.

        If the step ended during the launch of the next one, which may take longer than the step,
        the time of its end is not observed and follows from the device's measurement.
        """
        now_s, began_s = self._clock.monotonic_s(), max(step.launched_s, self._ended_s)
        waited_s = now_s - max(step.launched_s, self._collected_s)
        device_s, is_hidden = step.launched.device_s, behind is not None and behind.previous_ended
        took_s = now_s - began_s if device_s is None else device_s
        self._collected_s = now_s
        self._ended_s = min(now_s, began_s + took_s) if is_hidden else now_s
        share = min(step.num_in_flight, self.limits.num_stages) / self.limits.num_stages
        totals, shape, step_s = self._totals, step.shape, waited_s * share
        totals.num_prompt_tokens += shape.num_prompt_tokens
        totals.num_decode_tokens += shape.num_decodes
        if shape.num_decodes:
            self.stats.decode_steps_s.append(step_s)
        if step.promise_s is not None:
            totals.num_promised_steps += 1
            totals.num_kept_steps += step_s <= step.promise_s
        promise = self._scheduler.promise
        if promise.outlasting_s or not promise.is_promising:
            promise.observe(waited_s)
        self._step_costs.observe(shape, took_s * share, step_s)
        if self._speculator is not None and shape.num_decodes:
            self._speculator.passed(shape, took_s * share, has_drafts=step.has_drafts)
