"""A test in the role of a gateway: real node processes, one channel to each engine.

Knows the wire format and nothing of the gateway's code, so that nodes are tested without a gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from deployments import MARK
from fakes.gateway.step_outputs import outputs_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from preloaded.starts import children_of

from baton.cli.cluster.survey import ask_ledgers
from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.secret import ClusterSecret
from baton.core.channels.admission import GATEWAY, dial
from baton.core.channels.frames import LENGTH_BYTES, decode_length, encode_payload
from baton.core.errors import BatonError, NodeLost
from baton.core.membership import Member, Role
from baton.core.request.request import Request, Ticket
from baton.proto import codec
from baton.proto.v1 import node_pb2, node_pb2_grpc

SECRET = "a secret of the tests"
CLUSTER = "test"
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
}
OUR_MARK = f"nodes-{os.getpid()}"  # in the environment of every descendant of a node


class NodeProcess:
    """A launched node, or gateway. `printed`: its output so far, also shown when a test fails."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self.process = process
        self.printed: list[str] = []
        self._ready: Future[str] = Future()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line.rstrip())
            print(f"{self.name} | {line}", end="")
            if line.startswith("ready: "):
                self._ready.set_result(line.split()[-1])
        if not self._ready.done():
            self._ready.set_exception(AssertionError("the node ended before it was ready"))

    @property
    def address(self) -> str:
        """The address; waits until the node is ready."""
        return self._ready.result(timeout=90)

    def engine_pids(self) -> list[int]:
        return children_of(self.process.pid)

    def end(self, number: signal.Signals) -> int:
        """Signal the node and wait for its end; returns its exit code."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end and its last output; returns its exit code."""
        code = self.process.wait(timeout=20)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def write_tiny_model(folder: Path, vocab_size: int = 256) -> Path:
    """A model directory for dummy weights."""
    (folder / "config.json").write_text(json.dumps(TINY_MODEL | {"vocab_size": vocab_size}))
    return folder


def launch(role: Role, redis_url: str, *flags: str) -> NodeProcess:
    """Start a node; its output is piped and must be read."""
    return launch_program(role.value, redis_url, *flags)


def launch_program(
    name: str,
    redis_url: str,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    inside: str = "",
) -> NodeProcess:
    """Start the console script launch_`name`; `inside`: a network namespace."""
    prefix = ["ip", "netns", "exec", inside] if inside else []
    program = f"import sys; from baton.cli.launch import {name} as run; sys.exit(run())"
    process = subprocess.Popen(
        [
            *prefix,
            sys.executable,
            "-c",
            program,
            "--redis-url",
            redis_url,
            "--cluster",
            CLUSTER,
            *flags,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ
        | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "BATON_CLUSTER_SECRET": SECRET}
        | {MARK: OUR_MARK}
        | dict(environment or {}),
        start_new_session=True,  # a Ctrl-C on the tests must not reach the node
    )
    return NodeProcess(name, process)


_MEMBERS_S = 60.0  # limit for the start of engines


async def members(redis_url: str, wanted: Callable[[Sequence[Member]], bool]) -> list[Member]:
    """The directory's members once `wanted` holds for them."""
    directory = RedisDirectory(RedisClient(redis_url, CLUSTER, ClusterSecret(SECRET)))
    try:
        async with asyncio.timeout(_MEMBERS_S):
            async for found in directory.watch():
                if wanted(found):
                    return list(found)
    finally:
        await directory.close()
    raise AssertionError("the watch ended")


@dataclass
class Received:
    """One engine's messages about one request."""

    tokens: list[int] = field(default_factory=list)
    by_message: dict[int, list[int]] = field(default_factory=dict)  # tokens; one per step
    outputs: list[node_pb2.RequestOutput] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return any(o.finish_reason or o.HasField("error") for o in self.outputs)

    @property
    def error(self) -> str:
        return next((o.error.code for o in self.outputs if o.HasField("error")), "")

    @property
    def events(self) -> list[str]:
        return [stamp.event for output in self.outputs for stamp in output.events]


class Session:
    """A link to one engine. `ended`: the reason why it is over."""

    def __init__(self) -> None:
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._changed = asyncio.Event()
        self.welcome: node_pb2.Welcome | None = None
        self.heartbeat = node_pb2.Heartbeat()
        self.num_heartbeats = 0
        self.received: dict[str, Received] = {}
        self._num_messages = 0
        self.ended: Exception | None = None

    async def dial(self, incarnation: str, secret: str | None, at: str | None) -> None:
        """Perform the handshake; a failure is in `ended`."""
        try:
            connection = await asyncio.to_thread(
                dial,
                *(GATEWAY, ClusterSecret(secret).dialing_key),
                dialer=secrets.token_hex(16),
                listener=incarnation,
                address=at,
            )
        except (OSError, BatonError) as error:
            self.ended = error
        else:
            self._reader, self._writer = await asyncio.open_connection(sock=connection)

    async def read(self) -> None:
        if self._reader is None:
            return
        reason: Exception = NodeLost("the engine closed the channel")
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                length = decode_length(await self._reader.readexactly(LENGTH_BYTES))
                payload = await self._reader.readexactly(length)
                message = node_pb2.NodeMessage.FromString(payload)
                self._num_messages += 1
                match message.WhichOneof("body"):
                    case "welcome":
                        self.welcome = message.welcome
                    case "heartbeat":
                        self.heartbeat = message.heartbeat
                        self.num_heartbeats += 1
                    case "outputs":
                        for output in outputs_of(message.outputs):
                            self._hear(output)
                    case "engine_ended":
                        reason = codec.error_from_wire(message.engine_ended)
                    case "refused":
                        reason = codec.error_from_wire(message.refused)
                self._changed.set()
        self.ended = reason
        self._changed.set()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    def _hear(self, output: node_pb2.RequestOutput) -> None:
        received = self.received.setdefault(f"{output.request_id}/{output.attempt}", Received())
        received.outputs.append(output)
        received.tokens += output.token_ids
        received.by_message.setdefault(self._num_messages, []).extend(output.token_ids)

    async def dispatch(
        self, request: Request, ticket: Ticket | None, deadline_s: float = 30.0
    ) -> None:
        dispatch = codec.dispatch_to_wire(request, ticket, deadline_s)
        await self.write(node_pb2.GatewayMessage(dispatch=dispatch).SerializeToString())

    async def cancel(self, request: Request) -> None:
        cancel = node_pb2.Cancel(request_id=request.request_id, attempt=request.attempt)
        await self.write(node_pb2.GatewayMessage(cancel=cancel).SerializeToString())

    async def write(self, payload: bytes) -> None:
        """Write any frame."""
        assert self._writer is not None
        self._writer.write(encode_payload(payload))
        await self._writer.drain()

    async def until(self, holds: Callable[[], bool], timeout_s: float = 40.0) -> None:
        """Wait until a message makes `holds` true."""
        async with asyncio.timeout(timeout_s):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def session(
    incarnation: str, secret: str | None = SECRET, *, at: str | None = None
) -> AsyncIterator[Session]:
    """A session with an engine on this host, by its unix socket; or `at` a host:port."""
    opened = Session()
    await opened.dial(incarnation, secret, at)
    reading = asyncio.create_task(opened.read())
    try:
        yield opened
    finally:
        opened.close()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def ledgers(address: str) -> list[dict[str, Any]]:
    """The ledgers of a node's engines."""
    async with grpc.aio.insecure_channel(address) as channel:
        texts = await ask_ledgers(node_pb2_grpc.NodeStub(channel), ClusterSecret(SECRET), address)
    return [json.loads(text) for text in texts]


def is_idle(ledger: dict[str, Any]) -> bool:
    """No request or transfer holds anything, and every block is accounted for."""
    blocks = ledger["blocks"]
    assert (
        blocks["free"] + blocks["cached"] + blocks["held"] + blocks["reserved"] == (blocks["total"])
    )
    return blocks["held"] == 0 and not ledger["requests"] and not ledger["transfers"]


async def wait_idle(*addresses: str, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        for address in addresses:
            while not all(is_idle(ledger) for ledger in await ledgers(address)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def health(address: str) -> AsyncIterator[Callable[[bool], Any]]:
    """`await become(True)` waits until the node reports by `Watch` that it serves."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())

        async def become(is_serving: bool) -> None:
            wanted = (
                health_pb2.HealthCheckResponse.SERVING
                if is_serving
                else (health_pb2.HealthCheckResponse.NOT_SERVING)
            )
            async for answer in call:
                if answer.status == wanted:
                    return

        yield become
        call.cancel()


def abstract_sockets() -> set[str]:
    """The names of our abstract unix sockets on this host, of all processes."""
    with open("/proc/net/unix") as table:
        return {line.split()[-1] for line in table if "@baton" in line}
