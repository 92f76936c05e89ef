"""KV copies to host memory and back on all ranks of an engine: each rank has its own host memory,
and copies its heads of the same blocks to the same places.

    HOST_MEMORY   (empty)                            answer, once all is pinned: | blocks: uint64 |
    COPY_HOST     | direction: int64 | ids: int64 [n] | host blocks: int64 [n] |
                                                     answer, once copied: | seconds: float64 |

There are no host blocks before all ranks have them. A copy takes as long as on the slowest rank.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Sequence

import numpy as np

from ..kv.host_copies import CpuCopier, CudaCopier, Direction, HostCopier, HostCopy
from .rank_channel import MessageKind, RankChannel, RankMessage
from .rank_group import RankGroup, reporting

_NUM_BLOCKS = struct.Struct("<Q")
_SECONDS = struct.Struct("<d")
_LOOK_S = 0.0002  # interval of checks for ended copies


class RankedCopier:
    """Rank 0's HostCopier, which also sends each operation to the other ranks."""

    def __init__(self, mine: HostCopier, followers: RankGroup, block_bytes: int) -> None:
        """`block_bytes`: of one block on all ranks."""
        self.block_bytes = block_bytes
        self._mine = mine
        self._followers = followers
        self._theirs = 0  # written by the watch thread, once

    def begin(self) -> None:
        self._followers.order(MessageKind.HOST_MEMORY, b"", self._is_pinned)
        self._mine.begin()

    def _is_pinned(self, answers: list[bytes]) -> None:
        self._theirs = min(_NUM_BLOCKS.unpack(answer)[0] for answer in answers)

    @property
    def num_blocks(self) -> int:
        return min(self._theirs, self._mine.num_blocks)

    def start(
        self, direction: Direction, block_ids: Sequence[int], host_blocks: Sequence[int]
    ) -> _RankedCopy:
        copy = _RankedCopy()
        payload = np.array([direction, *block_ids, *host_blocks], np.int64).tobytes()
        self._followers.order(MessageKind.COPY_HOST, payload, copy.answered)
        copy.mine = self._mine.start(direction, block_ids, host_blocks)
        return copy


class _RankedCopy:
    """One copy on all ranks."""

    mine: HostCopy

    def __init__(self) -> None:
        self._theirs: float | None = None

    def answered(self, answers: list[bytes]) -> None:
        """Called on the watch thread once the copies of all other ranks have ended."""
        self._theirs = max(_SECONDS.unpack(answer)[0] for answer in answers)

    def seconds(self) -> float | None:
        mine = self.mine.seconds()
        return None if mine is None or self._theirs is None else max(mine, self._theirs)


class HostOrders:
    """Runs rank 0's copy orders on another rank; a thread sends the answers when copies end."""

    def __init__(self, copier: CpuCopier | CudaCopier, channel: RankChannel) -> None:
        self._copier = copier
        self._channel = channel
        self._started: queue.SimpleQueue[tuple[int, HostCopy]] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="host-copies", daemon=True).start()

    def pin(self, message: RankMessage) -> None:
        order = message.order
        self._copier.begin()

        def answer() -> None:
            self._copier.wait()
            self._channel.answer(order, _NUM_BLOCKS.pack(self._copier.num_blocks))

        threading.Thread(target=answer, name="await-pinning", daemon=True).start()

    def copy(self, message: RankMessage) -> None:
        direction, *ids = np.frombuffer(message.payload, np.int64).tolist()
        blocks, hosts = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        copy = self._copier.start(Direction(direction), blocks, hosts)
        self._started.put((message.order, copy))

    def _watch(self) -> None:
        with reporting(self._channel, "copies to host memory are not watched any more"):
            self._answer_ends()

    def _answer_ends(self) -> None:
        started: list[tuple[int, HostCopy]] = []
        while True:
            if not started:
                started.append(self._started.get())
            while not self._started.empty():
                started.append(self._started.get())
            for one in [*started]:
                order, copy = one
                if (seconds := copy.seconds()) is not None:
                    started.remove(one)
                    self._channel.answer(order, _SECONDS.pack(seconds))
            time.sleep(_LOOK_S)
