"""What one pull copies: pairs of a block in the source's pool and a local one, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...engine.kv.block_pool import BlockRefs

Ids: TypeAlias = npt.NDArray[np.int64]
Generations: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class BlockPairs:
    """`ids` [2, n]: the source's blocks, and the local blocks that they are copied to;
    `generations` [n]: of the source's blocks, as it announced them."""

    ids: Ids
    generations: Generations

    @classmethod
    def join(cls, sources: BlockRefs, destinations: Sequence[int]) -> BlockPairs:
        """Block i of the source goes to `destinations[i]`."""
        ids = np.empty((2, len(sources)), np.int64)
        ids[0], ids[1] = sources.block_ids, destinations
        return cls(ids, sources.generations.copy())

    def __len__(self) -> int:
        return len(self.generations)

    def __getitem__(self, part: slice) -> BlockPairs:
        ids = np.ascontiguousarray(self.ids[:, part])  # an upload needs it so
        return BlockPairs(ids, self.generations[part])
