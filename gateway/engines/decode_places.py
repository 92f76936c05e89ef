"""How many more requests one decode engine can take at once: sequences, and blocks for their KV.

    last heartbeat: requests of all gateways ─┬─ ours then ─ what others have there
                                              └─ + ours now: dispatched and not ended
Several gateways may take the same place between two heartbeats; the engine queues what is too much.
Blocks of what was sent since the heartbeat are taken off the room that it named: all that it is
expected to grow to, as the engine will judge it. Knows no request's tokens: only keys, how long
they stay, and the blocks they will need.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Key: TypeAlias = tuple[str, int]  # request id, attempt

_DECAY = 0.95  # of the mean stay, at each new one


class DecodePlaces:
    """One engine's. `max_num_seqs` 0: the engine did not say, and all have a place."""

    def __init__(self, max_num_seqs: int = 0) -> None:
        self.max_num_seqs = max_num_seqs
        self._open: dict[Key, float] = {}  # ours, with when they were sent
        self._num_others = 0
        self._room_blocks = 0  # beside all that the engine knew of at its last heartbeat
        self._mean_stay_s: float | None = None

    def heartbeat(self, num_requests: int, room_blocks: int) -> None:
        """What the engine says of all gateways' requests."""
        self._num_others = max(0, num_requests - len(self._open))
        self._room_blocks = room_blocks

    def sent(self, keys: Iterable[Key], num_blocks: int, now_s: float) -> None:
        """A dispatch of one or several sequences, which need so many blocks together."""
        for key in keys:
            self._open[key] = now_s
        self._room_blocks -= num_blocks

    def ended(self, key: Key, now_s: float) -> bool:
        """It finished, failed or was cancelled. False: it had ended already."""
        sent_s = self._open.pop(key, None)
        if sent_s is None:
            return False
        stay_s, mean_s = now_s - sent_s, self._mean_stay_s
        self._mean_stay_s = stay_s if mean_s is None else _DECAY * mean_s + (1 - _DECAY) * stay_s
        return True

    def has(self, key: Key) -> bool:
        """Whether it was sent and has not ended."""
        return key in self._open

    @property
    def num_requests(self) -> int:
        """Of all gateways, by our best estimate."""
        return self._num_others + len(self._open)

    @property
    def places_per_s(self) -> float | None:
        """How many of our places become free, by Little's law; None: none ever did."""
        return len(self._open) / self._mean_stay_s if self._mean_stay_s else None

    def has_place(self, num_sequences: int, num_blocks: int) -> bool:
        """An engine that has nothing takes whatever comes: no larger place can become free."""
        num_requests = self.num_requests
        if not num_requests or not self.max_num_seqs:
            return True
        has_seats = num_requests + num_sequences <= self.max_num_seqs
        return has_seats and num_blocks <= self._room_blocks
