"""What both sides of the hand-off have in common: their events, their transfers, and the tombstones
of transfers that are over. For their peers see pairing.py.

`source.Source` and `puller.Puller` are the two sides; they decide what happens to one transfer.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

from ...core.errors import BatonError, HandoffFailed, NodeLost
from ...core.ports import Clock
from .events import PeerEvent, PeerLinked, PeerLost, PeerMessage, Send, Tick
from .messages import Hello, Message
from .pairing import OwnEffect, PairedSide, PairState

TOMBSTONE_S = 30.0
_MAX_TOMBSTONES = 65_536  # a peer that invents ids must not fill our memory


class Transfer(Protocol):
    """One transfer as one side keeps it. `expires_s`: when a `Tick` ends it; inf: never."""

    expires_s: float

    def expiry(self, now_s: float) -> BatonError:
        """Why it ends at `expires_s`."""


T = TypeVar("T", bound=Transfer)
OwnEvent = TypeVar("OwnEvent")


class HandoffSide(PairedSide[OwnEffect], Generic[T, OwnEvent, OwnEffect]):
    """All transfers of one engine on one side, by id; one thread calls it."""

    def __init__(self, hello: Hello, clock: Clock) -> None:
        super().__init__(hello)
        self._clock = clock
        self.transfers: dict[str, T] = {}
        self.tombstones = Tombstones(clock)

    def handle(self, event: PeerEvent | OwnEvent) -> list[Send | OwnEffect]:
        """Process one event; returns what the caller must do now, in this order. Never raises
        because of what a peer or a gateway sent."""
        match event:
            case PeerMessage(incarnation, message):
                self._on_peer_message(incarnation, message)
            case Tick():
                self._on_tick(self._clock.monotonic_s())
            case PeerLinked():
                self._on_peer_linked(event)
            case PeerLost(incarnation):
                self._drop_peer(incarnation, NodeLost(f"the stream to the {self._peer} ended"))
            case _:
                self._on_event(event)
        effects, self._effects = self._effects, []
        return effects

    def next_deadline_s(self) -> float:
        """When the next `Tick` is due, on the monotonic clock; inf: never."""
        return min((t.expires_s for t in self.transfers.values()), default=math.inf)

    # ---- what a side adds

    @abstractmethod
    def _on_event(self, event: OwnEvent) -> None: ...

    @abstractmethod
    def _on_message(self, peer: str, message: Message) -> None:
        """Process a matched peer's message about a transfer. Raises HandoffFailed if no sane peer
        sends it: then the pair is refused."""

    @abstractmethod
    def _end(self, transfer: T, error: BatonError | None, *, notify: bool = True) -> None:
        """End a transfer and, if `notify`, inform its peer."""

    # ---- messages and time

    def _on_peer_message(self, peer: str, message: Message) -> None:
        """What comes before Hello was sent by a peer that had not noticed yet that its stream was
        replaced; once it does, it fails the transfers concerned."""
        pair = self.pairs.get(peer)
        if pair is None:
            return
        try:
            if isinstance(message, Hello):
                self._on_hello(peer, pair, message)
            elif pair.state is not PairState.LINKED:
                self._on_message(peer, message)
        except HandoffFailed as error:
            self._refuse(peer, error)

    def _on_tick(self, now_s: float) -> None:
        self.tombstones.purge()
        for transfer in [t for t in self.transfers.values() if t.expires_s <= now_s]:
            self._end(transfer, transfer.expiry(now_s))

    def _send(self, peer: str, message: Message) -> None:
        self._effects.append(Send(peer, message))


class Tombstones:
    """Transfers that are over, pairs whose windows failed, and why: no late message revives one.

    All live equally long, so the oldest expires first.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Not a dict: finding a dict's oldest key walks over all keys that were deleted before it.
        self._entries: OrderedDict[str, tuple[float, BatonError]] = OrderedDict()

    def add(self, name: str, error: BatonError) -> None:
        """Keep why it is over, for `TOMBSTONE_S`. The first reason counts."""
        self.purge()
        self._entries.setdefault(name, (self._clock.monotonic_s() + TOMBSTONE_S, error))
        if len(self._entries) > _MAX_TOMBSTONES:
            self._entries.popitem(last=False)

    def get(self, name: str) -> BatonError | None:
        entry = self._entries.get(name)
        return None if entry is None else entry[1]

    def purge(self) -> None:
        """Forget what is older than `TOMBSTONE_S`."""
        now_s = self._clock.monotonic_s()
        while self._entries and next(iter(self._entries.values()))[0] <= now_s:
            self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)
