"""An engine's loop and gateways over real channels: work, breaks, replacement, shutdown."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from fakes.gateway.step_outputs import outputs_of
from fakes.node.channel_pairs import AnyChannel
from fakes.node.node_world import Node, Received, request, wired_world
from fakes.runner import expected_tokens

from baton.core.request.request import Request
from baton.proto import codec
from baton.proto.v1 import engine_pb2, node_pb2


@dataclass
class Gateway:
    """A gateway's name and its end of the channel."""

    name: str
    channel: AnyChannel
    is_over: bool = False
    others: list[node_pb2.NodeMessage] = field(default_factory=list)  # all messages but outputs

    def say(self, **body: object) -> None:
        self.channel.send(node_pb2.GatewayMessage(**body).SerializeToString())  # type: ignore[arg-type]

    def dispatch(self, one: Request) -> None:
        self.say(dispatch=codec.dispatch_to_wire(one, None, 60.0))

    def hear(self, one: Request) -> Received:
        """The outputs received since the last call, which must all be for this request."""
        received = Received()
        payloads, self.is_over = self.channel.receive()
        for payload in payloads:
            message = node_pb2.NodeMessage.FromString(payload)
            if not message.HasField("outputs"):
                self.others.append(message)
            for output in outputs_of(message.outputs):
                assert f"{output.request_id}/{output.attempt}" == one.key
                received.take(output)
        return received


@pytest.fixture
def decode() -> Iterator[Node]:
    with wired_world() as world:
        yield world.decode


def connect(node: Node, name: str) -> Gateway:
    gateway = Gateway(name, node.connect(name))
    turn(node)
    return gateway


def turn(node: Node, times: int = 1) -> None:
    for _ in range(times):
        node.timeout_s = node.loop.turn(0.0)


def run(node: Node) -> None:
    turn(node)
    while not node.is_quiet():
        turn(node)


def gateways_of(node: Node) -> list[str]:
    links = node.channels.links.ledger()["links"]
    assert isinstance(links, dict)
    return [*links["gateway"]]


def test_work_comes_and_its_outputs_go_to_who_asked(decode: Node) -> None:
    one, other = request(1, 19), request(2, 7)
    gateways = [connect(decode, name) for name in "xy"]
    for gateway, each in zip(gateways, (one, other), strict=True):
        gateway.dispatch(each)
    run(decode)
    for gateway, each in zip(gateways, (one, other), strict=True):
        received = gateway.hear(each)
        expected = expected_tokens(each.prompt_token_ids, each.sampling.max_tokens)
        assert [received.tokens[i] for i in sorted(received.tokens)] == expected
        assert received.num_ends == 1
        assert [message.WhichOneof("body") for message in gateway.others] == ["welcome"]
        gateway.channel.close()
    assert decode.is_clean()


def test_a_cancel_behind_its_dispatch_is_behind_it(decode: Node) -> None:
    gateway, one = connect(decode, "x"), request(1, 19)
    gateway.dispatch(one)
    gateway.say(cancel=node_pb2.Cancel(request_id=one.request_id, attempt=one.attempt))
    run(decode)
    assert gateway.hear(one).num_ends == 0
    assert decode.is_clean()
    gateway.channel.close()


@pytest.mark.parametrize("num_turns", range(8))
def test_a_break_frees_what_the_gateway_asked_for(decode: Node, num_turns: int) -> None:
    gateway, other = connect(decode, "x"), connect(decode, "y")
    one, kept = request(1, 19, max_tokens=50), request(2, 7)
    gateway.dispatch(one)
    other.dispatch(kept)
    turn(decode, num_turns)
    gateway.channel.close()
    run(decode)
    assert gateways_of(decode) == ["y"]
    assert other.hear(kept).num_ends == 1
    assert decode.is_clean()
    other.channel.close()


@pytest.mark.parametrize("num_turns", range(8))
def test_a_gateway_that_comes_again_is_another(decode: Node, num_turns: int) -> None:
    """A gateway that connects again counts as another: requests of the older channel are dropped,
    and none of their outputs are sent on the newer one."""
    older = connect(decode, "x")
    one, other = request(1, 19, max_tokens=50), request(2, 7)
    older.dispatch(one)
    turn(decode, num_turns)
    newer = connect(decode, "x")
    older.hear(one)
    newer.dispatch(other)
    run(decode)
    assert newer.hear(other).num_ends == 1
    older.hear(one)
    assert older.is_over
    assert gateways_of(decode) == ["x"]
    assert decode.is_clean()
    for gateway in (older, newer):
        gateway.channel.close()


def test_garbage_ends_its_gateway_and_not_the_engine(decode: Node) -> None:
    gateway, other, one = connect(decode, "x"), connect(decode, "y"), request(1, 19)
    gateway.say(cancel=node_pb2.Cancel())  # of an unknown request
    gateway.channel.send(b"\x78\x01")  # a message of an unknown kind
    gateway.channel.send(b"\xff\xff\xff")
    other.dispatch(one)
    run(decode)
    assert gateways_of(decode) == ["y"]
    gateway.hear(one)
    turn(decode)
    assert gateway.others[-1].refused.code == "invalid_request"
    assert other.hear(one).num_ends == 1
    gateway.channel.close()
    other.channel.close()


def test_a_drained_engine_stays_until_it_was_heard(decode: Node) -> None:
    gateway, one = connect(decode, "x"), request(1, 19)
    assert gateway.channel.receive()[0]
    gateway.channel._socket.setsockopt(  # type: ignore[union-attr]
        socket.SOL_SOCKET, socket.SO_RCVBUF, 1
    )
    filling = node_pb2.NodeMessage(
        outputs=node_pb2.StepOutputs(outputs=[node_pb2.RequestOutput(request_id="f" * 500_000)])
    )
    decode.channels.to_gateway(gateway.name, filling)
    gateway.dispatch(one)
    turn(decode)
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


def test_who_admits_and_dials_engines_is_told_the_directory_s_list(decode: Node) -> None:
    members = engine_pb2.Members(is_away=True)
    decode.tell(members=members)
    turn(decode)
    assert decode.members == [members]
