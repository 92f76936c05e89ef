"""A node with an engine without a model: serves gateways' channels with tokens from a formula.

Prefill sends the first token, decode the others, each with its own script of delays, so that the
two streams race as in production. Decode does not wait for a hand-off. Messages from the gateway
are kept for the test; `is_silent`, `kill` and `kill_engine` simulate a faulty node. The node's own
address accepts connections and never responds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from baton.cluster.secret import handshake_key
from baton.core.errors import BatonError, InvalidRequest
from baton.core.membership import Member, Role
from baton.core.request.request import FinishReason, Request
from baton.core.request.timeline import Event
from baton.proto import codec
from baton.proto.v1 import common_pb2, node_pb2

from ..gateway.step_outputs import step_of
from .engine_door import ANOTHER_HOST, HOST, EngineConnection, EngineDoor

HEARTBEAT_S = 0.05


def token_at(prompt: Sequence[int], index: int) -> int:
    """The formula: letters that depend on prompt and position, like a model's tokens."""
    return ord("a") + (sum(prompt) + 7 * index) % 26


def _scores(num_best: int) -> common_pb2.TokenLogprobs:
    """All tokens are as likely as the first ones."""
    return common_pb2.TokenLogprobs(
        logprob=-1.0, top_ids=range(num_best), top_logprobs=[-1.0] * num_best
    )


def expected_text(prompt: str, max_tokens: int) -> str:
    """The expected output of a request for this text with the byte tokenizer."""
    ids = list(prompt.encode())
    return "".join(chr(token_at(ids, i)) for i in range(max_tokens))


@dataclass
class FakeNode:
    """`await start()`, then `member` can be announced. `token_s`: the time per token."""

    role: Role
    name: str
    incarnation: str
    sources: Sequence[str] = ()  # the links of a decode node
    model: str = "demo"
    secret: str | None = None
    first_token_s: float = 0.0
    token_s: float = 0.0
    max_model_len: int = 512
    num_blocks: int = 66
    error: BatonError | None = None  # the response to every dispatch
    is_silent: bool = False
    can_constrain: bool = True
    # The whole output, as ids or as bytes for tokens, or a function that returns it; empty: the
    # formula.
    answer: str | Sequence[int] | Callable[[Request], str] = ""
    dispatched: list[node_pb2.Dispatch] = field(default_factory=list)
    cancelled: list[tuple[str, int, float]] = field(default_factory=list)  # id, attempt, time
    num_sessions: int = 0
    num_requests: int = 0  # requests running here
    most_requests: int = 0  # the most that ever ran at once
    max_num_seqs: int = 0
    step_cost: node_pb2.StepCost | None = None
    _node: asyncio.Server | None = None
    _port: int = 0
    _door: EngineDoor | None = None
    _engine_port: int = 0

    @property
    def member(self) -> Member:
        return Member(
            self.incarnation,
            self.role,
            self.name,
            f"{HOST}:{self._port}",
            self.model,
            "fp",
            self.max_model_len,
            16,
            self.num_blocks,
            engine_address=f"{HOST}:{self._engine_port}",
            host_id=ANOTHER_HOST,
            can_constrain=self.can_constrain,
        )

    async def start(self) -> FakeNode:
        self._node = await asyncio.start_server(_hang_up, HOST, self._port)
        self._port = self._node.sockets[0].getsockname()[1]
        self._door = EngineDoor(
            self.incarnation, handshake_key(self.secret), lambda each: _Gateway(self, each).serve()
        )
        self._engine_port = await self._door.listen(self._engine_port)
        return self

    async def kill(self) -> None:
        """Break all connections at once and accept no more."""
        if self._node is not None:
            self._node.close()
            self._node = None
        await self.kill_engine()

    async def kill_engine(self) -> None:
        """The same for the engine alone."""
        if self._door is not None:
            await self._door.close()
            self._door = None

    async def tokens(self, request: Request, send: Any) -> None:
        """Execute one dispatch: `send(RequestOutput fields)`."""
        base = len(request.output_token_ids)
        last = request.sampling.max_tokens - 1
        if text := self._text(request):
            last = min(last, len(text) - 1)
        if self.error is not None:
            await send(request, error=codec.error_to_wire(self.error))
            return
        if self.role is Role.PREFILL:
            await asyncio.sleep(self.first_token_s)
            await self._send_token(request, base, last, send, Event.FIRST_TOKEN)
            return
        for index in range(base + 1, last + 1):
            await asyncio.sleep(self.token_s)
            event = Event.DECODE_STARTED if index == base + 1 else None
            await self._send_token(request, index, last, send, event)

    async def _send_token(
        self, request: Request, index: int, last: int, send: Any, event: Event | None
    ) -> None:
        fields: dict[str, Any] = {
            "first_index": index,
            "token_ids": [self._token(request, index)],
            "finish_reason": codec.FINISH_TO_WIRE[
                self._reason(request, index) if index == last else None
            ],
            "events": [node_pb2.NodeEvent(event=event.value, monotonic_ns=time.monotonic_ns())]
            if event
            else [],
        }
        if (num_best := request.sampling.logprobs) is not None:
            fields["logprobs"] = [_scores(num_best)]
        if event is Event.FIRST_TOKEN:
            fields["cached_tokens"] = 0
            if (num_best := request.sampling.prompt_logprobs) is not None:
                fields["first_prompt_index"] = 1
                fields["prompt_logprobs"] = [_scores(num_best)] * (
                    len(request.prompt_token_ids) - 1
                )
        if event is Event.DECODE_STARTED:
            fields["transfer"] = node_pb2.TransferInfo(bytes=4096, transport="fake")
        await send(request, **fields)

    def _token(self, request: Request, index: int) -> int:
        if text := self._text(request):
            return text[index]
        return token_at(request.prompt_token_ids, index)

    def _text(self, request: Request) -> Sequence[int]:
        answer = self.answer(request) if callable(self.answer) else self.answer
        return answer.encode() if isinstance(answer, str) else answer

    def _reason(self, request: Request, index: int) -> FinishReason:
        text = self._text(request)
        is_whole = text and index == len(text) - 1
        return FinishReason.STOP if is_whole else FinishReason.LENGTH

    def welcome(self) -> node_pb2.NodeMessage:
        member = self.member
        return node_pb2.NodeMessage(
            welcome=node_pb2.Welcome(
                incarnation=member.incarnation,
                role=member.role.value,
                name=member.name,
                model=member.model,
                fingerprint=member.fingerprint,
                max_model_len=member.max_model_len,
                block_size=member.block_size,
                num_blocks=member.num_blocks,
                max_num_seqs=self.max_num_seqs,
            )
        )

    def heartbeat(self) -> node_pb2.NodeMessage:
        return node_pb2.NodeMessage(
            heartbeat=node_pb2.Heartbeat(
                free_blocks=self.num_blocks - 2,
                num_blocks=self.num_blocks,
                credit_blocks=self.num_blocks // 2,
                num_requests=self.num_requests,
                room_blocks=self.num_blocks - 2,
                step_cost=self.step_cost,
                links=[node_pb2.PeerLink(incarnation=i, transport="fake") for i in self.sources],
            )
        )


class _Gateway:
    """The connection of one gateway."""

    def __init__(self, node: FakeNode, connection: EngineConnection) -> None:
        self._node = node
        self._connection = connection
        self._work: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._outgoing: asyncio.Queue[node_pb2.NodeMessage] = asyncio.Queue()

    async def serve(self) -> None:
        """Serve until the connection ends. Raises asyncio.IncompleteReadError, OSError."""
        node = self._node
        node.num_sessions += 1
        self._outgoing.put_nowait(node.welcome())
        tasks = (asyncio.create_task(self._write()), asyncio.create_task(self._beat()))
        try:
            while True:
                payload = await self._connection.receive()
                message = node_pb2.GatewayMessage.FromString(payload)
                if message.HasField("dispatch"):
                    self._dispatch(message.dispatch)
                elif message.HasField("load_adapter"):
                    self._refuse_adapter(message.load_adapter)
                else:
                    cancel = message.cancel
                    node.cancelled.append((cancel.request_id, cancel.attempt, time.monotonic()))
                    if task := self._work.get((cancel.request_id, cancel.attempt)):
                        task.cancel()
        finally:
            node.num_sessions -= 1
            for task in (*tasks, *self._work.values()):
                task.cancel()

    def _refuse_adapter(self, order: node_pb2.LoadAdapter) -> None:
        """Refuse as an engine without --enable-lora does."""
        error = codec.error_to_wire(InvalidRequest("this engine serves no LoRA adapters", "model"))
        loaded = node_pb2.AdapterLoaded(order_id=order.order_id, error=error)
        self._outgoing.put_nowait(node_pb2.NodeMessage(adapter_loaded=loaded))

    def _dispatch(self, wire: node_pb2.Dispatch) -> None:
        self._node.dispatched.append(wire)
        first = codec.request_from_wire(wire)
        for request_id in (wire.request_id, *wire.fork_request_ids):
            request = dataclasses.replace(first, request_id=request_id)
            key = (request_id, wire.attempt)
            task = asyncio.create_task(self._node.tokens(request, self._send))
            self._work[key] = task
            self._node.num_requests += 1
            self._node.most_requests = max(self._node.most_requests, self._node.num_requests)
            task.add_done_callback(partial(self._over, key))

    def _over(self, key: tuple[str, int], _: asyncio.Task[None]) -> None:
        self._work.pop(key, None)
        self._node.num_requests -= 1

    async def _send(self, request: Request, **fields: Any) -> None:
        if not self._node.is_silent:
            output = node_pb2.RequestOutput(
                request_id=request.request_id, attempt=request.attempt, **fields
            )
            self._outgoing.put_nowait(node_pb2.NodeMessage(outputs=step_of(output)))
            await asyncio.sleep(0)

    async def _beat(self) -> None:
        while True:
            if not self._node.is_silent:
                self._outgoing.put_nowait(self._node.heartbeat())
            await asyncio.sleep(HEARTBEAT_S)

    async def _write(self) -> None:
        """Write as fast as the gateway reads."""
        with suppress(OSError):  # the reader notices the end
            while True:
                message = await self._outgoing.get()
                self._connection.send(message.SerializeToString())
                await self._connection.writer.drain()


def _hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()
