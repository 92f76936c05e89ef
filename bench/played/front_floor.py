"""A front without a gateway: the upper bound of what the libraries can stream on this machine.

python -m baton.bench.played.front_floor grpc|sse [--step-s S] [--log FILE]
A bare grpc.aio or aiohttp server that sends prepared messages as long as a gateway's. With
`--step-s` all streams get their next message at once, as from an engine's step; else each stream
runs at full speed. Prints `ready: ADDRESS`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import time
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web

from baton.core.process import event_loop
from baton.proto.v1 import inference_pb2, inference_pb2_grpc

from .fake_nodes import TEXT, TOKEN_ID

_EVENT = (
    b'data: {"id":"cmpl-%s","object":"text_completion","created":1790000000,"model":"demo",'
    b'"choices":[{"index":0,"text":" the","logprobs":null,"finish_reason":null}]}\n\n'
)


class _Steps:
    """The common pace of all streams, and the send times of each stream's messages."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._stepped = asyncio.Event()
        self._ids = itertools.count()
        self.log: dict[str, list[float]] = {}
        self.began_s = 0.0

    def new_id(self) -> str:
        name = f"{next(self._ids):032x}"
        self.log[name] = []
        return name

    async def next(self, name: str) -> None:
        """Wait for the time of the next message."""
        if not self._step_s:
            await asyncio.sleep(0)  # as a gateway's streams take turns
            return
        await self._stepped.wait()
        self.log[name].append(self.began_s)

    async def run(self) -> None:
        due_s = time.monotonic()
        while self._step_s:
            due_s = max(due_s, time.monotonic() - self._step_s) + self._step_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            self.began_s = time.monotonic()
            stepped, self._stepped = self._stepped, asyncio.Event()
            stepped.set()


class _Grpc(inference_pb2_grpc.InferenceServicer):
    def __init__(self, steps: _Steps) -> None:
        self._steps = steps

    async def Generate(self, request: Any, context: Any) -> None:
        name = self._steps.new_id()
        for index in range(request.sampling.max_tokens):
            await self._steps.next(name)
            chunk = inference_pb2.GenerateChunk(
                id=name, text=TEXT, token_ids=(TOKEN_ID,), index=index
            )
            await context.write(chunk)


async def _serve_grpc(steps: _Steps) -> tuple[Any, str]:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    inference_pb2_grpc.add_InferenceServicer_to_server(_Grpc(steps), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def _serve_sse(steps: _Steps) -> tuple[Any, str]:
    async def stream(request: web.Request) -> web.StreamResponse:
        num_events = (await request.json())["max_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        name = steps.new_id()
        event = _EVENT % name.encode()
        for _ in range(num_events):
            await steps.next(name)
            await response.write(event)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    app = web.Application()
    app.add_routes([web.post("/v1/completions", stream)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"127.0.0.1:{runner.addresses[0][1]}"


async def _serve(front: str, step_s: float) -> dict[str, list[float]]:
    """Serve until SIGTERM; returns the send times of each stream's messages, by its id."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    steps = _Steps(step_s)
    stepping = asyncio.create_task(steps.run())
    server, address = await (_serve_grpc if front == "grpc" else _serve_sse)(steps)
    print(f"ready: {address}", flush=True)
    await stop.wait()
    stepping.cancel()
    del server  # a grpc.aio server stops once it is no longer referenced
    return steps.log


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("front", choices=("grpc", "sse"))
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--log", type=Path)
    wanted = parser.parse_args()
    sent_s = event_loop.run(lambda: _serve(wanted.front, wanted.step_s))
    if wanted.log is not None:
        wanted.log.write_text(json.dumps(sent_s))
