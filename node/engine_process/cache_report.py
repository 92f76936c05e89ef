"""Sends the changes of an engine's prefix cache to the supervisor, for the prefix index.

The changes of a turn are sent in one message; while the supervisor does not read they accumulate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...core.request.token_ids import BlockHash, Tier
from ...prefix_index.messages import NetChanges
from ...proto.v1 import engine_pb2

Send = Callable[[engine_pb2.EngineOutput], None]  # to the supervisor


class CacheReport:
    """An `engine.kv.prefix_cache.CacheObserver`. Used by the engine loop's thread only."""

    def __init__(self, send: Send, has_room: Callable[[], bool] = lambda: True) -> None:
        """`has_room`: whether the supervisor reads. After it returned False, each flush calls it
        until it returns True."""
        self._send, self._has_room = send, has_room
        self._changes = NetChanges()
        self._waits_for_room = False

    def moved(self, block_hashes: Collection[BlockHash], was: Tier, now: Tier) -> None:
        """These blocks have moved to another tier, or out of the cache."""
        self._changes.moved(block_hashes, was, now)

    def flush(self) -> None:
        """Send what has changed."""
        if self._changes or self._waits_for_room:
            self._waits_for_room = not self._has_room()
        if self._changes and not self._waits_for_room:
            removed, in_host, stored = map(b"".join, self._changes.take())
            changes = engine_pb2.CacheChanges(removed=removed, stored=stored, in_host=in_host)
            self._send(engine_pb2.EngineOutput(cache_changes=changes))
