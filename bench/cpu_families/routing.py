"""Routing decisions of a gateway: the choice of engines for a request, among 16 and 256 engines."""

from __future__ import annotations

import random

from baton.core.membership import Member, Role
from baton.core.ports import Clock
from baton.core.request.request import Request, Ticket
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.token_ids import column
from baton.core.step_cost import StepCost
from baton.core.step_shape import StepShape
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.prompt_router import PromptRouter
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.engines.routing import Policy
from baton.gateway.request.engine_link import Avoid, Demand
from baton.gateway.validation.validation import ValidatedRequest
from baton.prefix_index.mirror import PrefixMirror
from baton.proto.v1 import node_pb2

from ..floors.figures import Figure, time_s

_NUM_TOKENS, _NUM_OUTPUTS = 1024, 256
_PROMPT = column((1,) * _NUM_TOKENS)
_NUM_OPEN = 200  # open requests; the oldest ends when another is sent
_NUM_DECISIONS, _NUM_SAMPLES = 200, 9
_WANTED_PER_S = {16: 5000.0, 256: 1000.0}
_COST = StepCost(0.0046, (*(0.0,) * 6, 7.2e-6, *(20.6e-6,) * 3), 9e-10, 3.2e-8, max_rows=8192)


class _Nowhere:
    """Discards messages to engines."""

    def dispatch(
        self, request: Request, ticket: Ticket | None, deadline_remaining_s: float
    ) -> None: ...

    def cancel(self, request_id: str, attempt: int) -> None: ...

    def set_promise(self, epoch: int, leader: str, tbt_target_s: float | None) -> None: ...


class _Gateway:
    """Half of its engines prefill, half decode; all have some requests, and all pairs are
    linked."""

    def __init__(self, num_engines: int) -> None:
        clock = Clock()
        self._table = EngineTable(PrefixMirror(clock), Policy(random.Random(1)))
        sources = [f"p{index}" for index in range(num_engines // 2)]
        for name in sources:
            self._add(name, Role.PREFILL, ReportedLoad(**_load(name), links=frozenset()))
        for index in range(num_engines // 2):
            rates = dict.fromkeys(sources, 100.0)
            load = ReportedLoad(
                **_load(f"d{index}"), links=frozenset(sources), link_gbytes_per_s=rates
            )
            self._add(f"d{index}", Role.DECODE, load)
        self._engines = list(self._table.engines.values())
        self._open: list[tuple[LinkedEngine, LinkedEngine, str]] = []
        self._count = 0

    def _add(self, name: str, role: Role, load: ReportedLoad) -> None:
        member = Member(name, role, name, "h:1", "demo", "fp", 1 << 17, 16, 1 << 15)
        self._table.add(LinkedEngine(member, _Nowhere(), load, node_pb2.Welcome(max_num_seqs=256)))

    def decide(self) -> None:
        """Route one request, end the oldest, and process one engine's heartbeat."""
        demand = Demand(_NUM_TOKENS, 1, _NUM_OUTPUTS)
        sampling = SamplingParams(max_tokens=_NUM_OUTPUTS)
        valid = ValidatedRequest(_PROMPT, sampling, "", caller_id=self._count)
        route = PromptRouter(self._table, valid).choose(demand, avoid=Avoid(), fingerprint=None)
        request = Request(f"{self._count:032x}", 0, _PROMPT, sampling)
        for link in (route.prefill, route.decode):
            link.dispatch(request, route, None, 10.0)
        names = route.prefill.incarnation, route.decode.incarnation
        prefill, decode = (self._table.engines[name] for name in names)
        self._open.append((prefill, decode, request.request_id))
        if len(self._open) > _NUM_OPEN:
            *engines, request_id = self._open.pop(0)
            for engine in engines:
                engine.cancel(request_id, 0)
        self._count += 1
        engine = self._engines[self._count % len(self._engines)]
        engine.receive_heartbeat(engine.load)


def _load(name: str) -> dict[str, object]:
    """The reported load of an engine, whose name is the role's letter and a number."""
    num_waiting = int(name[1:]) % 7 if name[0] == "p" else 0
    return {
        "num_running": 20,
        "num_waiting": num_waiting,
        "waiting_tokens": 300 * num_waiting,
        "free_blocks": 30_000,
        "credit_blocks": 1 << 14,
        "is_draining": False,
        "num_requests": 20 + num_waiting,
        "room_blocks": 20_000,
        "output_tokens": _NUM_OUTPUTS,
        "step_cost": _COST,
        "step_tokens": 2048,
        "decodes": StepShape(num_decodes=20, keys=20_000),
    }


def measure() -> list[Figure]:
    """Decisions per second, including the updates by dispatches and heartbeats in between."""
    figures = []
    for num_engines, wanted_per_s in _WANTED_PER_S.items():
        gateway = _Gateway(num_engines)

        def decide(gateway: _Gateway = gateway) -> None:
            for _ in range(_NUM_DECISIONS):
                gateway.decide()

        decide()
        samples = tuple(_NUM_DECISIONS / time_s(decide) for _ in range(_NUM_SAMPLES))
        name = f"decisions of a gateway with {num_engines} engines"
        figures.append(Figure(name, "1/s", samples, target=wanted_per_s))
    return figures
