"""Blocks left beside the estimated peak of an engine's sequences (scheduling/peak_blocks.py): they
are reported with its load, and limit what it lends to other engines. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from ..core.request.request import Request
from .kv.block_pool import BlockPool
from .kv.limits import EngineLimits
from .scheduling.admission import Admission
from .scheduling.peak_blocks import Footprint, peak_blocks
from .scheduling.queues import Queues
from .scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BlockRoom:
    """The room of one engine."""

    _limits: EngineLimits
    _admission: Admission
    _queues: Queues
    _pool: BlockPool

    def beside_all(self, pending: Iterable[Request]) -> int:
        """Blocks beside the estimated peak of all sequences and of `pending` requests."""
        return self.beside(chain(self._queues.owners(), self._queues.waiting), pending)

    def beside_running(self) -> int:
        """Blocks beside the estimated peak of all that have blocks and of the head of the queue."""
        return self.beside(self._queues.owners_and_head(), ())

    def beside(self, sequences: Iterable[Sequence], pending: Iterable[Request]) -> int:
        """Forks to come share their prompt's full blocks. Stops at what fills the pool."""
        limits, capacity, admission = self._limits, self._limits.capacity, self._admission
        footprints, num_new_blocks, num_refs = list[Footprint](), 0, 0
        for sequence in sequences:
            block_ids = sequence.block_ids
            footprints.append(admission.footprint(sequence, block_ids))
            if sequence.forks and not sequence.is_held:
                footprints += self._footprints_of_forks(sequence.request, len(sequence.forks))
            footprints += admission.footprints_of_group(sequence)
            num_refs += len(block_ids)
            num_new_blocks += 0 if block_ids else limits.blocks_for(sequence.num_slots)
            if num_new_blocks >= capacity:
                return 0
        for request in pending:
            num_tokens, num_outputs = request.num_known_tokens, len(request.output_token_ids)
            num_growth = admission.num_growth(request, num_outputs, num_tokens + 1)
            footprints.append(Footprint(num_tokens + 1, num_growth, []))
            if (num_forks := request.num_sequences - 1) > 0:
                footprints += self._footprints_of_forks(request, num_forks)
            num_new_blocks += limits.blocks_for(num_tokens)
            if num_new_blocks >= capacity:
                return 0
        room = capacity - peak_blocks(footprints, limits.block_size, is_bound=True)
        if room < capacity // 2 and num_refs > self._pool.counts.held:  # some are shared
            room = capacity - peak_blocks(footprints, limits.block_size)
        return max(0, room)

    def _footprints_of_forks(self, request: Request, num_forks: int) -> list[Footprint]:
        """The slots that forks to come do not share with their parent."""
        num_tokens, num_outputs = request.num_known_tokens, len(request.output_token_ids)
        num_growth = self._admission.num_growth(request, num_outputs, num_tokens + 1)
        num_own = num_tokens % self._limits.block_size + 1
        return [Footprint(num_own, num_growth, [])] * num_forks
