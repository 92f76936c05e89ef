"""An engine's loop and a gateway that speaks with it directly: work, breaks, an orderly end."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from fakes.gateway.step_outputs import outputs_of
from fakes.node.node_world import Node, Received, direct_world, request
from fakes.runner import expected_tokens

from baton.core.channels.direct_channel import DirectChannel
from baton.core.channels.direct_question import ACCEPTED, Asker, Question, ask
from baton.core.channels.framing import MAX_FRAME_BYTES
from baton.core.errors import NodeLost
from baton.core.request.request import Request
from baton.node.channels import direct_gateways
from baton.proto import codec
from baton.proto.v1 import engine_pb2, node_pb2


@dataclass
class Gateway:
    """Its stream's id, and its end of the channel."""

    name: str
    channel: DirectChannel

    def say(self, **body: object) -> None:
        self.channel.send(node_pb2.GatewayMessage(**body).SerializeToString())

    def dispatch(self, one: Request) -> None:
        self.say(dispatch=codec.dispatch_to_wire(one, node_pb2.WORK_LOCAL, None, 60.0))

    def hear(self, one: Request) -> Received:
        """All that has come; it must be about this request alone."""
        received = Received()
        payloads, _ = self.channel.receive()
        for payload in payloads:
            for output in outputs_of(node_pb2.NodeMessage.FromString(payload).outputs):
                assert f"{output.request_id}/{output.attempt}" == one.key
                received.take(output)
        return received


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A decode engine that listens."""
    with direct_world(monkeypatch) as (world, direct):
        direct[world.decode.incarnation][0].listen()
        yield world.decode


def connect(node: Node) -> Gateway:
    name, token = secrets.token_hex(16), secrets.token_bytes(32)
    node.tell(gateway_linked=engine_pb2.GatewayLinked(gateway=name, token=token))
    channel = ask(Question(Asker.GATEWAY, node.incarnation, name, token))
    turn(node, 2)
    assert channel.receive() == ([ACCEPTED], False)
    channel.allow(MAX_FRAME_BYTES, MAX_FRAME_BYTES)
    return Gateway(name, channel)


def turn(node: Node, times: int = 1) -> None:
    for _ in range(times):
        node.timeout_s = node.loop.turn(0.0)


def run(node: Node) -> None:
    turn(node)
    while not node.is_quiet():
        turn(node)


def ends(node: Node) -> list[engine_pb2.CloseGateway]:
    """What the supervisor was told; of outputs, nothing."""
    assert not [frame for frame in node.frames if frame.HasField("to_gateway")]
    return [f.close_gateway for f in node.frames if f.HasField("close_gateway")]


def test_work_comes_and_its_outputs_go_directly(decode: Node) -> None:
    one, other = request(1, 19), request(2, 7)
    gateways = [connect(decode), connect(decode)]
    for gateway, each in zip(gateways, (one, other), strict=True):
        gateway.dispatch(each)
    run(decode)
    for gateway, each in zip(gateways, (one, other), strict=True):
        received = gateway.hear(each)
        expected = expected_tokens(each.prompt_token_ids, each.sampling.max_tokens)
        assert [received.tokens[i] for i in sorted(received.tokens)] == expected
        assert received.num_ends == 1
    assert not ends(decode)
    assert decode.is_clean()
    for gateway in gateways:
        gateway.channel.close()


def test_a_cancel_behind_its_dispatch_is_behind_it(decode: Node) -> None:
    gateway, one = connect(decode), request(1, 19)
    gateway.dispatch(one)
    gateway.say(cancel=node_pb2.Cancel(request_id=one.request_id, attempt=one.attempt))
    run(decode)
    assert gateway.hear(one).num_ends == 0
    assert decode.is_clean()
    gateway.channel.close()


@pytest.mark.parametrize("num_turns", range(8))
def test_a_break_frees_what_the_gateway_asked_for(decode: Node, num_turns: int) -> None:
    gateway, other = connect(decode), connect(decode)
    one, kept = request(1, 19, max_tokens=50), request(2, 7)
    gateway.dispatch(one)
    other.dispatch(kept)
    turn(decode, num_turns)
    gateway.channel.close()
    run(decode)
    (end,) = ends(decode)
    assert end.gateway == gateway.name and end.error.code == NodeLost.code
    assert other.hear(kept).num_ends == 1
    assert decode.is_clean()
    decode.tell(gateway_lost=gateway.name)  # its stream's end: nothing is left to do
    run(decode)
    assert len(ends(decode)) == 1
    other.channel.close()


def test_garbage_ends_its_gateway_and_not_the_engine(decode: Node) -> None:
    gateway, other, one = connect(decode), connect(decode), request(1, 19)
    gateway.channel.send(b"")  # a message that says nothing
    gateway.channel.send(b"\xff\xff\xff")
    other.dispatch(one)
    run(decode)
    assert [end.gateway for end in ends(decode)] == [gateway.name]
    assert other.hear(one).num_ends == 1
    gateway.channel.close()
    other.channel.close()


def test_a_drained_engine_stays_until_it_was_heard(
    decode: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_gateways, "MAX_UNSENT_BYTES", 1 << 20)
    gateway, one = connect(decode), request(1, 19)
    gateway.channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    assert decode.direct is not None
    filling = node_pb2.NodeMessage(
        outputs=node_pb2.StepOutputs(outputs=[node_pb2.RequestOutput(request_id="f" * 500_000)])
    )
    assert decode.direct.gateways.send(gateway.name, filling)
    gateway.dispatch(one)
    decode.tell(drain=True)
    turn(decode, 20)
    assert not decode.loop._is_over
    payloads: list[bytes] = []
    while not decode.loop._is_over:
        payloads += gateway.channel.receive()[0]
        turn(decode)
    payloads += gateway.channel.receive()[0]
    assert node_pb2.NodeMessage.FromString(payloads[0]) == filling
    last = node_pb2.NodeMessage.FromString(payloads[-1])
    assert outputs_of(last.outputs)[-1].finish_reason or outputs_of(last.outputs)[-1].error.code
    gateway.channel.close()
