"""Keep dispatches away from the engine's thread until what they name is there: a grammar is
compiled, a LoRA adapter read, each on a thread of its own.

    dispatch ──► what it names is here ─────────────────────────────► role
            └──► not here ──► thread ──► CompiledDispatch ─► inbox ─► role
                                     └─► AdapterRead
    LoadAdapter ──► read on a thread ──► AdapterRead ─► inbox ─► AdapterLoaded
The role sees a dispatch late, as if it had come late: one that was cancelled until then finds its
tombstone. What has lost its gateway it never sees; what cannot be compiled or read fails there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ...constraints.grammars import Grammars
from ...core.errors import BatonError
from ...core.request.request import Constraint
from ...engine.lora.adapter_files import HostAdapter
from ...engine.lora.adapter_room import AdapterRoom, refuse_adapter
from ...engine.scheduling.sequence import Sequence
from ...proto import codec
from ...proto.v1 import node_pb2

log = logging.getLogger(__name__)


class _Gate:
    """Belongs to the engine loop's thread. `num_waiting`: dispatches."""

    def __init__(self, name: str) -> None:
        self._waiting: dict[tuple[str, int], str] = {}  # (request id, attempt): its gateway
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def gateway_lost(self, gateway: str) -> None:
        """Nobody wants what it sent."""
        self._waiting = {key: name for key, name in self._waiting.items() if name != gateway}

    def close(self) -> None:
        """What still waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _wait(self, gateway: str, dispatch: node_pb2.Dispatch) -> None:
        self._waiting[dispatch.request_id, dispatch.attempt] = gateway

    def _has_waited(self, gateway: str, dispatch: node_pb2.Dispatch) -> bool:
        """Whether its gateway is still there. Call once."""
        return self._waiting.pop((dispatch.request_id, dispatch.attempt), None) == gateway


def _take_off(dispatch: node_pb2.Dispatch, waited_s: float) -> None:
    """What it waited is no longer left of its deadline."""
    left_us = dispatch.deadline_remaining_us - int(waited_s * 1e6)
    dispatch.deadline_remaining_us = max(0, left_us)


@dataclass(frozen=True, slots=True)
class CompiledDispatch:
    """Its grammar is compiled, or cannot be: the engine will report that."""

    gateway: str
    dispatch: node_pb2.Dispatch


class GrammarGate(_Gate):
    """`put` is called from another thread."""

    def __init__(self, grammars: Grammars, put: Callable[[CompiledDispatch], None]) -> None:
        super().__init__("grammars")
        self._grammars = grammars
        self._put = put

    def admits(self, gateway: str, dispatch: node_pb2.Dispatch) -> bool:
        """Whether one with a constraint can go on now; if not it returns as a CompiledDispatch."""
        constraint = codec.constraint_from_wire(dispatch.sampling)
        assert constraint is not None
        if self._grammars.is_kept(constraint):
            return True
        self._wait(gateway, dispatch)
        self._pool.submit(self._compile, CompiledDispatch(gateway, dispatch), constraint)
        return False

    def _compile(self, waiting: CompiledDispatch, constraint: Constraint) -> None:
        began_s = time.monotonic()
        try:
            self._grammars.compile(constraint)
        except BatonError as error:
            log.info("%s: %s", waiting.dispatch.request_id, error.message)  # the engine reports it
        finally:
            _take_off(waiting.dispatch, time.monotonic() - began_s)
            self._put(waiting)

    def is_wanted(self, compiled: CompiledDispatch) -> bool:
        """Whether its gateway is still there. Call once."""
        return self._has_waited(compiled.gateway, compiled.dispatch)


class Reader(Protocol):
    """Of all ranks: RankAdapters, RankedAdapters."""

    def read(self, path: str, digest: str = "") -> HostAdapter: ...


@dataclass(frozen=True, slots=True)
class AdapterRead:
    """What reading the adapter of a dispatch, or of an order of `gateway`, gave."""

    gateway: str
    message: node_pb2.Dispatch | node_pb2.LoadAdapter
    found: HostAdapter | BatonError
    took_s: float


class AdapterGate(_Gate):
    """`put` is called from another thread."""

    def __init__(
        self,
        room: AdapterRoom[Sequence] | None,
        reader: Reader | None,
        is_wanted: Callable[[str], bool],
        put: Callable[[AdapterRead], None],
        send: Callable[[str, node_pb2.NodeMessage], None],
    ) -> None:
        """`room` and `reader`: None where no adapters are served; `is_wanted`: whether a request,
        by its key, is open; `send`: to a gateway."""
        super().__init__("adapters")
        self._room, self._reader, self._put, self._send = room, reader, put, send
        if room is not None:
            room.is_wanted = is_wanted

    def admits(self, gateway: str, dispatch: node_pb2.Dispatch) -> bool:
        """Whether one that names an adapter can go on now; if not, `was_read` returns it."""
        if self._room is None or self._hold(dispatch):
            return True  # where no adapters are served the engine refuses it
        self._wait(gateway, dispatch)
        adapter = dispatch.adapter
        self._submit(gateway, dispatch, adapter.path, adapter.digest)
        return False

    def load(self, gateway: str, order: node_pb2.LoadAdapter) -> None:
        """Answered by AdapterLoaded, here or by `was_read`."""
        if self._room is None:
            self._answer(gateway, order, refuse_adapter())
            return
        self._submit(gateway, order, order.path, "")

    def was_read(self, read: AdapterRead) -> list[tuple[str, node_pb2.Dispatch]]:
        """Take it into host memory; the dispatch that can go on now, with its gateway, if it is one
        whose gateway is still there."""
        found = read.found
        try:
            if isinstance(found, HostAdapter) and self._room is not None:
                self._room.keep(found)
        except BatonError as error:
            found = error
        if isinstance(read.message, node_pb2.LoadAdapter):
            self._answer(read.gateway, read.message, found)
            return []
        dispatch = read.message
        if isinstance(found, BatonError):
            log.warning("%s: %s", dispatch.request_id, found.message)
        if not self._has_waited(read.gateway, dispatch):
            return []
        _take_off(dispatch, read.took_s)
        self._hold(dispatch)
        return [(read.gateway, dispatch)]

    def _hold(self, dispatch: node_pb2.Dispatch) -> bool:
        """Whether its adapter is in host memory: then it stays there for the request's life."""
        digest = dispatch.adapter.digest
        if self._room is None or not self._room.has(digest):
            return False
        self._room.hold(f"{dispatch.request_id}/{dispatch.attempt}", digest)
        return True

    def _submit(
        self,
        gateway: str,
        message: node_pb2.Dispatch | node_pb2.LoadAdapter,
        path: str,
        digest: str,
    ) -> None:
        began_s = time.monotonic()

        def run() -> None:
            assert self._reader is not None
            found: HostAdapter | BatonError
            try:
                found = self._reader.read(path, digest)
            except BatonError as error:
                found = error
            except Exception as error:  # of this thread: nobody else would see it
                log.exception("the adapter at %s cannot be read", path)
                found = BatonError(f"{type(error).__name__}: {error}")
            self._put(AdapterRead(gateway, message, found, time.monotonic() - began_s))

        self._pool.submit(run)

    def _answer(
        self, gateway: str, order: node_pb2.LoadAdapter, found: HostAdapter | BatonError
    ) -> None:
        loaded = node_pb2.AdapterLoaded(order_id=order.order_id)
        if isinstance(found, HostAdapter):
            loaded.digest = found.digest
        else:
            loaded.error.CopyFrom(codec.error_to_wire(found))
        self._send(gateway, node_pb2.NodeMessage(adapter_loaded=loaded))
