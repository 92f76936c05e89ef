"""Stages of calls on nodes whose clocks are wrong: from the engine's RequestIO to the metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from fakes.clock import FakeClock

from baton.cluster.secret import ClusterSecret
from baton.core.channels.addresses import host_id
from baton.core.membership import Member, Role
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.timeline import Event, Stamp
from baton.engine.scheduling.outputs import TokenOutput
from baton.gateway.engines.engine_connection import EngineConnection, Receive
from baton.gateway.request.engine_link import EngineOutput, PlainToken
from baton.gateway.telemetry.calls.ended_call import stage_seconds
from baton.node.requests.request_io import RequestIO
from baton.proto import codec
from baton.proto.v1 import node_pb2


class OffClock(FakeClock):
    """A node's clock: wall time is `ahead_s` ahead of the gateway's, monotonic time `older_s`."""

    def __init__(self, gateway: FakeClock, ahead_s: float, older_s: float) -> None:
        super().__init__()
        self._gateway, self._ahead_s, self._older_s = gateway, ahead_s, older_s

    def monotonic_s(self) -> float:
        return self._gateway.monotonic_s() + self._older_s

    def unix_ns(self) -> int:
        return self._gateway.unix_ns() + round(self._ahead_s * 1e9)


@dataclass
class Sent:
    outputs: list[node_pb2.RequestOutput] = field(default_factory=list)

    def to_gateway(self, gateway: str, message: node_pb2.NodeMessage) -> None:
        self.outputs += message.outputs.outputs


@dataclass
class Gateway:
    """Collects the outputs of the engine's steps."""

    outputs: list[EngineOutput] = field(default_factory=list)

    def linked(self, engine: EngineConnection, *_: object) -> Receive:
        return self._receive

    def _receive(self, outputs: Sequence[EngineOutput], tokens: Sequence[PlainToken]) -> None:
        self.outputs += outputs


def received(clock: FakeClock, wire: node_pb2.RequestOutput, *, is_here: bool) -> EngineOutput:
    """The output as decoded by the gateway at this moment, from an engine on this host or
    another."""
    host = host_id().hex() if is_here else "0" * 32
    member = Member("e", Role.PREFILL, "p", "h:1", "m", "fp", 9, 4, 9, host_id=host)
    gateway = Gateway()
    connection = EngineConnection(member, ClusterSecret("s"), gateway, clock, 9.0)  # type: ignore[arg-type]
    welcome = node_pb2.Welcome(incarnation="e", role="prefill", model="m", fingerprint="fp")
    connection.take(node_pb2.NodeMessage(welcome=welcome))
    connection.take(node_pb2.NodeMessage(heartbeat=node_pb2.Heartbeat()))
    connection.take(node_pb2.NodeMessage(outputs=node_pb2.StepOutputs(outputs=[wire])))
    (output,) = gateway.outputs
    return output


@pytest.mark.parametrize("ahead_s", [82.0, -82.0])
@pytest.mark.parametrize(
    ("older_s", "is_here", "delivery_s"),
    [(0.0, True, 0.25), (5000.0, False, 0.0), (-0.5, False, 0.0), (5000.0, True, 0.0)],
)
async def test_stages_do_not_depend_on_a_nodes_time_of_day(
    ahead_s: float, older_s: float, is_here: bool, delivery_s: float
) -> None:
    """`older_s`: another host's monotonic clock began at another time; the last case only appears
    to be on this host."""
    clock, sent = FakeClock(), Sent()
    node = OffClock(clock, ahead_s, older_s)
    desk = RequestIO(sent.to_gateway, node, "p", 100)  # type: ignore[arg-type]
    timeline = [Stamp(Event.ARRIVED, clock.unix_ns(), "gateway")]
    clock.advance(1.0)
    timeline.append(Stamp(Event.ROUTED, clock.unix_ns(), "gateway"))
    request = Request("r", 0, (1, 2), SamplingParams(max_tokens=5))
    dispatch = codec.dispatch_to_wire(request, None, 60.0)
    entry = desk.accept("g", dispatch)
    clock.advance(2.0)
    desk.begin_step()
    clock.advance(0.5)
    desk.stamp_started(entry, Event.PREFILL_STARTED)
    desk.stamp(entry, Event.FIRST_TOKEN)
    desk.emit(entry, TokenOutput("r/0", 0, 7, 0.0, None))
    desk.flush()
    clock.advance(delivery_s)
    (wire,) = sent.outputs
    output = received(clock, wire, is_here=is_here)
    timeline += output.stamps
    assert {stamp.node for stamp in output.stamps} == {"p"}
    stages = stage_seconds(timeline, None)
    assert stages == pytest.approx({"gateway_queue": 1.0, "prefill_queue": 2.0, "prefill": 0.5})


async def test_what_says_no_time_is_no_event() -> None:
    def output(*events: node_pb2.NodeEvent) -> EngineOutput:
        return received(FakeClock(), node_pb2.RequestOutput(events=events), is_here=False)

    assert output().stamps == ()
    error = output(node_pb2.NodeEvent(event="lunch", monotonic_ns=1)).error
    assert error is not None and "unreadable" in error.message
    (stamp,) = output(node_pb2.NodeEvent(event="decode_started", monotonic_ns=1 << 63)).stamps
    assert stamp.unix_ns == FakeClock().unix_ns()
