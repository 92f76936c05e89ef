"""The gateway of a simulated cluster: production routing, queue and sessions."""

from __future__ import annotations

import random
from collections.abc import Sequence

from baton.gateway.admission.queue_limit import QueueLimit
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.routing_policies import make_policy
from baton.gateway.moves.mover import RequestMover
from baton.gateway.request.dispatch_queue import DispatchQueue
from baton.gateway.request.engine_link import EngineOutput
from baton.gateway.request.session_table import SessionTable
from baton.prefix_index.mirror import PrefixMirror

from .device import VirtualClock


class PlayedGateway:
    """The parts of a gateway that route requests and stream their tokens."""

    def __init__(
        self, clock: VirtualClock, seed: int, max_queue_s: float | None, policy: str
    ) -> None:
        self.table = EngineTable(PrefixMirror(clock), make_policy(policy, random.Random(seed)))
        self.queue = DispatchQueue(self.table.released)
        self.sessions = SessionTable(clock, 1 << 20, self.queue)
        self.limit = QueueLimit(self.table, self.queue, max_queue_s)
        self.mover = RequestMover(self.table, self.sessions, clock, random.Random(seed))

    def received(self, name: str, outputs: Sequence[EngineOutput]) -> None:
        """Process the outputs of an engine's step."""
        self.table.engines[name].receive(outputs)
        self.sessions.engine_step(name, outputs)
