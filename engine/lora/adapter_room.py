"""Which adapters an engine has in host memory and in slots of its device, and who waits for one.

    request ─► slot with its adapter, or one that nobody uses ─► scheduler
          └──► parked, first come, first served ─ a slot's last user leaves ─┘
                                               └─ its adapter comes, again ──┘

A sequence uses its slot from before it is queued until its end, preempted too, or until it is held,
so that no step has more adapters than there are slots. Requests without an adapter pass; those with
one do not pass who is parked, or an adapter that is always asked for would keep its slot for ever.
Both tiers give up what was used longest ago and is not in use. Host memory has room for more
adapters than there are slots, or for as many: so it has some for whoever has the next slot.

Belongs to the engine's thread. Knows no tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ...core.errors import InvalidRequest, Overloaded, Unavailable
from ...core.request.request import Adapter, Request
from .adapter_files import HostAdapter


class User(Protocol):
    """What needs an adapter while it lives: a Sequence."""

    adapter_slot: int | None

    @property
    def request(self) -> Request: ...


class Adapters(Protocol):
    """Those of all ranks: RankAdapters, RankedAdapters."""

    def keep(self, adapter: HostAdapter) -> None: ...

    def forget(self, adapter: HostAdapter) -> None: ...

    def drop(self, digest: str) -> None: ...

    def load(self, slot: int, digest: str) -> None: ...


U = TypeVar("U", bound=User)


@dataclass(slots=True)
class _Slot:
    """`used_at`: when it was taken last, by the room's count."""

    digest: str = ""
    num_users: int = 0
    used_at: int = 0


class AdapterRoom(Generic[U]):
    """`fetch(adapter)`: see that one that is not in host memory comes by `keep`, or `refuse`; asked
    again and again. None: nobody can."""

    def __init__(self, adapters: Adapters, max_loras: int, max_host_adapters: int) -> None:
        self._adapters = adapters
        self._slots = [_Slot() for _ in range(max_loras)]
        self._max_host_adapters = max_host_adapters
        self._host: dict[str, int] = {}  # by digest, when it was used last
        self._refused: set[Adapter] = set()  # what could not be fetched, until somebody is told
        self._users: dict[U, int] = {}  # their slots
        self.parked: deque[U] = deque()
        self._count = 0
        self.fetch: Callable[[Adapter], None] | None = None

    # -- host memory ------------------------------------------------------------------------------

    @property
    def digests(self) -> list[str]:
        """Of the adapters in host memory."""
        return [*self._host]

    def has(self, digest: str) -> bool:
        return digest in self._host

    def has_room_for(self, digest: str) -> bool:
        """Whether `keep` would take it."""
        is_full = len(self._host) >= self._max_host_adapters
        return digest in self._host or not is_full or bool(self._idle_for(digest))

    def keep(self, adapter: HostAdapter) -> None:
        """Take an adapter into host memory, in the place of another if need be. Raises Overloaded
        if all that are there are in use."""
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
        """What may leave host memory for it: nothing that a slot's users have, nor what is waited
        for, unless it is waited for first."""
        in_use = {slot.digest for slot in self._slots if slot.num_users}
        if not self.parked or self.parked[0].request.adapter_digest != digest:
            in_use |= {one.request.adapter_digest for one in self.parked}
        return [other for other in self._host if other not in in_use]

    def refuse(self, adapter: Adapter) -> list[U]:
        """It cannot be fetched: who is parked for it has to end, or else the next who asks."""
        found = [one for one in self.parked if one.request.adapter == adapter]
        if not found:
            self._refused.add(adapter)
        return found

    # -- slots ------------------------------------------------------------------------------------

    def check(self, adapter: Adapter) -> None:
        """Raises Unavailable if it is not in host memory, and will not come."""
        may_come = adapter.digest in self._host or self.fetch is not None
        if adapter in self._refused or not may_come:
            self._refused.discard(adapter)
            raise lacks(adapter)

    def enter(self, sequence: U) -> bool:
        """Give a new sequence its slot. False: it is parked, until `unpark` returns it."""
        self.parked.append(sequence)
        return len(self.parked) == 1 and bool(self.unpark())

    def take(self, sequence: U) -> bool:
        """Give a sequence a slot with its adapter; False: all are in use, or that has to come."""
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
        """The sequence ends; whether it was parked."""
        index = self._users.pop(sequence, None)
        if index is not None:
            self._slots[index].num_users -= 1
            return False
        if sequence not in self.parked:
            return False
        self.parked.remove(sequence)
        return True

    def unpark(self) -> list[U]:
        """Those that have a slot now, in the order of their arrival."""
        found: list[U] = []
        while self.parked and self.take(self.parked[0]):
            found.append(self.parked.popleft())
        return found

    def _find(self, adapter: Adapter) -> int | None:
        """The slot that has it, or else the idle one that was used longest ago, if the adapter can
        be loaded there; where that alone is lacking it is fetched."""
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
        """Names of the adapters that sequences with a slot are computed with."""
        return _names(self._users)

    @property
    def waiting_names(self) -> list[str]:
        return _names(self.parked)

    def _now(self) -> int:
        self._count += 1
        return self._count


def room_for(
    adapters: Adapters | None, max_loras: int, max_host_adapters: int
) -> AdapterRoom[Any] | None:
    """None where no adapters are served."""
    return None if adapters is None else AdapterRoom(adapters, max_loras, max_host_adapters)


def refuse_adapter() -> InvalidRequest:
    """Why an engine without a room takes no request with an adapter."""
    text = "this engine serves no LoRA adapters: --enable-lora"
    return InvalidRequest(text, "model", "unsupported_parameter")


def lacks(adapter: Adapter) -> Unavailable:
    """Why a request with it ends."""
    return Unavailable(f"the LoRA adapter {adapter.name} is not in this engine's memory")


def _names(sequences: Iterable[U]) -> list[str]:
    adapters = (one.request.adapter for one in sequences)
    return sorted({adapter.name for adapter in adapters if adapter is not None})
