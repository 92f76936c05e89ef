"""An engine's load and counters, for heartbeats, people and tests. Changes nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..core.request.request import Request
from ..core.step_cost import StepCost, pairs_of
from .engine_parts import EngineParts
from .kv.disk.disk_tier import DiskCounts
from .kv.host_copies import HostCounts
from .scheduling.outputs import Load, SpeculationCounts, Totals
from .scheduling.sequence import Sequence


class EngineStats:
    """The load and counters of one engine."""

    def __init__(self, parts: EngineParts, sequences: Mapping[str, Sequence]) -> None:
        self.count_experts: Callable[[], tuple[int, ...]] = tuple  # see Totals.expert_tokens
        self.num_expert_ranks = 1  # ranks with an equal share of whole experts
        self._limits = parts.limits
        self._pool = parts.pool
        self._room = parts.room
        self._scheduler = parts.scheduler
        self._tables = parts.tables
        self._sequences = sequences
        self._output_lengths = parts.output_lengths
        self._step_record = parts.step_record
        self._step_costs = parts.step_costs
        self._host = parts.host
        self._speculator = parts.speculator

    @property
    def has_prompts(self) -> bool:
        """Whether tokens of prompts wait, for an adapter too, or are being computed."""
        queues = self._scheduler.queues
        return bool(queues.parked or queues.waiting) or queues.has_prefills

    def load(self, pending: Iterable[Request] = ()) -> Load:
        """`pending`: requests that are announced, but not queued yet."""
        queues = self._scheduler.queues
        held_blocks = queues.num_held_blocks
        waiting, waiting_pairs = Counter[int](), 0
        for sequence, num_tokens, context in self._prompts_left():
            waiting[sequence.request.caller_id] += num_tokens
            waiting_pairs += pairs_of(num_tokens, context)
        return Load(
            num_running=len(queues.running),
            num_waiting=len(queues.waiting) + len(queues.loading) + len(queues.parked),
            waiting_tokens=waiting.total(),
            waiting_pairs=waiting_pairs,
            free_blocks=self._pool.num_available,
            credit_blocks=max(0, self._limits.held_blocks_limit - held_blocks),
            held_blocks=held_blocks,
            room_blocks=self._room.beside_all(pending),
            output_tokens=self._output_lengths.expected,
            mean_output_tokens=round(self._output_lengths.mean),
            waiting_by_caller=waiting,
            decodes=queues.decodes(),
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
            context = sequence.num_computed_tokens + load.num_blocks * self._limits.block_size
            yield sequence, sequence.num_tokens - context, context
        for sequence in queues.parked:
            yield sequence, sequence.num_tokens, 0

    def totals(self) -> Totals:
        """Counts since the engine was made."""
        preemption, record, host = self._scheduler.preemption, self._step_record, self._host
        return Totals(
            num_preemptions=preemption.num_preemptions,
            prefix_query_tokens=self._tables.num_queried_tokens,
            prefix_hit_tokens=self._tables.num_hit_tokens,
            num_prompts=record.num_prompts,
            num_prompt_tokens=record.num_prompt_tokens,
            num_decode_tokens=record.num_decode_tokens,
            num_promised_steps=record.num_promised_steps,
            num_kept_steps=record.num_kept_steps,
            num_refusals=self._scheduler.promise.num_refusals,
            expert_tokens=self.count_experts(),
            num_swaps=preemption.num_swaps,
            host_hit_tokens=self._tables.num_host_hit_tokens,
            host=HostCounts() if host is None else host.counts,
            disk=host.disk.counts if host and host.disk else DiskCounts(),
            speculation=self._speculator.counts if self._speculator else SpeculationCounts(),
        )

    @property
    def decode_step_p99_s(self) -> float | None:
        """99th percentile of the last steps with decodes; None if there were none."""
        return self._step_record.p99_s

    def step_cost(self) -> StepCost | None:
        """The estimate from the steps so far; None if they were too few."""
        return self._step_costs.estimate()

    @property
    def step_cost_error(self) -> float | None:
        """90th percentile of its relative error over the last steps; None if they were too few."""
        return self._step_costs.relative_error

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
            "num_held_blocks": self._scheduler.queues.num_held_blocks,
            "num_fences": len(self._pool.open_fences),
            "num_preemptions": self._scheduler.preemption.num_preemptions,
        }
