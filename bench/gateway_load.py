"""How many tokens a second one gateway process passes on, with nodes that cost nothing.

    this process: 64 clients ◄── gateway ◄── one process that plays prefill and decode
    ceiling:      64 clients ◄── a bare grpc.aio server
All on the same cores, so what the clients and the nodes take is missing from the gateway's share.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cluster.redis_server import RedisServer
from baton.core.children import dies_with_parent
from baton.proto.v1 import inference_pb2, inference_pb2_grpc

from . import fake_nodes
from .figures import Figure

NUM_STREAMS = 64
_TOKENS_A_STREAM = 192
_REPEATS = 5
_NODES = ("-m", "baton.bench.fake_nodes")
_GATEWAY = ("-c", "import sys; from baton.cli.launch import gateway; sys.exit(gateway())")
_PROMPT = "def read_file(path):"


def measure() -> list[Figure]:
    """Messages and tokens a second through the gateway, and bare messages a second."""
    with _child(*_NODES, "bare") as address:
        bare = asyncio.run(_repeat(address, wait_for_service=False))
    with RedisServer.start() as redis:
        gateway = ("--grpc-port", "0", "--redis-url", redis.url, "--cluster", fake_nodes.CLUSTER)
        with (
            _child(*_NODES, redis.url),
            _child(*_GATEWAY, *gateway) as address,
        ):
            through = asyncio.run(_repeat(address, wait_for_service=True))
    ceiling = max(messages for messages, _ in bare)
    what = f"bare grpc.aio, {NUM_STREAMS} streams, same cores"
    shape = f"gateway, {NUM_STREAMS} streams of {_TOKENS_A_STREAM} tokens"
    return [
        Figure(shape, "messages/s", tuple(m for m, _ in through), ceiling, what),
        Figure(shape, "tokens/s", tuple(t for _, t in through), ceiling, "one token a message"),
    ]


async def _repeat(address: str, *, wait_for_service: bool) -> list[tuple[float, float]]:
    """(messages/s, tokens/s) of each repeat after the first."""
    async with grpc.aio.insecure_channel(address) as channel:
        if wait_for_service:
            await _until_serving(channel)
        stub = inference_pb2_grpc.InferenceStub(channel)
        return [await _load(stub) for _ in range(_REPEATS + 1)][1:]


async def _until_serving(channel: grpc.aio.Channel) -> None:
    request = health_pb2.HealthCheckRequest(service="baton.v1.Inference")
    async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return


async def _load(stub: inference_pb2_grpc.InferenceStub) -> tuple[float, float]:
    request = inference_pb2.GenerateRequest(text=_PROMPT)
    request.sampling.max_tokens = _TOKENS_A_STREAM
    request.sampling.ignore_eos = True

    async def one() -> tuple[int, int]:
        num_messages = num_tokens = 0
        call = stub.Generate(request)
        while (chunk := await call.read()) is not grpc.aio.EOF:
            num_messages += 1
            num_tokens += len(chunk.token_ids)
        return num_messages, num_tokens

    began_s = time.perf_counter()
    counts: Sequence[tuple[int, int]] = await asyncio.gather(*(one() for _ in range(NUM_STREAMS)))
    took_s = time.perf_counter() - began_s
    assert sum(tokens for _, tokens in counts) == NUM_STREAMS * _TOKENS_A_STREAM
    return sum(m for m, _ in counts) / took_s, sum(t for _, t in counts) / took_s


@contextmanager
def _child(*arguments: str) -> Iterator[str]:
    """A Python process; yields the address at the end of its `ready:` line."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        preexec_fn=dies_with_parent(signal.SIGTERM),
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("ready: "):
                break
        else:
            raise RuntimeError(f"{arguments} ended with code {process.wait()}")
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
