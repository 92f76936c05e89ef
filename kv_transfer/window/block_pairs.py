"""The blocks of a pull, as columns: a long prompt has hundreds, which are looked at all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from ...engine.kv.block_pool import BlockRef

Ids: TypeAlias = npt.NDArray[np.int64]
Generations: TypeAlias = npt.NDArray[np.uint64]


class BlockPair(NamedTuple):
    """One block to copy: where it lies in the source's pool, and the block of ours it goes to."""

    source: BlockRef
    destination: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockPairs:
    """`ids` [2, n]: the blocks in the source's pool, and those of ours that they go to;
    `generations` [n], as the source announced them. What else a BlockRef has is left out."""

    ids: Ids
    generations: Generations

    @classmethod
    def join(cls, sources: Sequence[BlockRef], destinations: Sequence[int]) -> BlockPairs:
        """Of one pair at least; destinations may be more."""
        _, block_ids, generations, _ = zip(*sources, strict=True)
        ids = np.array([block_ids, destinations[: len(sources)]], np.int64)
        return cls(ids, np.array(generations, np.uint64))

    @classmethod
    def of(cls, *pairs: BlockPair) -> BlockPairs:
        """One at least."""
        sources, destinations = zip(*pairs, strict=True)
        return cls.join(sources, destinations)

    def __len__(self) -> int:
        return len(self.generations)

    @overload
    def __getitem__(self, index: int) -> BlockPair: ...
    @overload
    def __getitem__(self, index: slice) -> BlockPairs: ...
    def __getitem__(self, index: int | slice) -> BlockPair | BlockPairs:
        if isinstance(index, slice):
            ids = np.ascontiguousarray(self.ids[:, index])  # as an upload wants them
            return BlockPairs(ids, self.generations[index])
        source, destination = self.ids[:, index].tolist()
        return BlockPair(BlockRef(0, source, int(self.generations[index]), None), destination)

    def __iter__(self) -> Iterator[BlockPair]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BlockPairs)
            and np.array_equal(self.ids, other.ids)
            and np.array_equal(self.generations, other.generations)
        )


@dataclass(frozen=True, slots=True)
class Runs:
    """Blocks that lie side by side at both ends of a copy, as one piece: `lengths[i]` blocks from
    `sources[i]` on go to `destinations[i]` on.

    source       7  8  9  4  5           runs (7 -> 2, 3 blocks), (4 -> 5, 1), (5 -> 9, 1)
    destination  2  3  4  5  9
    """

    sources: Ids
    destinations: Ids
    lengths: Ids


def find_runs(ids: Ids) -> Runs:
    """The fewest pieces that the copy [2, pairs] consists of, in its order."""
    is_break = (np.diff(ids, axis=1) != 1).any(axis=0)
    starts = np.flatnonzero(np.concatenate(([True], is_break)))
    lengths = np.diff(np.append(starts, ids.shape[1]))
    return Runs(ids[0, starts], ids[1, starts], lengths)
