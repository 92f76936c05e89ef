"""The client for asyncio: created in a running event loop, and used from that loop only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Unpack

import grpc

from ..core.errors import BatonError, Cancelled
from . import unary_calls
from .client import Connection, RunningStream
from .messages import Chunk, GenerateParams, Result
from .unary_calls import Call, ModelInfo, T, translate


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Translate the errors of one call. gRPC raises CancelledError also where the call, not the
    calling task, was cancelled."""
    try:
        yield
    except grpc.RpcError as error:
        raise translate(error) from error.with_traceback(None)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Cancelled("the request was cancelled") from error.with_traceback(None)


class AsyncGeneration(
    RunningStream, AsyncIterator[Chunk], AbstractAsyncContextManager["AsyncGeneration"]
):
    """One running request: `async for chunk in generation`, or `await generation.finish()`.

    Leaving early (`async with`, `cancel`, dropping the last reference) cancels the request.
    """

    @property
    def result(self) -> Result:
        """The whole result of the first sample, once the stream has been read to its end."""
        if 0 not in self._results:
            raise RuntimeError("the stream is not at its end: iterate, or await finish()")
        return self._results[0]

    async def finish(self) -> Result:
        """Read the rest of the stream; returns the result or raises a typed error."""
        async for _ in self:
            pass
        return self.result

    async def __anext__(self) -> Chunk:
        if self._call is None:
            raise self._error or StopAsyncIteration
        try:
            with _typed_errors():
                message = await self._call.read()
        except BatonError as error:
            self._end(error)
            # Its traceback would keep gRPC's frames, and with them the connection.
            raise error.with_traceback(None) from error.__cause__
        if message is grpc.aio.EOF:
            self._end()
            raise StopAsyncIteration
        return self._add(message)

    async def aclose(self) -> None:
        """For contextlib.aclosing."""
        self.cancel()

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()


class AsyncClient(Connection, AbstractAsyncContextManager["AsyncClient"]):
    """`async with AsyncClient("127.0.0.1:50051") as client: await client.generate("x").finish()`

    Its arguments and methods are those of Client.
    """

    _grpc = grpc.aio

    def generate(
        self, prompt: str | None = None, **params: Unpack[GenerateParams]
    ) -> AsyncGeneration:
        """See Client, as for the methods below."""
        return AsyncGeneration(*self._start(prompt, params))

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return await self._unary(unary_calls.tokenize_call(text))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._unary(unary_calls.detokenize_call(token_ids))

    async def model_info(self) -> ModelInfo:
        return await self._unary(unary_calls.model_info_call())

    async def abort(self, *ids: str) -> int:
        return await self._unary(unary_calls.abort_call(ids))

    async def close(self) -> None:
        """Cancel running requests and close the connection."""
        self._is_closed = True
        await self._channel.close()

    async def _unary(self, call: Call[T]) -> T:
        method, request, read = call
        with _typed_errors():
            return read(await self._call(method, request, self._timeout_s))

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
