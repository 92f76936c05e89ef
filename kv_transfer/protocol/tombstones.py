"""Transfers that are over, remembered for a while so that nothing that arrives late revives one."""

from __future__ import annotations

from ...core.errors import BatonError

TOMBSTONE_S = 30.0
_MAX_TOMBSTONES = 65_536  # a peer that invents ids must not fill our memory


class Tombstones:
    """transfer_id -> why it is over. All live equally long, so the oldest expires first."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[float, BatonError]] = {}

    def add(self, transfer_id: str, error: BatonError, now_s: float) -> None:
        """Bury a transfer. The first burial counts."""
        self.purge(now_s)
        self._entries.setdefault(transfer_id, (now_s + TOMBSTONE_S, error))
        if len(self._entries) > _MAX_TOMBSTONES:
            del self._entries[next(iter(self._entries))]

    def get(self, transfer_id: str) -> BatonError | None:
        entry = self._entries.get(transfer_id)
        return None if entry is None else entry[1]

    def purge(self, now_s: float) -> None:
        """Forget what is older than `TOMBSTONE_S`."""
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest][0] > now_s:
                return
            del self._entries[oldest]

    def __len__(self) -> int:
        return len(self._entries)
