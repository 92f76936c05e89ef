"""A prefill and a decode engine, each with its role and loop, in one thread, driven by a test.

The test simulates gateways, network and copy engine: it decides which loop takes a turn, when a
pull advances, when the channel breaks. The model is that of `fakes.runner`, so that wrong KV
changes the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from engines.integrity import check_integrity
from fakes.handoff.memory_transport import MemoryPool, MemoryTransport, MemoryWindow

from baton.core.channels.addresses import HOST_ID_BYTES
from baton.core.request.request import FinishReason, Request, Ticket
from baton.core.request.sampling_params import SamplingParams
from baton.decode_node.role import DecodeRole
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.kv.limits import EngineLimits
from baton.kv_transfer.protocol.messages import Hello, Message, Refused, decode, encode
from baton.kv_transfer.protocol.puller import Puller
from baton.kv_transfer.protocol.source import Source
from baton.kv_transfer.window.block_pieces import BlockPiece
from baton.kv_transfer.window.network_address import KEY_BYTES, PoolAccess, RemotePool
from baton.node.channels.engine_channels import EngineChannels
from baton.node.channels.links import Kind, Link
from baton.node.engine_process.cache_report import CacheReport
from baton.node.engine_process.engine_loop import EngineLoop
from baton.node.engine_process.heartbeat import EngineNumbers, HeartbeatSender
from baton.node.engine_process.promise_orders import PromiseOrders
from baton.node.peers.peers import Peers
from baton.node.peers.prefixes import Prefixes
from baton.node.peers.windows import Windows
from baton.node.requests.request_io import RequestIO
from baton.prefill_node.role import PrefillRole
from baton.proto import codec
from baton.proto.v1 import engine_pb2, node_pb2

from ..clock import FakeClock, FakeEntropy
from ..gateway.step_outputs import outputs_of
from ..runner import FakeRunner
from .channel_pairs import AnyChannel, MakePair, PlayedChannel, played_pair, socket_pair
from .inbox import FakeInbox, SocketInbox

SOURCE, PULLER = "a" * 32, "b" * 32
HERE = b"h" * HOST_ID_BYTES
ACCESS = PoolAccess(HERE, 0, bytes(KEY_BYTES))
BLOCK_SIZE = 4
VOCAB_SIZE = 1000
LEASE_S, LINK_WAIT_S = 10.0, 5.0
GATEWAY = "gateway"

# No grammar is compiled, no adapter read.
_OPEN_GATE: Any = SimpleNamespace(
    num_waiting=0, admits=lambda *_: True, gateway_lost=lambda _: None,
    released=lambda gated: gated.message,
)  # fmt: skip


@dataclass
class Received:
    """The outputs that the gateway received for one request from one engine."""

    tokens: dict[int, int] = field(default_factory=dict)  # index -> token id
    finish_reason: FinishReason | None = None
    error: str | None = None
    events: list[str] = field(default_factory=list)
    cached_tokens: int | None = None
    transfer: node_pb2.TransferInfo | None = None
    logprobs: dict[int, float] = field(default_factory=dict)  # index -> the token's
    prompt_logprobs: dict[int, float] = field(default_factory=dict)  # position -> the token's

    @property
    def num_ends(self) -> int:
        return (self.finish_reason is not None) + (self.error is not None)

    def take(self, output: node_pb2.RequestOutput) -> None:
        assert self.num_ends == 0, "an output after the end"
        for index, token_id in enumerate(output.token_ids, start=output.first_index):
            assert index not in self.tokens, "a double token"
            self.tokens[index] = token_id
        for index, logprobs in enumerate(output.logprobs, start=output.first_index):
            self.logprobs[index] = logprobs.logprob
        for index, logprobs in enumerate(output.prompt_logprobs, start=output.first_prompt_index):
            assert index not in self.prompt_logprobs, "told twice"
            self.prompt_logprobs[index] = logprobs.logprob
        self.finish_reason = codec.FINISH_FROM_WIRE.get(output.finish_reason)
        self.error = output.error.code if output.HasField("error") else None
        self.events += [stamp.event for stamp in output.events]
        if output.HasField("cached_tokens"):
            self.cached_tokens = output.cached_tokens
        if output.HasField("transfer"):
            self.transfer = output.transfer


class Node:
    """One engine with its role and loop. `received[key]`: its outputs to the world's gateways."""

    def __init__(
        self,
        clock: FakeClock,
        incarnation: str,
        num_blocks: int,
        budget: int,
        counts_steps: bool,
        make_pair: MakePair,
        inbox: FakeInbox | SocketInbox,
    ) -> None:
        self.incarnation = incarnation
        self._make_pair = make_pair
        self.pool = MemoryPool(num_blocks, FakeRunner(num_blocks, BLOCK_SIZE).block_bytes)
        memory = memoryview(self.pool.block(0).obj)
        self.runner = FakeRunner(
            num_blocks,
            BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            memory=memory,
            runs_ahead=counts_steps,
            num_looks=2 * counts_steps,
            on_completed=self._count if counts_steps else None,
        )
        self.pool.num_steps = 0 if counts_steps else None
        limits = EngineLimits(
            num_blocks, BLOCK_SIZE, max_model_len=256, max_num_batched_tokens=budget,
            block_bytes=self.pool.block_bytes,
        )  # fmt: skip
        self.engine = Engine(
            EngineParts(
                self.runner, limits, self.pool.generations, fingerprint="toy", eos_token_ids=()
            )
        )
        self.hello = Hello(incarnation, {"model": "toy"})
        self.inbox = inbox
        self.frames: list[engine_pb2.EngineOutput] = []  # sent to the supervisor
        self.members: list[engine_pb2.Members] = []
        self.channels = EngineChannels(inbox, node_pb2.Welcome(incarnation=incarnation))
        self.cache_report = CacheReport(self.frames.append)
        self.desk = RequestIO(self.channels.to_gateway, clock, incarnation[:1], VOCAB_SIZE)
        self.clock = clock
        self.received: dict[str, Received] = {}
        self.timeout_s = math.inf  # returned by the last turn for the next one
        self._gateways: dict[str, AnyChannel] = {}  # the gateways' ends
        self.sent: list[node_pb2.NodeMessage | Message | Refused] = []  # on simulated channels

    def _count(self, step: int) -> None:
        self.pool.num_steps = step

    def peers(self, transport: MemoryTransport, lease_s: float) -> Peers:
        """The part that lends KV to peers and pulls KV from them."""
        hello, name = self.hello, self.incarnation
        source = Source(hello, self.clock, lease_s, ACCESS)
        puller = Puller(hello, self.clock, LINK_WAIT_S)
        make_prefixes = partial(
            Prefixes, self.engine, puller, self.clock, FakeEntropy(int(name[:2], 16)),
            incarnation=name, lease_s=lease_s,
        )  # fmt: skip
        return Peers(
            source,
            puller,
            lambda feed: Windows(transport.open, self.post, feed, lambda run: run()),
            self.channels,
            self.desk.flush,
            make_prefixes,
            self.clock,
        )

    def start(self, role: PrefillRole | DecodeRole, peers: Peers) -> None:
        pulse = HeartbeatSender(lambda numbers: None, 1.0, self.clock)
        self.role, self.peers, orders = role, peers, PromiseOrders(self.engine.promise)
        numbers = EngineNumbers(
            self.engine, role, peers, self.desk, orders, _OPEN_GATE, pulse, self.clock
        )
        self.loop = EngineLoop(
            self.engine, role, peers, self.desk, self.cache_report, self.inbox,
            self.frames.append, pulse, numbers, self.clock, self.channels, _OPEN_GATE, orders,
            self.members.append,
        )  # fmt: skip

    def post(self, run: Callable[[], None]) -> None:
        self.inbox.put(run)

    def tell(self, **body: object) -> None:
        """Put a frame from the supervisor into the inbox."""
        self.inbox.put(engine_pb2.EngineInput(**body))

    # -- who is linked -------------------------------------------------------------------------

    def link(self, kind: Kind, name: str, channel: AnyChannel) -> Link:
        """`sent` gets the messages sent on a simulated channel."""
        unpack = node_pb2.NodeMessage.FromString if kind is Kind.GATEWAY else decode
        if isinstance(channel, PlayedChannel):
            channel.on_send = lambda payload: self.sent.append(unpack(payload))
        return Link(kind, name, channel)

    def join(self, kind: Kind, name: str, channel: AnyChannel, *, opens_late: bool = False) -> None:
        """Add a link that exists from the next turn on."""
        link = self.link(kind, name, channel)
        link.opens_late = opens_late
        self.inbox.put(link)

    def connect(self, name: str) -> AnyChannel:
        """Open a channel; returns the gateway's end, which the caller owns."""
        ours, theirs = self._make_pair()
        self.join(Kind.GATEWAY, name, ours)
        return theirs

    def hear_gateway(self, message: node_pb2.GatewayMessage, name: str = GATEWAY) -> None:
        """Deliver a message from the world's gateway of that name, which is linked at once if
        needed."""
        if name not in self._gateways:
            ours, self._gateways[name] = self._make_pair()
            self.channels.add(self.link(Kind.GATEWAY, name, ours))
        self._gateways[name].send(message.SerializeToString())

    def lose_gateway(self, name: str = GATEWAY) -> None:
        """Close the gateway's end of the channel."""
        if (gateway := self._gateways.pop(name, None)) is not None:
            gateway.close()

    def take_outputs(self) -> None:
        """Take the outputs that the world's gateways received."""
        for gateway in self._gateways.values():
            while payloads := gateway.receive()[0]:
                for output in _outputs(payloads):
                    key = f"{output.request_id}/{output.attempt}"
                    self.received.setdefault(key, Received()).take(output)

    # -- its state -----------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        return self.inbox.empty() and self.timeout_s != 0.0

    def close(self) -> None:
        """Close a node with real sockets."""
        self.channels.close()
        for name in [*self._gateways]:
            self.lose_gateway(name)
        if isinstance(self.inbox, SocketInbox):
            self.inbox.close()

    def is_clean(self) -> bool:
        """Whether nothing is held for any request, and all block references are accounted for."""
        check_integrity(self.engine)
        ledger = self.loop.ledger()
        return not (ledger["requests"] or ledger["transfers"]) and (
            self.engine.pool.counts.held == 0 and self.role.is_idle()
        )


def _outputs(payloads: Iterable[bytes]) -> Iterator[node_pb2.RequestOutput]:
    for payload in payloads:
        yield from outputs_of(node_pb2.NodeMessage.FromString(payload).outputs)


class _Transport(MemoryTransport):
    """Records its windows, whose pulls the test advances."""

    def __init__(
        self, pool: MemoryPool, sources: dict[str, MemoryPool], windows: list[MemoryWindow]
    ) -> None:
        super().__init__(pool, sources)
        self.windows = windows

    def connect(self, source: RemotePool, piece: BlockPiece | None = None) -> MemoryWindow:
        self.windows.append(super().connect(source))
        return self.windows[-1]


class NodeWorld:
    """`prefill` and `decode`, linked on demand."""

    def __init__(
        self,
        *,
        prefill_blocks: int = 66,
        decode_blocks: int = 66,
        chunk_tokens: int = 8,
        counts_steps: bool = False,
        is_wired: bool = False,
    ) -> None:
        """`is_wired`: with real sockets; `wired_world` closes them.

        `counts_steps`: the prefill engine runs ahead, and announces chunks when it launches them.
        """
        self.clock = FakeClock()
        self._make_pair: MakePair = socket_pair if is_wired else played_pair
        inboxes = [SocketInbox() if is_wired else FakeInbox() for _ in range(2)]
        of_prefill, of_decode = ((self._make_pair, inbox) for inbox in inboxes)
        self.prefill = Node(
            self.clock, SOURCE, prefill_blocks, chunk_tokens, counts_steps, *of_prefill
        )
        self.decode = Node(self.clock, PULLER, decode_blocks, 64, False, *of_decode)
        p, d = self.prefill, self.decode
        pools = {node.incarnation: node.pool for node in (p, d)}
        self.windows: list[MemoryWindow] = []  # of both engines
        self.ends: tuple[AnyChannel, ...] = ()  # of the pair's channel: the source's, the puller's
        self.back_ends: tuple[AnyChannel, ...] = ()  # of the other channel, by which prefill pulls
        to_p, to_d = (_Transport(node.pool, pools, self.windows) for node in (p, d))
        of_p, of_d = p.peers(to_p, LEASE_S), d.peers(to_d, LEASE_S)
        p.start(PrefillRole(p.engine, p.desk, of_p, self.clock), of_p)
        d.start(DecodeRole(d.engine, d.desk, of_d, self.clock), of_d)

    # -- the network ---------------------------------------------------------------------------

    @property
    def is_linked(self) -> bool:
        return bool(self.ends) and not any(end.is_closed or end.is_cut for end in self.ends)

    def link(self) -> None:
        """Open the pair's channel; it takes some turns until the source's pool can be read."""
        self.ends = self._make_pair()
        self.prefill.join(Kind.PULLER, PULLER, self.ends[0])
        self.decode.join(Kind.SOURCE, SOURCE, self.ends[1])

    def link_back(self) -> None:
        """Open the channel by which the prefill engine pulls; its window is opened when needed."""
        self.back_ends = self._make_pair()
        self.decode.join(Kind.PULLER, SOURCE, self.back_ends[0])
        self.prefill.join(Kind.SOURCE, PULLER, self.back_ends[1], opens_late=True)

    def unlink(self) -> None:
        """Break the channels: both sides see their end after all earlier messages."""
        for ends in (self.ends, self.back_ends):
            if ends and not ends[0].is_closed:
                ends[0].cut()

    def hear_peer(self, node: Node, message: Message) -> None:
        """Deliver a message from its peer to `node`, if they are linked."""
        if self.is_linked:
            self.ends[node is self.prefill].send(encode(message))

    # -- the gateway ---------------------------------------------------------------------------

    def dispatch(
        self, request: Request, node: Node, ticket: Ticket | None, deadline_s: float
    ) -> None:
        message = node_pb2.GatewayMessage(
            dispatch=codec.dispatch_to_wire(request, ticket, deadline_s)
        )
        node.hear_gateway(message)

    def hand_off(self, request: Request, *, deadline_s: float = 60.0) -> None:
        """Dispatch to both nodes, as a gateway does."""
        ticket = Ticket(request.request_id, SOURCE, PULLER)
        self.dispatch(request, self.prefill, ticket, deadline_s)
        self.dispatch(request, self.decode, ticket, deadline_s)

    def cancel(self, request: Request) -> None:
        cancel = node_pb2.Cancel(request_id=request.request_id, attempt=request.attempt)
        message = node_pb2.GatewayMessage(cancel=cancel)
        for node in (self.prefill, self.decode):
            node.hear_gateway(message)

    def tokens(self, request: Request) -> list[int]:
        """The request's tokens from both nodes; asserts that there is no gap and no duplicate."""
        merged: dict[int, int] = {}
        for node in (self.prefill, self.decode):
            tokens = node.received.get(request.key, Received()).tokens
            assert not merged.keys() & tokens.keys(), "a token from both nodes"
            merged |= tokens
        first = len(request.output_token_ids)
        assert sorted(merged) == list(range(first, first + len(merged)))
        return [merged[index] for index in sorted(merged)]

    # -- time ----------------------------------------------------------------------------------

    def turn(self, node: Node) -> None:
        """One turn of the node's loop, without waiting."""
        node.timeout_s = node.loop.turn(0.0)
        node.take_outputs()
        self._check_fences(node)

    def _check_fences(self, node: Node) -> None:
        """Check that the destination blocks of pulls in flight are not released."""
        for window in self.windows:
            if window.destination is node.pool:
                for block_id in window.destinations:
                    assert node.engine.pool.num_refs(block_id), "a copy writes to a free block"

    def pull(self) -> None:
        """Advance the oldest pull in flight by a block."""
        for window in self.windows:
            if window.pulls:
                window.pulls[0].advance(window.source.block_bytes)
                return

    def num_pulls(self) -> int:
        return sum(len(window.pulls) for window in self.windows)

    def settle(self) -> None:
        """Run everything that happens without time passing."""
        for _ in range(1000):
            self.turn(self.prefill)
            self.turn(self.decode)
            self.pull()
            if self.prefill.is_quiet() and self.decode.is_quiet() and not self.num_pulls():
                return
        raise AssertionError("the world does not settle")

    def expire(self) -> None:
        """Let leases and waits run out, then settle."""
        self.clock.advance(LEASE_S + 1)
        self.settle()


@contextmanager
def wired_world() -> Iterator[NodeWorld]:
    """Engines whose channels are real sockets."""
    world = NodeWorld(is_wired=True)
    yield world
    for node in (world.prefill, world.decode):
        node.close()


def request(
    number: int, num_prompt_tokens: int, *, max_tokens: int = 6, attempt: int = 0
) -> Request:
    """A greedy request; different numbers share no block."""
    prompt = tuple((7 * number + 13 * i) % VOCAB_SIZE for i in range(num_prompt_tokens))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(f"{number:032x}", attempt, prompt, sampling)
