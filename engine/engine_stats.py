"""An engine's load and counters, for heartbeats, people and tests. Changes nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..core.request.request import Request
from ..core.step_cost import StepCost
from ..core.step_shape import pairs_of
from .engine_parts import EngineParts
from .kv.disk.disk_tier import DiskCounts
from .kv.host_copies import HostCounts
from .scheduling.admission import distinct_blocks
from .scheduling.outputs import EngineLoad, SpeculationCounts, Totals
from .scheduling.pipeline_share import decodes_of_step
from .scheduling.sequence import Sequence

_NUM_STEPS = 512  # for the percentile


class EngineStats:
    """The load and counters of one engine."""

    def __init__(self, parts: EngineParts, sequences: Mapping[str, Sequence]) -> None:
        self.count_experts: Callable[[], tuple[int, ...]] = tuple  # see Totals.expert_tokens
        self.num_expert_ranks = 1  # ranks with an equal share of whole experts
        self.decode_steps_s: deque[float] = deque(maxlen=_NUM_STEPS)  # times of the last ones
        self._parts, self._sequences = parts, sequences
        self._pool, self._scheduler = parts.pool, parts.scheduler

    @property
    def has_prompts(self) -> bool:
        """Whether tokens of prompts wait, for an adapter too, or are being computed."""
        queues = self._scheduler.queues
        return bool(queues.parked or queues.waiting) or queues.has_prefills

    def load(self, pending: Iterable[Request] = ()) -> EngineLoad:
        """`pending`: requests that are announced, but not queued yet."""
        queues = self._scheduler.queues
        held_blocks = self._num_held_blocks
        waiting, waiting_pairs = Counter[int](), 0
        for sequence, num_tokens, context in self._prompts_left():
            waiting[sequence.request.caller_id] += num_tokens
            waiting_pairs += pairs_of(num_tokens, context)
        return EngineLoad(
            num_running=len(queues.running),
            num_waiting=len(queues.waiting) + len(queues.loading) + len(queues.parked),
            waiting_tokens=waiting.total(),
            waiting_pairs=waiting_pairs,
            free_blocks=self._pool.num_available,
            credit_blocks=max(0, self._parts.limits.held_blocks_limit - held_blocks),
            held_blocks=held_blocks,
            room_blocks=self._parts.room.beside_all(pending),
            output_tokens=self._parts.output_lengths.expected,
            mean_output_tokens=round(self._parts.output_lengths.mean),
            waiting_by_caller=waiting,
            decodes=decodes_of_step(queues.running, self._parts.limits.num_stages),
        )

    def _prompts_left(self) -> Iterator[tuple[Sequence, int, int]]:
        """Sequences whose prompts are not computed: how many tokens are left, those of steps in
        flight included, and how many come before them.

        Tokens of waiting prompts that the prefix cache held at their arrival are not counted.
        """
        queues = self._scheduler.queues
        for sequence in queues.waiting:
            num_tokens = queues.waiting.num_tokens(sequence)
            yield sequence, num_tokens, sequence.num_tokens - num_tokens
        for sequence in queues.running:
            num_tokens = sequence.num_prefill_tokens - sequence.num_computed_tokens
            if num_tokens > 0:
                yield sequence, num_tokens, sequence.num_computed_tokens
        for sequence, load in queues.loading.items():
            context = sequence.num_computed_tokens + load.num_blocks * self._parts.limits.block_size
            yield sequence, sequence.num_tokens - context, context
        for sequence in queues.parked:
            yield sequence, sequence.num_tokens, 0

    @property
    def _num_held_blocks(self) -> int:
        """Blocks that are, or will be, held for pullers: shared ones count once."""
        return len(distinct_blocks(self._scheduler.queues.holders()))

    def totals(self) -> Totals:
        """Counts since the engine was made."""
        parts, preemption = self._parts, self._scheduler.preemption
        tables, host, speculator = parts.tables, parts.host, parts.speculator
        num_loaded = tables.host.num_hit_tokens if tables.host else 0
        return dataclasses.replace(
            parts.totals,
            num_preemptions=preemption.num_preemptions,
            prefix_query_tokens=tables.num_queried_tokens,
            prefix_hit_tokens=tables.num_hit_tokens + num_loaded,
            num_refusals=self._scheduler.promise.num_refusals,
            expert_tokens=self.count_experts(),
            num_swaps=preemption.num_swaps,
            host_hit_tokens=num_loaded,
            host=HostCounts() if host is None else host.counts,
            disk=host.disk.counts if host and host.disk else DiskCounts(),
            speculation=speculator.counts if speculator else SpeculationCounts(),
        )

    @property
    def decode_step_p99_s(self) -> float | None:
        """99th percentile of the last steps with decodes, nearest rank; None if there were none."""
        ordered = sorted(self.decode_steps_s)
        return ordered[(99 * len(ordered) - 1) // 100] if ordered else None

    def step_cost(self) -> StepCost | None:
        """The estimate from the steps so far; None if they were too few."""
        return self._parts.step_costs.estimate()

    @property
    def step_cost_error(self) -> float | None:
        """90th percentile of its relative error over the last steps; None if they were too few."""
        return self._parts.step_costs.relative_error

    def ledger(self) -> dict[str, object]:
        """Who holds what, JSON-able."""
        return {
            "blocks": dataclasses.asdict(self._pool.counts) | {"total": self._pool.num_blocks},
            "requests": {
                key: {
                    "state": sequence.state.value,
                    "num_blocks": len(sequence.block_ids),
                    "num_tokens": sequence.num_tokens,
                    "num_computed_tokens": sequence.num_computed_tokens,
                }
                for key, sequence in self._sequences.items()
            },
            "num_held_blocks": self._num_held_blocks,
            "num_fences": len(self._pool.open_fences),
            "num_preemptions": self._scheduler.preemption.num_preemptions,
        }
