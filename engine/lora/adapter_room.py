"""The LoRA adapters in an engine's host memory and device slots, and sequences waiting for a slot.

    request ─► slot with its adapter, or an unused one ─► scheduler
          └──► parked, first come, first served ─ a slot's last user leaves ─┘
                                               └─ its adapter arrives ───────┘

A sequence uses its slot from before it is queued until it ends or is held, also while preempted, so
that no step has more adapters than there are slots. Requests without an adapter are not parked;
those with an adapter do not overtake parked ones, or a constantly used adapter would keep its slot
forever.
Both tiers evict the least recently used adapter that is not in use. Host memory has room for at
least as many adapters as there are slots, so there is always room for the next one.

Belongs to the engine's thread. Knows no tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ...core.errors import InvalidRequest, Overloaded, Unavailable
from ...core.request.request import Adapter, Request
from .adapter_files import HostAdapter


class User(Protocol):
    """A user of an adapter: a Sequence."""

    adapter_slot: int | None

    @property
    def request(self) -> Request: ...


class Adapters(Protocol):
    """The adapters of all ranks: RankAdapters or RankedAdapters."""

    def keep(self, adapter: HostAdapter) -> None: ...

    def forget(self, adapter: HostAdapter) -> None: ...

    def drop(self, digest: str) -> None: ...

    def load(self, slot: int, digest: str) -> None: ...


U = TypeVar("U", bound=User)


@dataclass(slots=True)
class _Slot:
    """A device slot. `used_at`: the room's counter when the slot was last taken."""

    digest: str = ""
    num_users: int = 0
    used_at: int = 0


class AdapterRoom(Generic[U]):
    """`fetch(adapter)` loads an adapter that is not in host memory, ending in `keep` or `refuse`;
    it may be called repeatedly. None: adapters cannot be fetched."""

    def __init__(self, adapters: Adapters, max_loras: int, max_host_adapters: int) -> None:
        self._adapters = adapters
        self._slots = [_Slot() for _ in range(max_loras)]
        self._max_host_adapters = max_host_adapters
        self._host: dict[str, int] = {}  # when each was last used (`_now`), by digest
        self._refused: set[Adapter] = set()  # could not be fetched; the next request fails
        self._users: dict[U, int] = {}  # the slot of each user
        self.parked: deque[U] = deque()
        self._count = 0
        self.fetch: Callable[[Adapter], None] | None = None

    # -- host memory ------------------------------------------------------------------------------

    @property
    def digests(self) -> list[str]:
        """Digests of the adapters in host memory."""
        return [*self._host]

    def has(self, digest: str) -> bool:
        return digest in self._host

    def has_room_for(self, digest: str) -> bool:
        """Whether `keep` would accept an adapter with this digest."""
        is_full = len(self._host) >= self._max_host_adapters
        return digest in self._host or not is_full or bool(self._idle_for(digest))

    def keep(self, adapter: HostAdapter) -> None:
        """Take an adapter into host memory, evicting another if necessary. Raises Overloaded if all
        of them are in use."""
        digest = adapter.digest
        if not self.has_room_for(digest):
            self._adapters.forget(adapter)
            raise Overloaded("all LoRA adapters in host memory are in use: --max-cpu-loras")
        if digest not in self._host and len(self._host) >= self._max_host_adapters:
            oldest = min(self._idle_for(digest), key=self._host.__getitem__)
            del self._host[oldest]
            self._adapters.drop(oldest)
        self._host[digest] = self._now()
        self._refused = {one for one in self._refused if one.digest != digest}
        self._adapters.keep(adapter)

    def _idle_for(self, digest: str) -> list[str]:
        """Adapters that may be evicted for this one: those without users in slots and, unless the
        first parked sequence waits for this one, without parked sequences."""
        in_use = {slot.digest for slot in self._slots if slot.num_users}
        if not self.parked or self.parked[0].request.adapter_digest != digest:
            in_use |= {one.request.adapter_digest for one in self.parked}
        return [other for other in self._host if other not in in_use]

    def refuse(self, adapter: Adapter) -> list[U]:
        """Note that an adapter cannot be fetched; returns the sequences parked for it, which must
        end. If there are none, the next request for it fails."""
        found = [one for one in self.parked if one.request.adapter == adapter]
        if not found:
            self._refused.add(adapter)
        return found

    # -- slots ------------------------------------------------------------------------------------

    def check(self, adapter: Adapter) -> None:
        """Raise Unavailable if the adapter is not in host memory and cannot be fetched."""
        may_come = adapter.digest in self._host or self.fetch is not None
        if adapter in self._refused or not may_come:
            self._refused.discard(adapter)
            raise lacks(adapter)

    def enter(self, sequence: U) -> bool:
        """Give a new sequence its slot; False if it is parked until `unpark` returns it."""
        self.parked.append(sequence)
        return len(self.parked) == 1 and bool(self.unpark())

    def take(self, sequence: U) -> bool:
        """Give a sequence a slot with its adapter; False if all slots are in use, or the adapter
        must be fetched first."""
        adapter = sequence.request.adapter
        assert adapter is not None
        index = self._find(adapter)
        if index is None:
            return False
        slot, digest = self._slots[index], adapter.digest
        if slot.digest != digest:
            self._adapters.load(index, digest)
            slot.digest = digest
        slot.num_users += 1
        slot.used_at = self._now()
        if digest in self._host:
            self._host[digest] = slot.used_at
        self._users[sequence] = sequence.adapter_slot = index
        return True

    def leave(self, sequence: U) -> bool:
        """Release the sequence's slot; returns whether it was parked instead."""
        index = self._users.pop(sequence, None)
        if index is not None:
            self._slots[index].num_users -= 1
            return False
        if sequence not in self.parked:
            return False
        self.parked.remove(sequence)
        return True

    def unpark(self) -> list[U]:
        """Give parked sequences slots in order of arrival; returns those that got one."""
        found: list[U] = []
        while self.parked and self.take(self.parked[0]):
            found.append(self.parked.popleft())
        return found

    def _find(self, adapter: Adapter) -> int | None:
        """The slot with the adapter, or else the least recently used idle one, if the adapter is in
        host memory; if an idle slot exists but the adapter is missing there, it is fetched."""
        for index, slot in enumerate(self._slots):
            if slot.digest == adapter.digest:
                return index
        idle = [index for index, slot in enumerate(self._slots) if not slot.num_users]
        if idle and adapter.digest not in self._host:
            if self.fetch is not None:
                self.fetch(adapter)
            return None
        return min(idle, key=lambda index: self._slots[index].used_at, default=None)

    # -- looking in -------------------------------------------------------------------------------

    @property
    def running_names(self) -> list[str]:
        """Names of the adapters of sequences with a slot."""
        return _names(self._users)

    @property
    def waiting_names(self) -> list[str]:
        return _names(self.parked)

    def _now(self) -> int:
        self._count += 1
        return self._count


def check_adapter(room: AdapterRoom[U] | None, request: Request, adapter: Adapter) -> None:
    """Raise InvalidRequest or Unavailable if the engine cannot serve a request with an adapter."""
    if room is None:
        raise refuse_adapter()
    room.check(adapter)
    if request.sampling.use_beam_search:
        raise InvalidRequest("beam search with a LoRA adapter", "use_beam_search")


def refuse_adapter() -> InvalidRequest:
    """The error of a request with an adapter to an engine that serves none."""
    text = "this engine serves no LoRA adapters: --enable-lora"
    return InvalidRequest(text, "model", "unsupported_parameter")


def lacks(adapter: Adapter) -> Unavailable:
    """The error of a request whose adapter is missing."""
    return Unavailable(f"the LoRA adapter {adapter.name} is not in this engine's memory")


def _names(sequences: Iterable[U]) -> list[str]:
    adapters = (one.request.adapter for one in sequences)
    return sorted({adapter.name for adapter in adapters if adapter is not None})
