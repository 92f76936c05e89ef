"""What an engine's cache has gained and lost, on its way to the supervisor's prefix index.

Changes of a turn of the loop travel in one message, and add up while the supervisor does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...core.request.token_ids import BlockHash, Tier
from ...prefix_index.messages import NetChanges
from ...proto.v1 import engine_pb2

Send = Callable[[engine_pb2.EngineOutput], None]  # to the supervisor


class CacheReport:
    """An `engine.kv.prefix_cache.CacheObserver`. Belongs to the engine loop's thread."""

    def __init__(self, send: Send, has_room: Callable[[], bool] = lambda: True) -> None:
        """`has_room`: whether the supervisor reads. Once it has said no, each flush asks it until
        it says yes."""
        self._send, self._has_room = send, has_room
        self._changes = NetChanges()
        self._waits_for_room = False

    def moved(self, block_hashes: Collection[BlockHash], was: Tier, now: Tier) -> None:
        """The engine has these blocks elsewhere now, or no longer."""
        self._changes.moved(block_hashes, was, now)

    def flush(self) -> None:
        """Send what has changed."""
        if self._changes or self._waits_for_room:
            self._waits_for_room = not self._has_room()
        if self._changes and not self._waits_for_room:
            removed, in_host, stored = map(b"".join, self._changes.take())
            changes = engine_pb2.CacheChanges(removed=removed, stored=stored, in_host=in_host)
            self._send(engine_pb2.EngineOutput(cache_changes=changes))
