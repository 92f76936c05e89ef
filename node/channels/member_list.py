"""Which engines the directory lists now, as the supervisor reports them: may this peer connect?"""

from __future__ import annotations

import threading

from ...proto.v1 import engine_pb2
from .engine_channels import Link

_WAIT_S = 1.0  # an engine may dial a moment before its entry arrives here


class MemberList:
    """Any thread may ask."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._incarnations: frozenset[str] = frozenset()
        self._is_away = False

    def list_members(self, members: engine_pb2.Members) -> None:
        with self._changed:
            self._incarnations = frozenset(engine.incarnation for engine in members.engines)
            self._is_away = members.is_away
            self._changed.notify_all()

    def link_over(self, link: Link) -> None:
        """Says nothing of the list."""

    def has(self, incarnation: str) -> bool:
        """Whether the engine is listed, or is within a second.

        While the directory is away nobody can be: then whoever proves the cluster's
        key is believed.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: incarnation in self._incarnations or self._is_away, _WAIT_S
            )
