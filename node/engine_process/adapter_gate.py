"""Reads LoRA adapters beside the engine's thread: for orders, and for dispatches that name one that
is not in host memory.

    LoadAdapter ─────────────────► read on a thread ─► AdapterRead ─► inbox ─► AdapterLoaded
    dispatch ──► in host memory ─────────────────────────────────────────────► role
            └──► not there ──────► read on a thread ─► AdapterRead ─► inbox ─► role
The role sees a dispatch late, as if it had come late. One whose adapter cannot be read fails there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ...core.errors import BatonError
from ...engine.lora.adapter_files import HostAdapter
from ...engine.lora.adapter_room import AdapterRoom, refuse_adapter
from ...engine.scheduling.sequence import Sequence
from ...proto import codec
from ...proto.v1 import node_pb2

log = logging.getLogger(__name__)


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


class AdapterGate:
    """Belongs to the engine loop's thread; `put` is called from another."""

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
        self._room, self._reader, self._put, self._send = room, reader, put, send
        self._dispatches: dict[tuple[str, int], str] = {}  # (request id, attempt): its gateway
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")
        if room is not None:
            room.is_wanted = is_wanted

    @property
    def is_empty(self) -> bool:
        return not self._dispatches

    @property
    def num_waiting(self) -> int:
        """Dispatches that wait for their adapter."""
        return len(self._dispatches)

    def admits(self, gateway: str, dispatch: node_pb2.Dispatch) -> bool:
        """Whether one that names an adapter can go on now; if not, `was_read` returns it."""
        if self._room is None or self._hold(dispatch):
            return True  # where no adapters are served the engine refuses it
        self._dispatches[dispatch.request_id, dispatch.attempt] = gateway
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
        if self._dispatches.pop((dispatch.request_id, dispatch.attempt), None) != read.gateway:
            return []
        left_us = dispatch.deadline_remaining_us - int(read.took_s * 1e6)
        dispatch.deadline_remaining_us = max(0, left_us)
        self._hold(dispatch)
        return [(read.gateway, dispatch)]

    def gateway_lost(self, gateway: str) -> None:
        """Nobody wants what it sent."""
        left = {key: name for key, name in self._dispatches.items() if name != gateway}
        self._dispatches = left

    def close(self) -> None:
        """What still waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

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
