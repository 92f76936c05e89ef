"""Test steps before the first request, so that step times are known from the first heartbeat.

From the smallest to the largest: decodes, prompts, prompts after a context, and mixed steps. Each
runs once for what is compiled or loaded lazily, then as often as the estimate needs. A case that
would exceed the time left is not begun. No request owns the KV that is written. For GPUs: on a CPU
the larger steps alone would take longer, and requests are measured instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..core.request.sampling_params import SamplingParams
from ..core.step_shape import StepShape, pairs_of
from ..kernels.sampling.sample_spec import SampleSpec
from .engine_parts import EngineParts
from .execution.batch import SequenceSlice
from .kv.block_pool import NUM_RESERVED_BLOCKS
from .kv.limits import EngineLimits
from .scheduling.costs.step_cost_estimator import MIN_SAMPLES

BUDGET_S = 2.5  # in all
_SPEC = SampleSpec(SamplingParams(temperature=0.0), key=1)
_FIRST_TOKEN, _NUM_TOKENS = 3, 120  # different ones, as they choose a mixture's experts
_MOST_TOKENS = 2048  # of a prompt; larger steps take as long for each token


@dataclass(frozen=True, slots=True)
class _Case:
    """Decodes with a context each, and a chunk of a prompt after its own context."""

    num_decodes: int
    context: int
    num_tokens: int = 0
    prompt_context: int = 0

    @property
    def shape(self) -> StepShape:
        pairs = pairs_of(self.num_tokens, self.prompt_context)
        keys = self.num_decodes * self.context
        return StepShape(self.num_tokens, pairs, self.num_decodes, keys)

    @property
    def num_sequences(self) -> int:
        return self.num_decodes + bool(self.num_tokens)

    @property
    def longest(self) -> int:
        return max(self.context, self.num_tokens + self.prompt_context)


def _cases(limits: EngineLimits) -> Iterator[_Case]:
    """The cases within the engine's limits, by rows."""
    largest = min(limits.prompt_step_tokens, _MOST_TOKENS)
    found = [
        *(_Case(n, context) for n, context in ((4, 512), (8, 1024), (32, 512), (32, 2048))),
        *(_Case(n, 256) for n in (1, 64, 128, 256)),
        *(_Case(0, 0, n) for n in (16, 64, 128, 256, 512, 1024, 2048)),
        *(_Case(0, 0, n, 4096) for n in (128, 512)),
        *(_Case(16, 1024, n) for n in (64, 256, 512, 1024)),
        _Case(16, 1024, 256, 4096),
    ]
    for case in sorted(found, key=lambda case: case.shape.num_rows):
        num_blocks = max(1, case.num_decodes) * limits.blocks_for(case.longest + 1)
        is_small = case.num_sequences <= limits.max_num_seqs and case.num_tokens <= largest
        if is_small and case.longest < limits.max_model_len and num_blocks <= limits.capacity:
            yield case


def _batch(case: _Case, limits: EngineLimits) -> list[SequenceSlice]:
    """A step of the case. No block tables overlap: caches help as little as with requests."""
    size, capacity = limits.blocks_for(case.longest + 1), limits.capacity
    tables = [
        [NUM_RESERVED_BLOCKS + (row * size + column) % capacity for column in range(size)]
        for row in range(case.num_decodes + 1)
    ]
    batch = [
        SequenceSlice((_FIRST_TOKEN + row % _NUM_TOKENS,), case.context - 1, table, _SPEC)
        for row, table in enumerate(tables[:-1])
    ]
    if case.num_tokens:
        tokens = [_FIRST_TOKEN + i % _NUM_TOKENS for i in range(case.num_tokens)]
        table = tables[-1]
        batch.append(SequenceSlice(tokens, case.prompt_context, table, _SPEC, is_prompt=True))
    return batch


def measure_first_steps(parts: EngineParts, budget_s: float) -> float:
    """Run the cases that fit in `budget_s`, observed by the step costs; returns the seconds taken.
    No request may have blocks yet. Raises EngineFailed as the runner does."""
    clock, began_s = parts.clock, parts.clock.monotonic_s()
    last_s, last_rows = 0.0, 1
    for case in _cases(parts.limits):
        rows = case.shape.num_rows
        expected_s = last_s * max(1.0, rows / last_rows)
        if clock.monotonic_s() - began_s + (MIN_SAMPLES + 2) * expected_s > budget_s:
            break
        last_s = _measure(parts, _batch(case, parts.limits), case.shape)
        last_rows = rows
    return clock.monotonic_s() - began_s


def _measure(parts: EngineParts, batch: list[SequenceSlice], shape: StepShape) -> float:
    """The seconds of the last of a few steps; the first does not count. Each is launched before
    the previous one is collected, as by the engine if the runner runs ahead."""
    runner, costs, clock = parts.runner, parts.step_costs, parts.clock
    before = runner.launch(batch)
    ended_s = took_s = 0.0
    for number in range(MIN_SAMPLES + 1):
        began_s = clock.monotonic_s()
        behind = runner.launch(batch)
        costs.observe_launch(shape, clock.monotonic_s() - began_s)
        before.collect()
        device_s, now_s = before.device_s, clock.monotonic_s()
        if number:
            took_s = now_s - ended_s if device_s is None else device_s
            costs.observe(shape, took_s)
        before, ended_s = behind, now_s
    before.collect()
    return took_s
