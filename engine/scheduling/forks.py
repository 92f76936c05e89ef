"""Sequences that share the computed prefix of another: further samples of a prompt, and beams.

parent   [ b0 | b1 | b2 # ]     full blocks: one more reference
child    [ b0 | b1 | b7 # ]     the partial one: a copy, since both write to theirs
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass

from ...core.request.request import Request
from ..kv.block_pool import BlockPool
from ..kv.limits import EngineLimits
from .admission import distinct_blocks
from .block_tables import BlockTables
from .preemption import Preemption
from .queues import Queues
from .sequence import Sequence, SequenceGroup, SequenceState


def child_of(parent: Sequence, request: Request, token_id: int) -> Sequence:
    """A new sequence for `request` that continues all of the parent's known tokens by another."""
    child = Sequence(request, parent.arrival, False, parent.root_hash)
    child.token_ids = parent.token_ids[:]
    child.token_ids.append(token_id)
    child.has_started = parent.has_started
    child.next_prompt_logprob = len(request.prompt_token_ids)
    return child


@dataclass(frozen=True, slots=True)
class Forks:
    """The forks of one scheduler."""

    _limits: EngineLimits
    _pool: BlockPool
    _tables: BlockTables
    _queues: Queues
    _preemption: Preemption

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[int, int]]:
        """Let the child, a new sequence, decode after the parent's known tokens, all computed.

        Its own first token is already in `token_ids`. Returns blocks (source, target) to copy
        before anything else. If there is no room, it waits like a preempted sequence, and finds the
        full blocks in the prefix cache; one of a group is parked.
        """
        child.num_computed_tokens = child.num_prefill_tokens = child.num_tokens - 1
        child.num_launched_tokens = child.num_computed_tokens
        child.drafted = parent.drafted
        child.state = SequenceState.RUNNING
        has_slot = child.group is not None or self._queues.has_slot()  # a group has its slots
        copies = self._share_blocks(parent, child) if has_slot else None
        if copies is None:
            child.num_computed_tokens = child.num_launched_tokens = 0
            child.state = SequenceState.PARKED
            if child.group is None:
                self._preemption.wait_again(child)
            return []
        self._queues.run(child)
        return copies

    def _share_blocks(self, parent: Sequence, child: Sequence) -> list[tuple[int, int]] | None:
        """Give the child the blocks of its computed tokens and room for the next token: returns
        (source, target) of the block to copy, or None if the pool has too few left."""
        num_shared, num_partial = divmod(child.num_computed_tokens, self._limits.block_size)
        if not self._tables.share(child, parent.block_ids[:num_shared]):
            return None
        child.num_stored_blocks = min(parent.num_stored_blocks, num_shared)
        child.hashes = parent.hashes[: child.num_stored_blocks]
        self._tables.store(child)
        if not num_partial:
            return []
        return [(parent.block_ids[num_shared], child.block_ids[num_shared])]

    def rejoin(self, parked: Sequence, leader: Sequence) -> bool:
        """Run a parked member of a group: it computes its tokens behind the blocks that are cached
        or shared with the leader, whose tokens are all computed. False if there is no room."""
        matched = self._tables.match(parked, parked.num_tokens - 1)
        common = self._common(leader, parked)
        if not self._tables.allocate(parked, max(matched, common, key=len)):
            return False
        parked.num_prefill_tokens = parked.num_tokens
        self._queues.run(parked)
        return True

    def _common(self, leader: Sequence, other: Sequence) -> Row[int]:
        """The leader's computed blocks that hold a prefix of the other's tokens but the last."""
        size, num_same = self._limits.block_size, 0
        most = min(leader.num_computed_tokens, other.num_tokens - 1) // size * size
        mine, theirs = leader.token_ids, other.token_ids
        while num_same < most:
            end = num_same + size
            if mine[num_same:end] != theirs[num_same:end]:
                break
            num_same = end
        return leader.block_ids[: num_same // size]

    def has_all(self, group: SequenceGroup) -> bool:
        """Whether nothing else has blocks, so that none will be freed for the group."""
        num_blocks = len(distinct_blocks(group.members))
        return self._pool.num_available + num_blocks == self._limits.capacity
