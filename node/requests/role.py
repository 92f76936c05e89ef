"""What an engine loop asks of its role. `prefill_node/role.py` and `decode_node/role.py` are it.

All of it runs on the engine loop's thread and none of it blocks. A role never raises because of
one request: it fails that request. What it raises all the same, the loop turns into `fail`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ...core.errors import BatonError
from ...core.request.request import Request
from ...engine.scheduling.outputs import StepOutput
from ...proto.v1 import handoff_pb2, node_pb2


@dataclass(frozen=True, slots=True)
class Vitals:
    """The role's part of a heartbeat: what the engine itself cannot know."""

    num_pending: int = 0  # requests that the engine has not seen yet
    pending: tuple[Request, ...] = ()  # those of them that have no blocks, each with its forks
    links: tuple[node_pb2.PeerLink, ...] = ()
    counters: node_pb2.Counters = field(default_factory=node_pb2.Counters)


class EngineRole(Protocol):
    """A policy over one engine: what to do with dispatches, peers and the results of a step."""

    def dispatch(self, gateway: str, dispatch: node_pb2.Dispatch) -> None: ...

    def cancel(self, key: str) -> None:
        """The gateway wants no more of it; not answered. Unknown keys leave a tombstone."""
        ...

    def fail(self, key: str, error: BatonError) -> None:
        """End a request in any state and tell its gateway why."""
        ...

    def gateway_lost(self, gateway: str) -> None: ...

    def peer_linked(self, incarnation: str, host: str) -> None: ...

    def peer_message(self, incarnation: str, message: handoff_pb2.PeerMessage) -> None: ...

    def peer_lost(self, incarnation: str) -> None: ...

    def after_step(self, output: StepOutput) -> None: ...

    def tick(self) -> float | None:
        """Expire what is due; returns the next deadline on the monotonic clock."""
        ...

    def poll(self) -> bool:
        """Called often, also while a step is on the device: at what changes without a word.

        Returns whether there is something to watch: then it is called again within a moment.
        """
        ...

    def vitals(self) -> Vitals: ...

    def is_idle(self) -> bool:
        """No request, no lease, no pull: the process may end without loss."""
        ...

    def ledger(self) -> dict[str, object]:
        """Blocks, requests and transfers as JSON: what `baton fsck` and the tests look at."""
        ...
