"""One node's times on this gateway's clock: monotonic clocks alone are read, whatever hosts say of
the time of day.

    same host      the clock is one: a stamp is as long ago as it says
    another host   the newest stamp of a message is from when the message came, the others as much
                   older as the node says: what is between them is exact, the delivery counts as
                   waiting before them
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.ports import Clock
from ...core.request.timeline import NodeStamp, Stamp


class NodeClock:
    """`is_ours`: the node is on this host."""

    def __init__(self, node: str, clock: Clock, *, is_ours: bool = False) -> None:
        self._node = node
        self._clock = clock
        self._is_ours = is_ours

    def stamps(self, told: Sequence[NodeStamp]) -> tuple[Stamp, ...]:
        """Those of a message that comes now."""
        if not told:
            return ()
        now_ns, newest_ns = self._clock.unix_ns(), max(stamp.monotonic_ns for stamp in told)
        our_ns = int(self._clock.monotonic_s() * 1e9)
        read_ns = our_ns if self._is_ours and newest_ns <= our_ns else newest_ns
        return tuple(
            Stamp(stamp.event, now_ns - (read_ns - stamp.monotonic_ns), self._node)
            for stamp in told
        )
