"""A process that plays the nodes behind a gateway: one prefill and one decode engine, no model.

    python -m baton.bench.played.fake_nodes REDIS_URL [--step-s ...] [...]
Without options as fast as the gateway takes it; with them at a given pace. Messages are put
together from ready-made bytes, since what the nodes take of the cores is missing from the gateway's
share. Prints `ready: ADDRESS`; at SIGTERM writes when which token went out, if a file is named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from baton.cluster.link_handshake import ACCEPTED as ACCEPTED_LINK
from baton.cluster.link_handshake import SESSION, admit, listener_ends
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.secret import handshake_key
from baton.core.channels.direct_question import ACCEPTED, PURPOSE, TOKEN_BYTES, Question
from baton.core.channels.framing import LENGTH_BYTES, decode_length, encode_payload
from baton.core.channels.handshake import Listener
from baton.core.channels.same_host import host_id, socket_address
from baton.core.membership import Member, Role
from baton.core.process import event_loop
from baton.proto.v1 import common_pb2, node_pb2

CLUSTER = "bench"
PREFILL, DECODE = secrets.token_hex(16), secrets.token_hex(16)  # several play at once
TOKEN_ID, TEXT = 328, " the"  # of the demo model
_NUM_BLOCKS = 100_000
_OPTIONS = (("grpc.so_reuseport", 0),)
_BEAT_S = 0.25
_MAX_RUNNING = 1 << 30  # as many as there are


@dataclass(frozen=True, slots=True)
class StepPace:
    """How long engines take; zeros: no time at all."""

    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    max_running: int = _MAX_RUNNING
    max_model_len: int = 2048

    def prefill_s(self, num_tokens: int) -> float:
        return num_tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0


@dataclass(slots=True)
class _Run:
    """One request on one engine. `head`: a whole output's bytes but for the position; `id_field`,
    `attempt`: its part of the columns."""

    gateway: _Gateway
    request_id: str
    max_tokens: int
    num_prompt_tokens: int
    head: bytes
    id_field: bytes
    attempt: bytes
    index: int
    sent_s: list[float] = field(default_factory=list)


class _Gateway:
    """One stream's way back, and the direct channel for steps, once it has come."""

    def __init__(self, context: Any) -> None:
        self.name, self.token = secrets.token_hex(16), secrets.token_bytes(TOKEN_BYTES)
        self.direct: asyncio.StreamWriter | None = None
        self._context = context
        self._lock = asyncio.Lock()

    async def write(self, message: bytes) -> None:
        """Over the stream; one write at a time."""
        async with self._lock:
            await self._context.write(message)

    async def write_step(self, message: bytes) -> None:
        if self.direct is None:
            await self.write(message)
        else:
            self.direct.write(encode_payload(message))
            await self.direct.drain()


class _Step:
    """A StepOutputs: last tokens and a prefill's in whole outputs, the others by column."""

    def __init__(self) -> None:
        self._outputs: list[bytes] = []
        self._runs: list[_Run] = []

    def add(self, run: _Run) -> None:
        """The request's next token."""
        index = run.index
        run.index += 1
        if index and run.index < run.max_tokens:
            self._runs.append(run)
            return
        output = run.head + b"\x18" + _varint(index)
        if run.index == run.max_tokens:
            output += b"\x28%c" % common_pb2.FINISH_REASON_LENGTH
        self._outputs.append(_field(1, output))

    def message(self) -> bytes:
        tokens, runs = b"", self._runs
        if runs:
            attempts = b"".join([run.attempt for run in runs])
            indices = b"".join([_VARINTS[run.index - 1] for run in runs])
            columns = (attempts, indices, _TOKEN_ID * len(runs))
            fields = [_field(number, data) for number, data in enumerate(columns, 2)]
            tokens = _field(2, b"".join([*(run.id_field for run in runs), *fields]))
        return b"".join(self._outputs) + tokens


class _Engine:
    """What both have: who runs, and who was cancelled."""

    def __init__(self, role: Role, pace: StepPace) -> None:
        self.role = role
        self.pace = pace
        self.waiting: dict[str, _Run] = {}
        self.running: dict[str, _Run] = {}
        self.has_work = asyncio.Event()
        self.log: dict[str, list[float]] = {}

    def take(self, gateway: _Gateway, message: node_pb2.GatewayMessage) -> None:
        if not message.HasField("dispatch"):
            self.drop(message.cancel.request_id)
            return
        dispatch = message.dispatch
        output = node_pb2.RequestOutput(
            request_id=dispatch.request_id, attempt=dispatch.attempt, token_ids=(TOKEN_ID,)
        )
        if self.role is Role.PREFILL:
            output.cached_tokens = 0
        run = _Run(
            gateway,
            dispatch.request_id,
            dispatch.sampling.max_tokens,
            len(dispatch.prompt_token_ids) // 4,
            output.SerializeToString(),
            _field(1, dispatch.request_id.encode()),
            _varint(dispatch.attempt),
            index=int(self.role is Role.DECODE),
        )
        self.waiting[run.request_id] = run
        self.has_work.set()

    def drop(self, request_id: str) -> None:
        self.waiting.pop(request_id, None)
        self.running.pop(request_id, None)

    async def tell(self, runs: Sequence[_Run]) -> None:
        """One message for each gateway that has one of these: each one's next token."""
        steps: dict[_Gateway, _Step] = {}
        now_s = time.monotonic()
        for run in runs:
            if (step := steps.get(run.gateway)) is None:
                step = steps[run.gateway] = _Step()
            step.add(run)
            if self.pace.step_s:
                self.log.setdefault(run.request_id, []).append(now_s)
        for gateway, step in steps.items():
            await gateway.write_step(_field(2, step.message()))

    def heartbeat(self) -> bytes:
        links = [node_pb2.PeerLink(incarnation=PREFILL, transport="none")]
        beat = node_pb2.Heartbeat(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            waiting_tokens=sum(run.num_prompt_tokens for run in self.waiting.values())
            if self.role is Role.PREFILL
            else 0,
            free_blocks=_NUM_BLOCKS,
            num_blocks=_NUM_BLOCKS,
            credit_blocks=_NUM_BLOCKS,
            links=links if self.role is Role.DECODE else (),
            num_requests=len(self.running) + len(self.waiting),
            room_blocks=_NUM_BLOCKS,
        )
        if rate := self.pace.prefill_tokens_per_s:
            beat.prefill_cost.token_s = 1 / rate
        return bytes(node_pb2.NodeMessage(heartbeat=beat).SerializeToString())


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


def _field(number: int, data: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(len(data)) + data


_TOKEN_ID = _varint(TOKEN_ID)
_VARINTS = tuple(map(_varint, range(1 << 14)))


class _Nodes:
    """Both engines, and the one hand-off between them: a request decodes once it is prefilled."""

    def __init__(self, pace: StepPace) -> None:
        self.address = ""
        self.pace = pace
        self.prefill = _Engine(Role.PREFILL, pace)
        self.decode = _Engine(Role.DECODE, pace)
        self._listeners: list[asyncio.Server] = []
        self._gateways: dict[str, _Gateway] = {}
        self._prefilled: deque[str] = deque(maxlen=100_000)
        self._known: set[str] = set()

    async def run_prefill(self) -> None:
        engine, due_s = self.prefill, time.monotonic()
        while True:
            await engine.has_work.wait()
            if self.pace.prefill_tokens_per_s:
                done = [next(iter(engine.waiting.values()))] if engine.waiting else []
            else:
                done = list(engine.waiting.values())
            for run in done:
                due_s = max(due_s, time.monotonic()) + self.pace.prefill_s(run.num_prompt_tokens)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            done = [run for run in done if engine.waiting.pop(run.request_id, None)]
            if not engine.waiting:
                engine.has_work.clear()
            await engine.tell(done)
            for run in done:
                if len(self._prefilled) == self._prefilled.maxlen:
                    self._known.discard(self._prefilled.popleft())
                self._prefilled.append(run.request_id)
                self._known.add(run.request_id)
            self.decode.has_work.set()

    async def run_decode(self) -> None:
        engine, due_s = self.decode, time.monotonic()
        while True:
            await engine.has_work.wait()
            for request_id in [i for i in engine.waiting if i in self._known]:
                if len(engine.running) < self.pace.max_running:
                    engine.running[request_id] = engine.waiting.pop(request_id)
            if not engine.running:
                engine.has_work.clear()
                continue
            if self.pace.step_s:
                due_s = max(due_s, time.monotonic() - self.pace.step_s) + self.pace.step_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            runs = list(engine.running.values())
            await engine.tell(runs)
            for run in runs:
                if run.index >= run.max_tokens:
                    engine.running.pop(run.request_id, None)
            await asyncio.sleep(0)  # else nobody reads what comes in while writes never wait

    async def session(self, incoming: Any, context: Any) -> None:
        read, write = listener_ends(
            incoming, context, lambda **said: node_pb2.NodeMessage(**said).SerializeToString()
        )
        listener = Listener(lambda _: handshake_key(None), SESSION, (self.address,))
        opening = await admit(listener, read, write)
        await write(ACCEPTED_LINK)
        engine = self.prefill if opening.listener == PREFILL else self.decode
        gateway = _Gateway(context)
        self._gateways[gateway.name] = gateway
        member = _member(engine.role, self.address, self.pace)
        await gateway.write(_welcome(member, gateway, self.pace, is_direct=bool(self._listeners)))
        beating = asyncio.create_task(_beat(gateway, engine))
        try:
            async for message in incoming:
                engine.take(gateway, message)
        finally:
            beating.cancel()
            for run in [*engine.waiting.values(), *engine.running.values()]:
                if run.gateway is gateway:
                    engine.drop(run.request_id)

    async def listen(self) -> None:
        """For the direct channels of gateways.

        Not for engines without a pace: on a socket nothing would hold them back, and what a
        gateway reads faster than it can write is a stream that falls behind.
        """
        if not self.pace.step_s:
            return
        for engine, name in ((self.prefill, PREFILL), (self.decode, DECODE)):
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(socket_address(name, PURPOSE))
            serve = partial(self._serve_directly, engine)
            self._listeners.append(await asyncio.start_unix_server(serve, sock=sock))

    async def _serve_directly(
        self, engine: _Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        question = Question.unpack(await _payload(reader))
        assert question is not None, "gateways alone come here"
        gateway = self._gateways[question.name]
        writer.write(encode_payload(ACCEPTED))
        gateway.direct = writer
        try:
            while True:
                engine.take(gateway, node_pb2.GatewayMessage.FromString(await _payload(reader)))
        except asyncio.IncompleteReadError:
            writer.close()


async def _payload(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(decode_length(await reader.readexactly(LENGTH_BYTES), 0))


async def _beat(gateway: _Gateway, engine: _Engine) -> None:
    while True:
        await gateway.write(engine.heartbeat())
        await asyncio.sleep(_BEAT_S)


def _member(role: Role, address: str, pace: StepPace) -> Member:
    incarnation = PREFILL if role is Role.PREFILL else DECODE
    length = pace.max_model_len
    return Member(incarnation, role, role.value, address, "demo", "fp", length, 16, _NUM_BLOCKS)


def _welcome(member: Member, gateway: _Gateway, pace: StepPace, is_direct: bool) -> bytes:
    welcome = node_pb2.Welcome(
        incarnation=member.incarnation,
        role=member.role.value,
        name=member.name,
        model=member.model,
        fingerprint=member.fingerprint,
        max_model_len=member.max_model_len,
        block_size=member.block_size,
        num_blocks=member.num_blocks,
        max_num_seqs=min(pace.max_running, _MAX_RUNNING),
    )
    if is_direct:
        welcome.direct.host_id = host_id()
        welcome.direct.gateway, welcome.direct.token = gateway.name, gateway.token
    return bytes(node_pb2.NodeMessage(welcome=welcome).SerializeToString())


async def _serve(redis_url: str, pace: StepPace) -> dict[str, list[float]]:
    """Until SIGTERM; when each request's tokens went out, by its id."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    nodes = _Nodes(pace)
    server = grpc.aio.server(options=_OPTIONS)
    session = grpc.stream_stream_rpc_method_handler(
        nodes.session, request_deserializer=node_pb2.GatewayMessage.FromString
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("baton.v1.Node", {"Session": session}),)
    )
    nodes.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await nodes.listen()
    directory = RedisDirectory(redis_url, CLUSTER)
    for role in (Role.PREFILL, Role.DECODE):
        await directory.announce(_member(role, nodes.address, pace), 5.0)
    engines = [asyncio.create_task(part()) for part in (nodes.run_prefill, nodes.run_decode)]
    print(f"ready: {nodes.address}", flush=True)
    await asyncio.wait([*engines, asyncio.create_task(stop.wait())], return_when="FIRST_COMPLETED")
    await server.stop(None)
    first = nodes.prefill.log
    return {i: first.get(i, []) + later for i, later in nodes.decode.log.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("redis_url")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--prefill-tokens-per-s", type=float, default=0.0)
    parser.add_argument("--max-running", type=int, default=_MAX_RUNNING)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--log", type=Path)
    wanted = parser.parse_args()
    pace = StepPace(
        wanted.step_s, wanted.prefill_tokens_per_s, wanted.max_running, wanted.max_model_len
    )
    sent_s = event_loop.run(lambda: _serve(wanted.redis_url, pace))
    if wanted.log is not None:
        wanted.log.write_text(json.dumps(sent_s))
