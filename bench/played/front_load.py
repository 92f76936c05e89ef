"""A load generator process: many streams of one front, read as cheaply as Python can.

python -m baton.bench.played.front_load OUT < PLAN        both JSON
Over gRPC messages stay bytes; over HTTP a custom protocol counts events, since CPU time of a
generator is missing from the server's share. Times are CLOCK_MONOTONIC, common to all processes.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc

from baton.core.process import event_loop
from baton.proto.v1 import inference_pb2

from .fake_nodes import TEXT
from .taken_tokens import TakenTokens

_STALLED_BUFFER_BYTES = 4096
_METHOD = "/baton.v1.Inference/Generate"
_EVENT, _EVENTS_END, _DONE = b"data: ", b"\n\n", b"[DONE]"
_TEXT = TEXT.encode()  # a lagging reader gets it several times in one chunk
_SSE_ID = re.compile(rb'"id":"cmpl-([0-9a-f]{32})"')


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`rate_per_s` 0: `num_streams` at once, `rounds` times; else arrivals at this rate for
    `duration_s`. `num_stalled` of each round's streams stop reading after their first message.
    `taken`: the file in which received tokens are counted, if the engines read it."""

    front: str  # grpc or sse
    address: str
    num_streams: int = 64
    num_tokens: int = 500
    rounds: int = 1
    num_stalled: int = 0
    prompt_tokens: int = 8
    rate_per_s: float = 0.0
    duration_s: float = 0.0
    deadline_s: float = 0.0
    keeps_times: bool = False
    taken: str = ""


@dataclass(slots=True)
class LoadStream:
    """The record of one stream; `times_s`: when each token arrived."""

    sent_s: float
    request_id: str = ""
    num_messages: int = 0
    times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    error: str = ""
    is_stalled: bool = False


Count = Callable[[int], None]
OneStream = Callable[[LoadPlan, LoadStream], Awaitable[None]]


def _prompt(plan: LoadPlan) -> list[int]:
    """Random ids below every tokenizer's size, so that no prompt is cached."""
    return random.choices(range(256, 1024), k=plan.prompt_tokens)


class _Sse(asyncio.Protocol):
    """One request on one connection."""

    def __init__(self, plan: LoadPlan, stream: LoadStream, count: Count) -> None:
        self._plan = plan
        self._count = count
        self._stream = stream
        self._tail = b""
        self._head = b""
        self.is_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        body = json.dumps(
            {
                "model": "demo",
                "prompt": _prompt(self._plan),
                "max_tokens": self._plan.num_tokens,
                "ignore_eos": True,
                "stream": True,
            }
        )
        transport.write(
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )

    def data_received(self, data: bytes) -> None:
        stream, seen = self._stream, self._tail + data
        if not stream.request_id:
            self._head += data
            if found := _SSE_ID.search(self._head):
                stream.request_id = found[1].decode()
            elif not self._head.startswith(b"HTTP/1.1 200") and b"\r\n\r\n" in self._head:
                stream.error = self._head[:160].decode(errors="replace")
                self._end()
                return
        whole, _, self._tail = seen.rpartition(_EVENTS_END)
        num_events = whole.count(_EVENT)
        is_over = _DONE in whole
        if num_events:
            stream.num_messages += num_events - is_over
            num_tokens = max(num_events - is_over, whole.count(_TEXT))
            stream.times_s += [time.monotonic()] * num_tokens
            self._count(num_tokens)
            if stream.is_stalled:
                self._transport.pause_reading()
                self.is_done.set_result(None)
        if is_over:
            self._end()

    def _end(self) -> None:
        self._stream.ended_s = time.monotonic()
        if not self.is_done.done():
            self.is_done.set_result(None)
        if not self._stream.is_stalled:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_done.done():
            self._stream.error = self._stream.error or f"closed: {error}"
            self._end()


def _sse_stream(count: Count) -> OneStream:
    async def one(plan: LoadPlan, stream: LoadStream) -> None:
        host, _, port = plan.address.rpartition(":")
        loop = asyncio.get_running_loop()
        with socket.socket() as plain:
            if stream.is_stalled:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _STALLED_BUFFER_BYTES)
            plain.setblocking(False)
            await loop.sock_connect(plain, (host, int(port)))
            _, protocol = await loop.create_connection(
                lambda: _Sse(plan, stream, count), sock=plain.dup()
            )
        await protocol.is_done

    return one


def _grpc_stream(generate: Any, count: Count) -> OneStream:
    async def one(plan: LoadPlan, stream: LoadStream) -> None:
        request = inference_pb2.GenerateRequest()
        request.token_ids.ids.extend(_prompt(plan))
        request.sampling.max_tokens = plan.num_tokens
        request.sampling.ignore_eos = True
        call = generate(request, timeout=plan.deadline_s or None)
        times_s = stream.times_s
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                stream.num_messages += 1
                num_tokens = max(1, message.count(_TEXT))
                times_s += [time.monotonic()] * num_tokens
                count(num_tokens)
                if not stream.request_id:
                    stream.request_id = inference_pb2.GenerateChunk.FromString(message).id
                    if stream.is_stalled:
                        _STALLED.append(call)
                        break
        except grpc.aio.AioRpcError as error:
            stream.error = f"{error.code().name}: {error.details()}"
        stream.ended_s = time.monotonic()

    return one


def _count_nothing(_: int) -> None:
    """Does nothing: no file counts the tokens."""


_STALLED: list[Any] = []  # calls that are not read, kept open until the process ends


async def _round(plan: LoadPlan, one: OneStream) -> list[LoadStream]:
    streams = [
        LoadStream(time.monotonic(), is_stalled=i < plan.num_stalled)
        for i in range(plan.num_streams)
    ]
    await asyncio.gather(*(one(plan, stream) for stream in streams))
    return streams


async def _arrivals(plan: LoadPlan, one: OneStream) -> list[LoadStream]:
    """Open loop: exponential gaps, independent of the responses."""
    draw, began_s, due_s = random.Random(0), time.monotonic(), 0.0
    streams: list[LoadStream] = []
    tasks = []
    while due_s < plan.duration_s:
        due_s += draw.expovariate(plan.rate_per_s)
        await asyncio.sleep(max(0.0, began_s + due_s - time.monotonic()))
        streams.append(LoadStream(time.monotonic()))
        tasks.append(asyncio.create_task(one(plan, streams[-1])))
    await asyncio.wait(tasks)
    return streams


async def _measure(plan: LoadPlan) -> list[dict[str, Any]]:
    async with grpc.aio.insecure_channel(plan.address) as channel:
        generate = channel.unary_stream(
            _METHOD, request_serializer=inference_pb2.GenerateRequest.SerializeToString
        )
        count = TakenTokens(Path(plan.taken)).add if plan.taken else _count_nothing
        one = _grpc_stream(generate, count) if plan.front == "grpc" else _sse_stream(count)
        outcomes = []
        for _ in range(plan.rounds):
            began_s = time.monotonic()
            streams = await (_arrivals if plan.rate_per_s else _round)(plan, one)
            readers = [stream for stream in streams if not stream.is_stalled]
            outcomes.append(
                {
                    "seconds": time.monotonic() - began_s,
                    "messages": sum(stream.num_messages for stream in readers),
                    "tokens": plan.num_tokens * sum(not stream.error for stream in readers),
                    "errors": [stream.error for stream in readers if stream.error][:3],
                    "streams": [asdict(s) for s in readers] if plan.keeps_times else [],
                }
            )
        return outcomes


if __name__ == "__main__":
    plan = LoadPlan(**json.loads(sys.stdin.readline()))
    Path(sys.argv[1]).write_text(json.dumps(event_loop.run(lambda: _measure(plan))))
