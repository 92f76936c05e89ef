"""Generations of an engine on several hosts: rank 0 draws them and sends them to the others, in
order with their steps.

    rank 0     bump ─► its own page ─► GENERATIONS to all ranks ─► ... ─► the step that overwrites
    rank n     ... steps before ... ─► its copy of the page ─► the step that overwrites

So a rank's copy of the page is never behind its own blocks: what a puller reads there before and
after a copy is as valid as on rank 0's host, where all ranks share the page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...engine.kv.generations import Generations, SharedGenerations
from ...engine.parallel.rank_channel import MessageKind
from ...engine.parallel.rank_group import RankGroup


class MirroredGenerations(Generations):
    """`Generations` whose page is mirrored to ranks on other hosts."""

    def __init__(self, page: SharedGenerations, followers: RankGroup) -> None:
        self._page, self._followers = page, followers

    def bump(self, block_ids: Sequence[int]) -> None:
        """Raises EngineFailed if a rank is lost."""
        self._page.bump(block_ids)
        ids = np.array(block_ids, np.int64)
        drawn = np.array([self._page.read(block_id) for block_id in block_ids], np.uint64)
        self._followers.send(MessageKind.GENERATIONS, ids.tobytes() + drawn.tobytes())

    def read(self, block_id: int) -> int:
        return self._page.read(block_id)


def generations_of(page: SharedGenerations, followers: RankGroup | None) -> Generations:
    """The generations of the engine with this rank 0; mirrored if it has ranks on other hosts."""
    is_spread = followers is not None and any(followers.hosts)
    return MirroredGenerations(page, followers) if followers and is_spread else page


def unpack_generations(
    packed: memoryview,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Returns block ids and their generations."""
    half = len(packed) // 2
    return np.frombuffer(packed[:half], np.int64), np.frombuffer(packed[half:], np.uint64)
