"""Blocks of sequences in host memory, and on the disk behind it. They are copied there when a
sequence ends, when a second one uses them, and when one is preempted.

Knows sequences, as block_tables.py does for the pool; host_tier.py knows only blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

from ...core.request.token_ids import BlockHash
from ..kv.host_tier import BlockLoad, HostMatch, HostTier
from .sequence import Sequence

_MOST_UNDRAFTED = 1 << 20  # hashes; the oldest are dropped


class HostPrefixes:
    """The host prefixes of one engine."""

    def __init__(self, tier: HostTier, block_size: int) -> None:
        self._tier = tier
        self._block_size = block_size
        self.num_hit_tokens = 0  # in loaded blocks
        self._undrafted: dict[BlockHash, None] = {}  # copied without the draft model's KV

    def match(self, sequence: Sequence, num_tokens: int, num_matched: int) -> HostMatch | None:
        """The blocks of its first `num_tokens` tokens that follow `num_matched` cached blocks, if
        copying them takes less than computing them; None: no block."""
        if sequence.needs_prompt_logprobs:
            return None
        tier, size = self._tier, self._block_size
        coming = sequence.find(tier.match_coming, num_matched, num_tokens, size)
        num_before = num_matched + len(coming)
        in_host = sequence.find(tier.match, num_before, num_tokens, size)
        num_before += len(in_host)
        matched = HostMatch(coming, in_host, self._match_disk(sequence, num_before, num_tokens))
        if not matched.num_blocks or not tier.pays(matched, num_matched):
            return None
        return matched

    def _match_disk(self, sequence: Sequence, num_before: int, num_tokens: int) -> list[int]:
        """The slots on disk that follow `num_before` blocks, as many as may be read now."""
        if self._tier.disk is None or not (room := self._tier.disk.room):
            return []
        slots = sequence.find(self._tier.match_disk, num_before, num_tokens, self._block_size)[
            :room
        ]
        pays = slots and self._tier.pays(HostMatch([], [], slots), num_before)
        return slots if pays else []

    def load(self, sequence: Sequence, match: HostMatch) -> BlockLoad:
        """Begin to copy the blocks behind its cached ones to its own, which are allocated."""
        first = sequence.num_stored_blocks
        last = first + match.num_blocks
        hashes = sequence.block_hashes(last, self._block_size)
        own = sequence.block_ids[first + len(match.coming) : last]
        parent = hashes[first - 1] if first else None
        return self._tier.load(hashes[first:], match, own, parent)

    def write(self, sequence: Sequence) -> None:
        """Copy its blocks of the prefix cache: it ends, or they have a second use.

        They may displace others in host memory, so its own loads must have begun.
        """
        if sequence.num_stored_blocks:
            self._tier.write(*self._stored(sequence))

    def swap_out(self, sequence: Sequence) -> bool:
        """The same for a preempted sequence: all of its blocks, or none if they do not fit or
        recomputing them takes less."""
        return self._tier.swap_out(*self._stored(sequence))

    def _stored(self, sequence: Sequence) -> tuple[list[BlockHash], Row[int]]:
        n = sequence.num_stored_blocks
        hashes = sequence.block_hashes(n, self._block_size)
        for each in hashes[sequence.num_drafted_tokens // self._block_size :]:
            self._undrafted.pop(each, None)
            self._undrafted[each] = None
        while len(self._undrafted) > _MOST_UNDRAFTED:
            del self._undrafted[next(iter(self._undrafted))]
        return hashes, sequence.block_ids[:n]

    def loaded(self, sequence: Sequence, num_blocks: int) -> int | None:
        """`num_blocks` blocks behind its cached ones have been copied from host memory; returns the
        first of them that lacks the draft model's KV."""
        num_tokens, first = num_blocks * self._block_size, sequence.num_stored_blocks
        sequence.num_cached_tokens += num_tokens
        sequence.num_computed_tokens += num_tokens
        sequence.num_launched_tokens += num_tokens
        self.num_hit_tokens += num_tokens
        hashes = sequence.block_hashes(first + num_blocks, self._block_size)[first:]
        return next((n for n, each in enumerate(hashes, first) if each in self._undrafted), None)
