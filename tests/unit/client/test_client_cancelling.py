"""Cancellation of a call, or of the task that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from baton.client import AsyncClient, Client
from baton.core.errors import Cancelled, DeadlineExceeded, InvalidRequest
from baton.proto.v1 import inference_pb2, inference_pb2_grpc


class Silent(inference_pb2_grpc.InferenceServicer):
    """Never replies."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        self.called.set()
        await asyncio.sleep(1000)
        return inference_pb2.TokenizeResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.called.set()
        await asyncio.sleep(1000)
        yield inference_pb2.GenerateChunk()


Waiting = Callable[[AsyncClient], Awaitable[Any]]
CALLS: list[Waiting] = [
    lambda client: client.tokenize("x"),
    lambda client: client.generate("x").finish(),
]


@pytest.fixture
async def silent(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Silent, AsyncClient]]:
    server, servicer = grpc.aio.server(), Silent()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    timeout_s = getattr(request, "param", 60.0)
    async with AsyncClient(f"127.0.0.1:{port}", timeout_s=timeout_s) as client:
        yield servicer, client
    await server.stop(None)


async def begun(silent: tuple[Silent, AsyncClient], call: Waiting) -> asyncio.Task[Any]:
    servicer, client = silent

    async def run() -> Any:
        return await call(client)

    task = asyncio.create_task(run())
    await servicer.called.wait()
    return task


@pytest.mark.parametrize("call", CALLS)
async def test_a_client_that_is_closed_cancels_calls_but_no_tasks(
    silent: tuple[Silent, AsyncClient], call: Waiting
) -> None:
    task = await begun(silent, call)
    await silent[1].close()
    with pytest.raises(Cancelled):
        await task


@pytest.mark.parametrize("silent", [0.1], indirect=True)
async def test_a_call_that_nobody_answers_ends_at_its_timeout(
    silent: tuple[Silent, AsyncClient],
) -> None:
    with pytest.raises(DeadlineExceeded):
        await silent[1].tokenize("x")


async def test_a_timeout_is_a_number() -> None:
    with pytest.raises(InvalidRequest, match="timeout_s"):
        AsyncClient("127.0.0.1:1", timeout_s="soon")  # type: ignore[arg-type]


@pytest.mark.parametrize("call", CALLS)
async def test_a_task_that_is_cancelled_stays_so(
    silent: tuple[Silent, AsyncClient], call: Waiting
) -> None:
    task = await begun(silent, call)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_client_that_is_closed_takes_no_more_calls() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        pass
    for call in CALLS:
        with pytest.raises(Cancelled, match="closed"):
            await call(client)
    with Client("127.0.0.1:1") as other:
        pass
    with pytest.raises(Cancelled, match="closed"):
        other.tokenize("x")
    with pytest.raises(Cancelled, match="closed"):
        other.generate("x")
