"""How a client calls a gateway, and how it reads its streams; for asyncio: async_client.py.

A `Client` is thread-safe: one serves any number of threads and streams at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Unpack

import grpc
from google.protobuf.message import Message

from ..core.errors import BatonError, Cancelled
from ..proto.v1 import inference_pb2_grpc
from . import messages, unary_calls
from .channel import metadata_of, open_channel
from .messages import Chunk, Collector, GenerateParams, Result
from .unary_calls import Call, ModelInfo, translate

T = TypeVar("T")


class Connection:
    """What both clients have in common; arguments: see Client."""

    _grpc: Any  # grpc, or grpc.aio
    _is_closed = False

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        ca_file: str | Path | None = None,
        timeout_s: float | None = 60.0,
    ) -> None:
        """Raises InvalidRequest for an address, a key, a CA or a timeout that cannot be one."""
        self._timeout_s = messages.timeout_of(timeout_s)
        self._metadata = metadata_of(api_key)
        self._channel = open_channel(self._grpc, address, tls=tls, ca_file=ca_file)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    def _start(self, prompt: str | None, params: GenerateParams) -> tuple[Any, Collector]:
        request, timeout_s = messages.build_request(prompt, params)
        collector = Collector(request.n or 1)
        return self._call("Generate", request, timeout_s), collector

    def _call(self, method: str, request: Message, timeout_s: float | None) -> Any:
        if self._is_closed:
            raise Cancelled("the client is closed")
        return getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata)


class _EndedCall:
    """What is kept of a call that has ended; gRPC's own would keep the connection of a client that
    is closed. Reads end as the last one did."""

    def __init__(self, error: BatonError | None) -> None:
        self._error = error

    def cancel(self) -> None:
        """It is over."""

    def __next__(self) -> NoReturn:
        raise self._error or StopIteration

    async def read(self) -> Any:
        if self._error is not None:
            raise self._error
        return grpc.aio.EOF


class RunningStream:
    """One running request."""

    def __init__(self, call: Any, collector: Collector) -> None:
        self._call = call
        self._collector = collector

    @property
    def id(self) -> str:
        """The gateway's id; empty before the first chunk."""
        return self._collector.id

    def cancel(self) -> None:
        """End the request on the server; a request that is over stays as it ended."""
        self._call.cancel()

    def _end(self, error: BatonError | None = None) -> None:
        """It was read to its end, or to that error."""
        self._call = _EndedCall(error)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the loop or the interpreter may be gone
            self._call.cancel()


class Generation(RunningStream, Iterator[Chunk]):
    """One running request: iterate over its chunks, or read its `result`.

    Leaving early (`with`, `close`, losing the last reference) cancels it on the server.
    """

    @property
    def result(self) -> Result:
        """The first sample's whole result; until it is there, reads what is left first. Raises
        typed errors."""
        if self._collector.result is None:
            self._read_rest()
        if self._collector.result is None:
            raise BatonError("the stream ended without a result")
        return self._collector.result

    @property
    def results(self) -> tuple[Result, ...]:
        """All samples' results; until they are there, reads what is left first. Raises typed
        errors."""
        if not self._collector.is_whole:
            self._read_rest()
        return self._collector.results

    def _read_rest(self) -> None:
        for _ in self:
            pass

    def __next__(self) -> Chunk:
        try:
            return self._collector.add(next(self._call))
        except StopIteration:
            self._end()
            raise
        except grpc.RpcError as error:
            self._end(translate(error))  # another one: `error` is the call
            raise translate(error) from error

    def close(self) -> None:
        """For contextlib.closing."""
        self.cancel()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()


class Client(Connection):
    """`with Client("127.0.0.1:50051") as client: client.generate("def f(").result.text`

    `api_key`: where the gateway requires one. `ca_file`: who signed its certificate, PEM; `tls`
    alone trusts the system's CAs. `timeout_s`: of each call but `generate`, which has its own;
    DeadlineExceeded then. None: without a limit.
    """

    _grpc = grpc

    def generate(self, prompt: str | None = None, **params: Unpack[GenerateParams]) -> Generation:
        """Start a request; see GenerateParams. Raises InvalidRequest for what cannot be sent."""
        return Generation(*self._start(prompt, params))

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The ids of a text as the gateway would tokenise a prompt."""
        return self._unary(unary_calls.tokenize_call(text))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of these ids."""
        return self._unary(unary_calls.detokenize_call(token_ids))

    def model_info(self) -> ModelInfo:
        """The model that is served, and the nodes that do it."""
        return self._unary(unary_calls.model_info_call())

    def abort(self, *ids: str) -> int:
        """Cancel requests by gateway id or label; returns how many were in flight."""
        return self._unary(unary_calls.abort_call(ids))

    def close(self) -> None:
        """Cancel what is running and close the connection."""
        self._is_closed = True
        self._channel.close()

    def _unary(self, call: Call[T]) -> T:
        method, request, read = call
        try:
            return read(self._call(method, request, self._timeout_s))
        except grpc.RpcError as error:
            raise translate(error) from error

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
