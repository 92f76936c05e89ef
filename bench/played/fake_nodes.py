"""A process that simulates the nodes behind a gateway: a prefill and a decode engine, no model.

    python -m baton.bench.played.fake_nodes REDIS_URL [--step-s ...] [...]
Without options as fast as clients receive tokens (`--taken`); with them at a given pace. Messages
are assembled from prepared bytes, since CPU time of the nodes is missing from the gateway's share.
Prints `ready: ADDRESS`; at SIGTERM it writes the send time of every token, if a file is named.
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
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.secret import handshake_key
from baton.core.channels.addresses import host_id, socket_address
from baton.core.channels.admission import GATEWAY, SOCKET, THIS_HOST
from baton.core.channels.frames import LENGTH_BYTES, decode_length, encode_payload
from baton.core.channels.handshake import ANSWER_BYTES, OPENING_BYTES, Listener
from baton.core.membership import Member, Role
from baton.core.process import event_loop
from baton.core.step_cost import KNOTS
from baton.proto.v1 import common_pb2, node_pb2

from .taken_tokens import TakenTokens

CLUSTER = "bench"
PREFILL, DECODE = secrets.token_hex(16), secrets.token_hex(16)  # several run at once
TOKEN_ID, TEXT = 328, " the"  # of the demo model
_NUM_BLOCKS = 100_000
_AHEAD_TOKENS = 2  # per stream: sent, but not received by its client
_LOST_S = 0.2  # tokens that no client has received for this long count as lost
_BEAT_S = 0.25
_MAX_RUNNING = 1 << 30  # no limit


@dataclass(frozen=True, slots=True)
class StepPace:
    """The speed of the engines; zeros: no time at all."""

    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    max_running: int = _MAX_RUNNING
    max_model_len: int = 2048

    def prefill_s(self, num_tokens: int) -> float:
        return num_tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0


@dataclass(slots=True)
class _Run:
    """One request on one engine. `head`: a serialised output without its position; `id_field`,
    `attempt`: the request's entries in the columns."""

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
    """The connection of one gateway."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=0)

    async def write(self, message: bytes) -> None:
        """Send and wait until the socket accepts the message; ignored if the gateway is gone."""
        self._writer.write(encode_payload(message))
        with suppress(ConnectionError):
            await self._writer.drain()


class _Step:
    """A StepOutputs message: last tokens and prefill tokens as whole outputs, the others by
    column."""

    def __init__(self) -> None:
        self._outputs: list[bytes] = []
        self._runs: list[_Run] = []

    def add(self, run: _Run) -> None:
        """Add the request's next token."""
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
    """The common part of both engines: waiting and running requests, dispatches and
    cancellations."""

    def __init__(self, role: Role, pace: StepPace) -> None:
        self.role = role
        self.pace = pace
        self.waiting: dict[str, _Run] = {}
        self.running: dict[str, _Run] = {}
        self.has_work = asyncio.Event()
        self.num_sent = 0  # tokens
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
        """Send the next token of each request, in one message per gateway."""
        steps: dict[_Gateway, _Step] = {}
        now_s = time.monotonic()
        self.num_sent += len(runs)
        for run in runs:
            if (step := steps.get(run.gateway)) is None:
                step = steps[run.gateway] = _Step()
            step.add(run)
            if self.pace.step_s:
                self.log.setdefault(run.request_id, []).append(now_s)
        for gateway, step in steps.items():
            await gateway.write(_field(2, step.message()))

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
            beat.step_cost.row_s.extend([1 / rate] * len(KNOTS))
            beat.step_cost.max_rows = 1 << 20
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
    """Both engines, and the hand-off between them: a request decodes once it is prefilled."""

    def __init__(self, pace: StepPace, taken: TakenTokens | None) -> None:
        self.pace = pace
        self._taken = taken
        self._num_lost = 0
        self.prefill = _Engine(Role.PREFILL, pace)
        self.decode = _Engine(Role.DECODE, pace)
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
            elif self._taken is not None:
                await self._until_taken(self._taken)
            runs = list(engine.running.values())
            await engine.tell(runs)
            for run in runs:
                if run.index >= run.max_tokens:
                    engine.running.pop(run.request_id, None)
            await asyncio.sleep(0)  # lets readers run while writes never wait

    async def _until_taken(self, taken: TakenTokens) -> None:
        """Wait until clients have received all but `_AHEAD_TOKENS` per stream of what was sent."""
        lost_s = time.monotonic() + _LOST_S
        while True:
            num_sent = self.prefill.num_sent + self.decode.num_sent
            num_ahead = num_sent - self._num_lost - taken.number
            if num_ahead < 0 or time.monotonic() > lost_s:
                self._num_lost += num_ahead
            elif num_ahead > _AHEAD_TOKENS * len(self.decode.running):
                await asyncio.sleep(0.001)
                continue
            return

    async def listen(self, members: Sequence[Member]) -> list[asyncio.Server]:
        """Listen on the sockets of engines on this host."""
        servers = []
        for member in members:
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(socket_address(member.incarnation, SOCKET))
            serve = partial(self._serve, member)
            servers.append(await asyncio.start_unix_server(serve, sock=sock))
        return servers

    async def _serve(
        self, member: Member, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        engine = self.prefill if member.role is Role.PREFILL else self.decode
        gateway = _Gateway(writer)
        beating: asyncio.Task[None] | None = None
        try:
            await _admit(reader, writer)
            await gateway.write(_welcome(member, self.pace))
            beating = asyncio.create_task(_beat(gateway, engine))
            while True:
                engine.take(gateway, node_pb2.GatewayMessage.FromString(await _payload(reader)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            if beating is not None:
                beating.cancel()
            for run in [*engine.waiting.values(), *engine.running.values()]:
                if run.gateway is gateway:
                    engine.drop(run.request_id)
            writer.close()


async def _admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    listener = Listener(lambda _: handshake_key(None), (GATEWAY,), (THIS_HOST,))
    writer.write(listener.challenge(await reader.readexactly(OPENING_BYTES)))
    listener.check(await reader.readexactly(ANSWER_BYTES))
    writer.write(encode_payload(b""))


async def _payload(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(decode_length(await reader.readexactly(LENGTH_BYTES), 0))


async def _beat(gateway: _Gateway, engine: _Engine) -> None:
    while True:
        await gateway.write(engine.heartbeat())
        await asyncio.sleep(_BEAT_S)


def _members(address: str, pace: StepPace) -> list[Member]:
    return [
        Member(
            incarnation,
            role,
            role.value,
            address,
            "demo",
            "fp",
            pace.max_model_len,
            16,
            _NUM_BLOCKS,
            engine_address=address,  # never dialled: all are on this host
            host_id=host_id().hex(),
        )
        for role, incarnation in ((Role.PREFILL, PREFILL), (Role.DECODE, DECODE))
    ]


def _welcome(member: Member, pace: StepPace) -> bytes:
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
    return bytes(node_pb2.NodeMessage(welcome=welcome).SerializeToString())


async def _serve(redis_url: str, pace: StepPace, taken: Path | None) -> dict[str, list[float]]:
    """Serve until SIGTERM; returns the send times of each request's tokens, by its id."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    nodes = _Nodes(pace, None if taken is None else TakenTokens(taken))
    with socket.create_server(("127.0.0.1", 0)) as node:  # the address where nodes would listen
        address = "{}:{}".format(*node.getsockname())
        members = _members(address, pace)
        servers = await nodes.listen(members)
        directory = RedisDirectory(RedisClient(redis_url, CLUSTER))
        for member in members:
            await directory.announce(member, 5.0)
        engines = [asyncio.create_task(part()) for part in (nodes.run_prefill, nodes.run_decode)]
        print(f"ready: {address}", flush=True)
        ends = [*engines, asyncio.create_task(stop.wait())]
        await asyncio.wait(ends, return_when="FIRST_COMPLETED")
        for server in servers:
            server.close()
    first = nodes.prefill.log
    return {i: first.get(i, []) + later for i, later in nodes.decode.log.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("redis_url")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--prefill-tokens-per-s", type=float, default=0.0)
    parser.add_argument("--max-running", type=int, default=_MAX_RUNNING)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--taken", type=Path)
    parser.add_argument("--log", type=Path)
    wanted = parser.parse_args()
    pace = StepPace(
        wanted.step_s, wanted.prefill_tokens_per_s, wanted.max_running, wanted.max_model_len
    )
    sent_s = event_loop.run(lambda: _serve(wanted.redis_url, pace, wanted.taken))
    if wanted.log is not None:
        wanted.log.write_text(json.dumps(sent_s))
