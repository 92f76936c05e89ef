"""Who holds what of an engine's blocks: told for people and tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .kv.block_pool import BlockPool
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Sequence


def engine_ledger(
    pool: BlockPool, scheduler: Scheduler, sequences: Iterable[Sequence]
) -> dict[str, object]:
    """JSON-able."""
    return {
        "blocks": dataclasses.asdict(pool.counts) | {"total": pool.num_blocks},
        "requests": {
            sequence.key: {
                "state": sequence.state.value,
                "num_blocks": len(sequence.block_ids),
                "num_tokens": sequence.num_tokens,
                "num_computed_tokens": sequence.num_computed_tokens,
            }
            for sequence in sequences
        },
        "num_held_blocks": scheduler.queues.num_held_blocks,
        "num_fences": len(pool.open_fences),
        "num_preemptions": scheduler.preemption.num_preemptions,
    }
