"""Several ranks as one `batch.Runner`: every step goes to the others, then to this rank.

    launch ──► step message to ranks 1, 2, ...          all launch the same step, in the same order
           └─► this rank's runner ──► collect           its results are those of all

All ranks sample the same token from the same bits, so a step that follows another one needs no
token from rank 0. That this rank's step has completed means that every rank has done its part of it
as far as KV goes: its last sum over the ranks lacked no rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import EngineFailed
from ...core.request.request import TokenLogprobs
from ..execution.batch import LaunchedStep, Runner, SampledToken, SequenceSlice
from .rank_channel import MessageKind
from .rank_group import RankGroup
from .step_message import encode


@dataclass(frozen=True, slots=True)
class _ParallelStep:
    """A step that all ranks have launched."""

    mine: LaunchedStep
    followers: RankGroup

    @property
    def number(self) -> int:
        return self.mine.number

    def has_completed(self) -> bool:
        try:
            return self.mine.has_completed()
        except EngineFailed as error:
            raise self.followers.explain(error) from error

    def collect(self) -> list[SampledToken | None]:
        try:
            return self.mine.collect()
        except EngineFailed as error:
            raise self.followers.explain(error) from error

    def prompt_logprobs(self) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        return self.mine.prompt_logprobs()


class ParallelRunner:
    """`mine` is rank 0's. A step that fails raises what was reported by the rank that caused it."""

    def __init__(self, mine: Runner, followers: RankGroup) -> None:
        self._mine = mine
        self._followers = followers

    @property
    def runs_ahead(self) -> bool:
        return self._mine.runs_ahead

    def launch(self, batch: Sequence[SequenceSlice]) -> LaunchedStep:
        self._followers.send(MessageKind.STEP, encode(batch))
        try:
            return _ParallelStep(self._mine.launch(batch), self._followers)
        except EngineFailed as error:
            raise self._followers.explain(error) from error

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """On the others it is done before whatever is sent to them next."""
        self._followers.send(MessageKind.COPY_BLOCKS, np.array(pairs, np.int64).T.tobytes())
        self._mine.copy_blocks(pairs)
