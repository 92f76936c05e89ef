"""A pull by all ranks of an engine: each reads its heads, on whichever of the source's ranks.

    connect     which heads lie where? ─► each rank opens its windows ─► one window of all
    start_pull  rank 0 orders it of the others, copies its own part ─► done when all have reported

Each rank judges its own copies by the source's one page of generations, and the worst outcome
counts. Knows no transport by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ...core.channels.engine_tls import WrapSocket
from ...core.errors import EngineFailed, HandoffFailed
from ...engine.parallel.rank_channel import MessageKind
from ...engine.parallel.rank_group import RankGroup
from ..export.pool_address import PoolPart, describe
from ..network.data_client import describe_remote
from ..window.head_ranges import HeadPiece, pieces_of
from ..window.network_address import RemotePool, Routes
from ..window.transport import BlockPairs, PoolWindow, PullHandle, PullOutcome, Transport, worst
from .joined import JoinedPull, JoinedWindow, SourcePiece, open_pieces
from .rank_pulls import Opened, pack_number, pack_pull


class RankedTransport:
    """Opens windows for all ranks of this engine; `parts` are their pools."""

    name = "ranks"

    def __init__(
        self,
        mine: Sequence[Transport],
        parts: Sequence[PoolPart],
        followers: RankGroup | None,
        routes: Routes,
        wrap: WrapSocket = lambda connection: connection,
    ) -> None:
        """`mine` are rank 0's ways, best first; without followers it is the only rank.

        `routes` know how sources are reached over a network.
        """
        self._routes = routes
        self._wrap = wrap
        self._mine = mine
        self._parts = parts
        self._followers = followers

    def connect(
        self, incarnation: str, piece: HeadPiece | None = None, remote: RemotePool | None = None
    ) -> PoolWindow:
        assert piece is None, "an engine pulls all of its heads"
        by_rank = self._plan(incarnation)
        mine = open_pieces(self._mine, by_rank[0])
        if self._followers is None:
            return mine
        try:
            number, answers = self._open_on_followers(self._followers, by_rank[1:])
        except (HandoffFailed, EngineFailed):
            mine.close()
            raise
        speed = mine.gbytes_per_s + sum(each.gbytes_per_s for each in answers)
        window = RankedWindow(mine, speed, self._followers, number)
        try:
            for rank, opened in enumerate(answers, start=1):
                opened.require(rank)
        except HandoffFailed:
            window.close()
            raise
        return window

    def _plan(self, incarnation: str) -> list[list[SourcePiece]]:
        """For each of our ranks, the pools of the source that it reads, and what of them."""
        num_heads = max(part.first_kv_head + part.num_kv_heads for part in self._parts)
        remote = self._routes.get(incarnation)
        if remote is None:
            raise HandoffFailed("the source has not sent how its pools are reached")
        if remote.port:
            described = describe_remote(incarnation, remote, self._wrap)
        elif remote.is_elsewhere:
            raise HandoffFailed("the source is on another host, and has no port")
        else:
            described = describe(incarnation, remote)
        theirs = described.parts or (PoolPart(incarnation, 0, num_heads),)

        def locate(piece: HeadPiece) -> SourcePiece:
            there = theirs[piece.source_rank]
            return SourcePiece(there.pool, piece, remote.at_port(there.port))

        return [
            [locate(piece) for piece in pieces_of(theirs, mine, rank)]
            for rank, mine in enumerate(self._parts)
        ]

    @staticmethod
    def _open_on_followers(
        followers: RankGroup, by_rank: Sequence[Sequence[SourcePiece]]
    ) -> tuple[int, list[Opened]]:
        payloads = [msgspec.msgpack.encode(pieces) for pieces in by_rank]
        number, answers = followers.order_and_wait(MessageKind.OPEN_WINDOW, payloads)
        return number, [msgspec.msgpack.decode(answer, type=Opened) for answer in answers]


class RankedWindow(JoinedWindow):
    """Rank 0's window and those of the other ranks, which know theirs by `number`.

    They have the same source, so that what rank 0 sees of it holds for them.
    """

    def __init__(
        self, mine: PoolWindow, gbytes_per_s: float, followers: RankGroup, number: int
    ) -> None:
        super().__init__([mine], gbytes_per_s)
        self._mine = mine
        self._followers = followers
        self._number = number

    def start_pull(self, pairs: BlockPairs, on_done: Callable[[PullOutcome], None]) -> PullHandle:
        pull = JoinedPull(2, on_done)

        def ended(answers: list[bytes]) -> None:
            pull.ended(worst([PullOutcome(answer.decode()) for answer in answers]))

        messages = [pack_pull(self._number, pairs)] * self._followers.num_ranks
        order = self._followers.order(MessageKind.PULL, messages, ended)
        pull.add(_Order(self._followers, order))
        pull.add(self._mine.start_pull(pairs, pull.ended))
        return pull

    def close(self) -> None:
        self._followers.send(MessageKind.CLOSE_WINDOW, pack_number(self._number))
        super().close()


@dataclass(frozen=True, slots=True)
class _Order:
    """A pull in flight on the other ranks."""

    followers: RankGroup
    number: int

    def cancel(self) -> None:
        self.followers.send(MessageKind.CANCEL_PULL, pack_number(self.number))
