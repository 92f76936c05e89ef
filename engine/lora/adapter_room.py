"""Which adapters an engine has in host memory and in slots of its device, and who waits for one.

    request ─► slot with its adapter, or one that nobody uses ─► scheduler
          └──► parked, first come, first served ─ a slot's last user leaves ─┘

A sequence uses its slot from before it is queued until its end, preempted too, or until it is held,
so that no step has more adapters than there are slots. Requests without an adapter pass; those with
one do not pass who is parked, or an adapter that is always asked for would keep its slot for ever.
Both tiers give up what was used longest ago and is not in use.

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

_FEW_HOLDS = 1024


@dataclass(slots=True)
class _Slot:
    """`used_at`: when it was taken last, by the room's count."""

    digest: str = ""
    num_users: int = 0
    used_at: int = 0


class AdapterRoom(Generic[U]):
    """`is_wanted`: whether the request of a key, for which an adapter is held, is still open."""

    def __init__(self, adapters: Adapters, max_loras: int, max_host_adapters: int) -> None:
        self._adapters = adapters
        self._slots = [_Slot() for _ in range(max_loras)]
        self._max_host_adapters = max_host_adapters
        self._host: dict[str, int] = {}  # by digest, when it was used last
        self._holds: dict[str, str] = {}  # by request key: its digest
        self._most_holds = _FEW_HOLDS  # before those that are over are forgotten
        self._users: dict[U, int] = {}  # their slots
        self.parked: deque[U] = deque()
        self._count = 0
        self.is_wanted: Callable[[str], bool] = lambda key: False

    # -- host memory ------------------------------------------------------------------------------

    @property
    def digests(self) -> list[str]:
        """Of the adapters in host memory."""
        return [*self._host]

    def has(self, digest: str) -> bool:
        return digest in self._host

    def hold(self, key: str, digest: str) -> None:
        """Keep the adapter in host memory for as long as the request is wanted."""
        if len(self._holds) >= self._most_holds:
            self._forget_holds()
        self._holds[key] = digest
        self._host[digest] = self._now()

    def _forget_holds(self) -> None:
        """Those of requests that are over."""
        self._holds = {key: digest for key, digest in self._holds.items() if self.is_wanted(key)}
        self._most_holds = max(_FEW_HOLDS, 2 * len(self._holds))

    def keep(self, adapter: HostAdapter) -> None:
        """Take an adapter into host memory, in the place of another if need be. Raises Overloaded
        if all that are there are in use."""
        if adapter.digest not in self._host and len(self._host) >= self._max_host_adapters:
            self._evict_for(adapter)
        self._host[adapter.digest] = self._now()
        self._adapters.keep(adapter)

    def _evict_for(self, adapter: HostAdapter) -> None:
        self._forget_holds()
        in_use = {*self._holds.values(), *(one.request.adapter_digest for one in self.parked)}
        in_use |= {slot.digest for slot in self._slots if slot.num_users}
        idle = [digest for digest in self._host if digest not in in_use]
        if not idle:
            self._adapters.forget(adapter)
            raise Overloaded("all LoRA adapters in host memory are in use: --max-cpu-loras")
        oldest = min(idle, key=self._host.__getitem__)
        del self._host[oldest]
        self._adapters.drop(oldest)

    # -- slots ------------------------------------------------------------------------------------

    def check(self, adapter: Adapter) -> None:
        """Raises Unavailable if it is not in host memory."""
        if adapter.digest not in self._host:
            raise Unavailable(f"the LoRA adapter {adapter.name} is not in this engine's memory")

    def enter(self, sequence: U) -> bool:
        """Give a new sequence its slot. False: it is parked, until `unpark` returns it."""
        if self.reserve(sequence):
            return True
        self.parked.append(sequence)
        return False

    def reserve(self, sequence: U) -> bool:
        """The same of one that is not parked: it asks again."""
        return self.has_slot(sequence.request.adapter_digest) and self.take(sequence)

    def has_slot(self, digest: str) -> bool:
        """Whether one that is not parked would have a slot now."""
        return not self.parked and self._find(digest) is not None

    def take(self, sequence: U) -> bool:
        """Give a sequence a slot with its adapter, if it has one; False: all are in use."""
        digest = sequence.request.adapter_digest
        index = self._find(digest)
        if index is None:
            return False
        slot = self._slots[index]
        if slot.digest != digest:
            self._adapters.load(index, digest)
            slot.digest = digest
        slot.num_users += 1
        slot.used_at = self._host[digest] = self._now()
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

    def _find(self, digest: str) -> int | None:
        """The slot that has it, or else the idle one that was used longest ago."""
        for index, slot in enumerate(self._slots):
            if slot.digest == digest:
                return index
        idle = [index for index, slot in enumerate(self._slots) if not slot.num_users]
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


def _names(sequences: Iterable[U]) -> list[str]:
    adapters = (one.request.adapter for one in sequences)
    return sorted({adapter.name for adapter in adapters if adapter is not None})
