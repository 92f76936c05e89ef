"""Heartbeats from a thread of their own, so that a long step is not taken for a hang.

The engine loop leaves its latest numbers here and marks when a turn begins and ends; the thread
sends them at a steady beat, and at once if another number of prompt tokens waits, a step with some
of them has ended, or a link came or went: gateways route by that. A turn that takes longer than
`STALL_S` is a hang: the pulse stops, the gateways look elsewhere, and the supervisor replaces the
process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ...core.ports import Clock
from ...proto.v1 import node_pb2

STALL_S = 60.0

Beat = Callable[[node_pb2.Heartbeat], None]


class HeartbeatSender:
    """Written by the engine loop's thread, read by its own; each field is replaced whole."""

    def __init__(self, beat: Beat, interval_s: float, clock: Clock) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._clock = clock
        self._numbers = node_pb2.Heartbeat()
        self._turn_started_s: float | None = None
        self._is_stopped = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def turn_started(self) -> None:
        self._turn_started_s = self._clock.monotonic_s()

    def turn_ended(self) -> None:
        """The loop is about to wait or to begin anew."""
        self._turn_started_s = None

    def count(self, numbers: node_pb2.Heartbeat) -> None:
        """New numbers, which are never changed."""
        has_moved = _progress(numbers) != _progress(self._numbers)
        self._numbers = numbers
        if has_moved:
            self._woken.set()

    def is_stalled(self) -> bool:
        started_s = self._turn_started_s
        return started_s is not None and self._clock.monotonic_s() - started_s > STALL_S

    def stop(self) -> None:
        self._is_stopped = True
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._woken.wait(self._interval_s)
            self._woken.clear()
            if self._is_stopped:
                return
            if not self.is_stalled():
                try:
                    self._beat(self._numbers)
                except OSError:
                    return  # the supervisor is gone, and the loop is about to notice as well


def _progress(numbers: node_pb2.Heartbeat) -> tuple[int, int, list[str]]:
    """What gateways reckon with between two heartbeats."""
    waiting_tokens, links = numbers.waiting_tokens, [link.incarnation for link in numbers.links]
    return waiting_tokens, numbers.num_steps if waiting_tokens else 0, links
