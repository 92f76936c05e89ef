"""A dispatch with a new grammar waits for it outside the engine loop and delays no other."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.clock import FakeClock
from fakes.node.channel_pairs import played_pair
from fakes.node.inbox import FakeInbox

from baton.constraints.grammars import Grammar
from baton.core.errors import InvalidRequest, NodeLost
from baton.core.request.constraint import Constraint, ConstraintKind
from baton.node.channels.engine_channels import EngineChannels
from baton.node.channels.links import Kind, Link, LinkOver, Received
from baton.node.engine_process.dispatch_gate import DispatchGate
from baton.node.engine_process.engine_loop import EngineLoop
from baton.node.requests.request_io import RequestIO
from baton.proto.v1 import common_pb2, engine_pb2, node_pb2

NEW, KNOWN, BAD = (common_pb2.SamplingParams(regex=name) for name in ("new", "known", "bad"))
PLAIN = common_pb2.SamplingParams()


class SlowGrammars:
    """`constraints.grammars.Grammars` whose compiler waits for `may_compile`."""

    def __init__(self) -> None:
        self.may_compile = threading.Event()
        self.compiled = [Constraint(ConstraintKind.REGEX, "known")]

    def is_kept(self, constraint: Constraint) -> bool:
        return constraint in self.compiled

    def compile(self, constraint: Constraint) -> Grammar:
        assert self.may_compile.wait(10)
        if constraint.source == "bad":
            raise InvalidRequest("no grammar")
        self.compiled.append(constraint)
        return None  # type: ignore[return-value]


class Role:
    """Records what the loop dispatches and ends."""

    def __init__(self, desk: RequestIO) -> None:
        self.desk = desk
        self.dispatched: list[str] = []
        self.deadlines_us: list[int] = []
        self.fails = False

    def dispatch(self, gateway: str, dispatch: node_pb2.Dispatch) -> None:
        self.desk.accept(gateway, dispatch)
        self.dispatched.append(f"{gateway}:{dispatch.request_id}")
        self.deadlines_us.append(dispatch.deadline_remaining_us)
        if self.fails:
            raise InvalidRequest("the engine says no")

    def end(self, key: str, error: Exception) -> None:
        self.dispatched.append(f"failed {key}")

    def gateway_lost(self, gateway: str) -> None: ...

    def tick(self) -> float:
        return math.inf

    def is_idle(self) -> bool:
        return True


class World:
    """An engine loop with its gate; everything else is simulated."""

    def __init__(self) -> None:
        self.refused: list[tuple[str, str]] = []  # (key, error)
        self.desk = RequestIO(self._to_gateway, FakeClock(), "n", 1000)
        self.grammars, self.role = SlowGrammars(), Role(self.desk)
        self.inbox = FakeInbox()
        self.gate = self.make_gate()
        pulse = SimpleNamespace(turn_started=lambda: None, turn_ended=lambda: None)
        numbers = SimpleNamespace(recount=lambda: 0.0, has_changed=False)
        self.channels = EngineChannels(self.inbox, node_pb2.Welcome())  # type: ignore[arg-type]
        self.links: dict[str, Link] = {}
        report: Any = SimpleNamespace(flush=lambda: None)
        engine: Any = SimpleNamespace(has_work=False, unpark=lambda: None)
        peers: Any = SimpleNamespace(pulls=SimpleNamespace(poll=lambda: None, are_waiting=False))
        self.loop = EngineLoop(
            engine, self.role, peers, self.desk, report, self.inbox,  # type: ignore[arg-type]
            lambda frame: None, pulse, numbers, FakeClock(), self.channels, self.gate, engine,  # type: ignore[arg-type]
            SimpleNamespace(link_over=lambda link: None),
        )  # fmt: skip

    def _to_gateway(self, _: str, message: node_pb2.NodeMessage) -> None:
        outputs = message.outputs.outputs
        self.refused += [(output.request_id[-1:], output.error.code) for output in outputs]

    def make_gate(self, adapters: Any = None) -> DispatchGate:
        """`adapters` is both an adapter room and a reader."""
        return DispatchGate(
            self.grammars, adapters, adapters, lambda *ended: None,  # type: ignore[arg-type]
            self.inbox.put, lambda *sent: None,
        )  # fmt: skip

    def dispatch(
        self,
        request_id: str,
        sampling: common_pb2.SamplingParams,
        gateway: str = "g",
        adapter: node_pb2.Adapter | None = None,
    ) -> None:
        dispatch = node_pb2.Dispatch(
            request_id=request_id, sampling=sampling, deadline_remaining_us=10**9,
            prompt_token_ids=bytes(4), adapter=adapter,
        )  # fmt: skip
        message = node_pb2.GatewayMessage(dispatch=dispatch)
        self.inbox.put(Received(self.link(gateway), message))

    def link(self, gateway: str) -> Link:
        if gateway not in self.links:
            channel: Any = played_pair()[0]
            self.links[gateway] = Link(Kind.GATEWAY, gateway, channel)
            self.channels.links.add(self.links[gateway])
        return self.links[gateway]

    def turn(self) -> list[str]:
        """Handle all items in the inbox; the dispatches so far."""
        self.loop.turn(0.0)
        return self.role.dispatched

    def wait(self) -> list[str]:
        """Wait for the compiler thread; the dispatches so far."""
        self.loop.turn(10.0)
        return self.role.dispatched


@pytest.fixture
def world() -> Any:
    world = World()
    yield world
    world.grammars.may_compile.set()
    world.gate.close()


def test_others_pass_while_a_grammar_is_compiled(world: World) -> None:
    for name, sampling in (("a", NEW), ("b", PLAIN), ("c", KNOWN), ("d", BAD)):
        world.dispatch(name, sampling)
    assert world.turn() == ["g:b", "g:c"]
    world.grammars.may_compile.set()
    while len(world.role.dispatched) < 4:
        world.wait()
    assert world.role.dispatched[2:] == ["g:a", "g:d"], "the engine will say what is wrong with d"
    assert not world.gate.num_waiting
    assert world.role.deadlines_us[:2] == [10**9] * 2 and world.role.deadlines_us[2] < 10**9
    world.dispatch("e", NEW)
    assert world.turn()[4:] == ["g:e"]


def test_what_lost_its_gateway_never_arrives(world: World) -> None:
    world.dispatch("a", NEW, "lost")
    world.dispatch("b", NEW)
    world.inbox.put(LinkOver(world.link("lost"), NodeLost("it hung up")))
    assert world.turn() == []
    world.grammars.may_compile.set()
    while world.gate.num_waiting:
        world.wait()
    assert world.role.dispatched == ["g:b"]


def test_a_node_that_drains_serves_what_had_come_and_nothing_else(world: World) -> None:
    world.dispatch("a", NEW)
    world.turn()
    world.inbox.put(engine_pb2.EngineInput(drain=True))
    for name, sampling in (("b", NEW), ("c", PLAIN)):
        world.dispatch(name, sampling)
    world.turn()
    assert world.refused == [("b", "unavailable"), ("c", "unavailable")]
    assert not world.loop._is_over and world.gate.num_waiting == 1
    world.grammars.may_compile.set()
    world.wait()
    assert world.role.dispatched == ["g:a"] and world.loop._is_over


def test_what_the_engine_then_refuses_fails_alone(world: World) -> None:
    world.role.fails = True
    world.dispatch("a", NEW)
    world.turn()
    world.grammars.may_compile.set()
    assert world.wait() == ["g:a", "failed a/0"]


def test_what_it_refuses_behind_an_adapter_fails_alone_too(world: World) -> None:
    nothing: Any = SimpleNamespace(
        has=lambda digest: False, has_room_for=lambda digest: True, refuse=lambda adapter: [],
        read=lambda path, digest: 1 / 0,
    )  # fmt: skip
    world.gate = world.loop._gate = world.make_gate(nothing)
    world.role.fails = True
    world.dispatch("a", NEW, adapter=node_pb2.Adapter(name="n", digest="d", path="/a"))
    world.turn()
    world.grammars.may_compile.set()
    while not world.role.dispatched:
        world.wait()
    assert world.role.dispatched == ["g:a", "failed a/0"]
