"""Keeps dispatches whose grammar is not compiled yet away from the engine's thread.

    dispatch ──► known grammar, or none ──────────────────────► role
            └──► compiled on a thread ──► CompiledDispatch ───► inbox ──► role
The role sees a dispatch late, as if it had come late: one that was cancelled until then finds its
tombstone. What has lost its gateway the role never sees.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...constraints.grammars import Grammars
from ...core.errors import BatonError
from ...core.request.request import Constraint
from ...proto.codec import constraint_from_wire
from ...proto.v1 import node_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledDispatch:
    """Its grammar is compiled, or cannot be: the engine will report that."""

    gateway: str
    dispatch: node_pb2.Dispatch


class GrammarGate:
    """Belongs to the engine loop's thread; `put` is called from another."""

    def __init__(self, grammars: Grammars, put: Callable[[CompiledDispatch], None]) -> None:
        self._grammars = grammars
        self._put = put
        self._waiting: dict[tuple[str, int], str] = {}  # (request id, attempt): its gateway
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def admits(self, gateway: str, dispatch: node_pb2.Dispatch) -> bool:
        """Whether one with a constraint can go on now; if not it returns as a CompiledDispatch."""
        constraint = constraint_from_wire(dispatch.sampling)
        assert constraint is not None
        if self._grammars.is_kept(constraint):
            return True
        self._waiting[dispatch.request_id, dispatch.attempt] = gateway
        self._pool.submit(self._compile, CompiledDispatch(gateway, dispatch), constraint)
        return False

    def _compile(self, waiting: CompiledDispatch, constraint: Constraint) -> None:
        began_s = time.monotonic()
        try:
            self._grammars.compile(constraint)
        except BatonError as error:
            log.info("%s: %s", waiting.dispatch.request_id, error.message)  # the engine reports it
        finally:
            waited_us = int((time.monotonic() - began_s) * 1e6)
            left_us = waiting.dispatch.deadline_remaining_us - waited_us
            waiting.dispatch.deadline_remaining_us = max(0, left_us)
            self._put(waiting)

    def is_wanted(self, compiled: CompiledDispatch) -> bool:
        """Whether its gateway is still there. Call once."""
        dispatch = compiled.dispatch
        gateway = self._waiting.pop((dispatch.request_id, dispatch.attempt), None)
        return gateway == compiled.gateway

    def gateway_lost(self, gateway: str) -> None:
        """Nobody wants what it sent."""
        self._waiting = {key: name for key, name in self._waiting.items() if name != gateway}

    def close(self) -> None:
        """What still waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
