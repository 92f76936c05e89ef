"""How many hand-offs came, with how many bytes and in what time, and why others failed.

Counts since the engine's incarnation began. A hand-off's time begins when its memory is reserved.
"""

from __future__ import annotations

from collections import Counter

from ..core.errors import BatonError, Cancelled
from ..core.ports import Clock
from ..proto.v1 import node_pb2


class TransferCounts:
    """Told by the role; every transfer that began is completed, failed or dropped."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s: dict[str, float] = {}
        self._num_completed = 0
        self._num_bytes = 0
        self._spent_s = 0.0
        self._failed: Counter[str] = Counter()

    def began(self, transfer_id: str) -> None:
        self._began_s[transfer_id] = self._clock.monotonic_s()

    def completed(self, transfer_id: str, num_bytes: int) -> None:
        self._spent_s += self._clock.monotonic_s() - self._began_s.pop(transfer_id)
        self._num_completed += 1
        self._num_bytes += num_bytes

    def failed(self, transfer_id: str, error: BatonError) -> None:
        """Before or after it began. One that was called off, by whomever, did not fail."""
        self._began_s.pop(transfer_id, None)
        if not isinstance(error, Cancelled):
            self._failed[error.code] += 1

    def dropped(self, transfer_id: str) -> None:
        """Its memory is given back; that it failed, if it did, was told before."""
        self._began_s.pop(transfer_id, None)

    def to_wire(self) -> node_pb2.Counters:
        return node_pb2.Counters(
            num_transfers=self._num_completed,
            transfer_bytes=self._num_bytes,
            transfer_s=self._spent_s,
            failed_transfers=dict(self._failed),
        )
