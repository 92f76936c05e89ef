"""What one pull copies: which blocks of a source's pool go to which of ours, as columns."""

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
    """`ids` [2, n]: the blocks in the source's pool, and those of ours that they go to;
    `generations` [n], as the source announced them."""

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
        ids = np.ascontiguousarray(self.ids[:, part])  # as an upload wants them
        return BlockPairs(ids, self.generations[part])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BlockPairs)
            and np.array_equal(self.ids, other.ids)
            and np.array_equal(self.generations, other.generations)
        )
