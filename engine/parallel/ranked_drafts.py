"""Drafts on several ranks: each has its part of the draft model, and all draw the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import EngineFailed
from ..execution.batch import SequenceSlice
from ..execution.runner_protocols import Drafter
from .parallel_runner import encode
from .rank_channel import MessageKind
from .rank_group import RankGroup


class RankedDrafter:
    """A Drafter of all ranks; `mine`: rank 0's."""

    def __init__(self, mine: Drafter, followers: RankGroup) -> None:
        self._mine, self._followers = mine, followers

    def draft(self, batch: Sequence[SequenceSlice]) -> list[list[int]]:
        """See Drafter."""
        self._followers.send(MessageKind.DRAFT, encode(batch))
        try:
            return self._mine.draft(batch)
        except EngineFailed as error:
            raise self._followers.explain(error) from error


def drafter_of(mine: Drafter, followers: RankGroup | None) -> Drafter:
    """The drafter of all ranks; `mine`: rank 0's, the only rank if `followers` is None."""
    return mine if followers is None else RankedDrafter(mine, followers)
