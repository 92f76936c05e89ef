"""Holds dispatches back until their grammar is compiled and their LoRA adapter is read, each on its
own thread.

    dispatch ──► all is available ───────────────────────► role
            └──► not yet ───► thread ──► Gated ─► inbox ─► role
                                           └─► Gated of each that waited for the same adapter
    LoadAdapter ──► read on a thread ──► Gated ─► inbox ─► AdapterLoaded
    AdapterRoom.fetch ──► read on a thread ──► Gated ─► inbox ─► room

For the role such a dispatch only arrives late: if it has been cancelled, the role has a tombstone
of it. It is dropped if its gateway is lost; if compiling or reading fails, it fails in the engine.
A request that lacks room for its adapter in host memory waits in the engine, not here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ...constraints.grammars import Grammar, Grammars
from ...core.errors import BatonError, Overloaded
from ...core.request.request import Adapter
from ...engine.lora.adapter_files import HostAdapter
from ...engine.lora.adapter_room import AdapterRoom, lacks, refuse_adapter
from ...engine.scheduling.sequence import Sequence
from ...proto import codec
from ...proto.v1 import node_pb2

log = logging.getLogger(__name__)

_Message: TypeAlias = node_pb2.Dispatch | node_pb2.LoadAdapter | Adapter
_Found: TypeAlias = Grammar | HostAdapter | BatonError | None


@dataclass(slots=True)
class Gated:
    """`message`: a dispatch or a LoadAdapter of `gateway`, or an adapter that the room requested.
    `found`: the grammar or adapter that it waited for, an error, or None if the adapter was read
    for another dispatch. `is_read`: it waited for an adapter, the last thing a dispatch waits for.
    """

    gateway: str
    message: _Message
    is_read: bool
    found: _Found
    took_s: float


class Reader(Protocol):
    """Reads an adapter on all ranks: RankAdapters, RankedAdapters."""

    def read(self, path: str, digest: str = "") -> HostAdapter: ...


class DispatchGate:
    """Used by the engine loop's thread only. Calls `put` from other threads."""

    def __init__(
        self,
        grammars: Grammars,
        room: AdapterRoom[Sequence] | None,
        reader: Reader | None,
        end: Callable[[str, BatonError], None],
        put: Callable[[Gated], None],
        send: Callable[[str, node_pb2.NodeMessage], None],
    ) -> None:
        """`room` and `reader`: None where no adapters are served; `end` ends a request, given its
        key, whose adapter cannot be read; `send` sends to a gateway."""
        self._grammars, self._room, self._reader = grammars, room, reader
        self._end, self._put, self._send = end, put, send
        self._waiting: dict[tuple[str, int], str] = {}  # (request id, attempt): its gateway
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._reading = ThreadPoolExecutor(1, "adapters")
        self._fetching: set[str] = set()  # digests
        # By (path, digest) of an adapter that is being read for a dispatch: the other dispatches
        # that wait for it, each with its gateway and since when.
        self._behind: dict[tuple[str, str], list[tuple[str, node_pb2.Dispatch, float]]] = {}
        if room is not None:
            room.fetch = self._fetch

    @property
    def num_waiting(self) -> int:
        """The number of dispatches held back."""
        return len(self._waiting)

    def gateway_lost(self, gateway: str) -> None:
        """Drop the gateway's dispatches."""
        self._waiting = {key: name for key, name in self._waiting.items() if name != gateway}

    def close(self) -> None:
        """Drop all that still wait."""
        for pool in (self._compiling, self._reading):
            pool.shutdown(wait=False, cancel_futures=True)

    def admits(self, gateway: str, dispatch: node_pb2.Dispatch) -> bool:
        """Whether the dispatch can go to the role now; if not, it is returned later as a Gated."""
        constraint = codec.constraint_from_wire(dispatch.sampling)
        if constraint is None or self._grammars.is_kept(constraint):
            return self._has_adapter(gateway, dispatch)
        self._submit(gateway, dispatch, lambda: self._grammars.compile(constraint))
        return False

    def load(self, gateway: str, order: node_pb2.LoadAdapter) -> None:
        """Read an adapter. AdapterLoaded is sent here or by `released`."""
        if self._room is None:
            self._answer(gateway, order, refuse_adapter())
        else:
            self._read(gateway, order, order.path, "")

    def released(self, gated: Gated) -> node_pb2.Dispatch | None:
        """The dispatch that can go to the role now, its deadline reduced by the wait. None: it
        waits for more, its gateway is gone, or it was no dispatch. Call once for each Gated."""
        dispatch, gateway, found = gated.message, gated.gateway, gated.found
        has_failed = gated.is_read and isinstance(found, BatonError)
        if gated.is_read and isinstance(dispatch, node_pb2.Dispatch):
            self._release_behind(dispatch.adapter, found if isinstance(found, BatonError) else None)
        if isinstance(found, HostAdapter) and self._room is not None:
            with suppress(Overloaded):  # it is read again for a request that gets a slot
                self._room.keep(found)
        if isinstance(dispatch, node_pb2.LoadAdapter):
            self._answer(gateway, dispatch, found)
            return None
        if isinstance(dispatch, Adapter):
            self._fetching.discard(dispatch.digest)
            if has_failed:
                log.warning("LoRA adapter %s: %s", dispatch.name, found)
                self._refuse(dispatch)
            return None
        if has_failed:
            self._refuse(Adapter(**codec.same_fields(dispatch.adapter, Adapter)))
        if isinstance(found, BatonError):  # the engine reports it
            log.warning("%s: %s", dispatch.request_id, found.message)
        if self._waiting.pop((dispatch.request_id, dispatch.attempt), None) != gateway:
            return None
        left_us = dispatch.deadline_remaining_us - int(gated.took_s * 1e6)
        dispatch.deadline_remaining_us = max(0, left_us)
        return dispatch if gated.is_read or self._has_adapter(gateway, dispatch) else None

    def _has_adapter(self, gateway: str, dispatch: node_pb2.Dispatch) -> bool:
        """Whether the dispatch names no adapter, or one that is in memory or has no room yet. If no
        adapters are served, the engine rejects it."""
        room, adapter = self._room, dispatch.adapter
        if room is None or not dispatch.HasField("adapter"):
            return True
        if room.has(adapter.digest) or not room.has_room_for(adapter.digest):
            return True
        key = (adapter.path, adapter.digest)
        if (behind := self._behind.get(key)) is not None:
            self._waiting[dispatch.request_id, dispatch.attempt] = gateway
            behind.append((gateway, dispatch, time.monotonic()))
        else:
            self._behind[key] = []
            self._read(gateway, dispatch, *key)
        return False

    def _release_behind(self, adapter: node_pb2.Adapter, error: BatonError | None) -> None:
        """Release the dispatches that waited for the same read."""
        now_s = time.monotonic()
        for gateway, dispatch, since_s in self._behind.pop((adapter.path, adapter.digest), ()):
            self._put(Gated(gateway, dispatch, True, error, now_s - since_s))

    def _fetch(self, adapter: Adapter) -> None:
        if adapter.digest not in self._fetching:
            self._fetching.add(adapter.digest)
            self._read("", adapter, adapter.path, adapter.digest)

    def _refuse(self, adapter: Adapter) -> None:
        """End the requests whose adapter cannot be read."""
        assert self._room is not None
        for sequence in self._room.refuse(adapter):
            for request in (sequence.request, *sequence.request.forks):
                self._end(request.key, lacks(adapter))

    def _read(self, gateway: str, message: _Message, path: str, digest: str) -> None:
        reader = self._reader
        assert reader is not None
        self._submit(gateway, message, lambda: reader.read(path, digest), is_read=True)

    def _submit(
        self, gateway: str, message: _Message, find: Callable[[], _Found], *, is_read: bool = False
    ) -> None:
        """Run `find` on a thread; the message is returned as a Gated."""
        if isinstance(message, node_pb2.Dispatch):
            self._waiting[message.request_id, message.attempt] = gateway
        began_s = time.monotonic()

        def run() -> None:
            found: _Found
            try:
                found = find()
            except BatonError as error:
                found = error
            except Exception as error:  # on this thread: it would be lost
                log.exception("resources of a request could not be loaded")
                found = BatonError(f"{type(error).__name__}: {error}")
            self._put(Gated(gateway, message, is_read, found, time.monotonic() - began_s))

        (self._reading if is_read else self._compiling).submit(run)

    def _answer(self, gateway: str, order: node_pb2.LoadAdapter, found: _Found) -> None:
        loaded = node_pb2.AdapterLoaded(order_id=order.order_id)
        if isinstance(found, HostAdapter):
            loaded.digest = found.digest
        elif isinstance(found, BatonError):
            loaded.error.CopyFrom(codec.error_to_wire(found))
        self._send(gateway, node_pb2.NodeMessage(adapter_loaded=loaded))
