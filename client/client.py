"""The client: calls to a gateway, and the streams that it reads. For asyncio: async_client.py.

A `Client` is thread-safe: any number of threads and streams may use one at once.
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
    """The part that both clients share. Arguments: see Client."""

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
        """Raises InvalidRequest for an invalid address, key, CA or timeout."""
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
    """Replaces a gRPC call that has ended, which would keep a closed client's connection alive.
    Further reads end as the last one did."""

    def __init__(self, error: BatonError | None) -> None:
        self._error = error

    def cancel(self) -> None:
        """Does nothing: the call is over."""

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
        """The gateway's id of the request; empty before the first chunk."""
        return self._collector.id

    def cancel(self) -> None:
        """End the request on the server; no effect on a request that is over."""
        self._call.cancel()

    def _end(self, error: BatonError | None = None) -> None:
        """The stream was read to its end, or to this error."""
        self._call = _EndedCall(error)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the loop or the interpreter may be gone
            self._call.cancel()


class Generation(RunningStream, Iterator[Chunk]):
    """One running request: iterate over its chunks, or read its `result`.

    Leaving early (`with`, `close`, dropping the last reference) cancels the request on the server.
    """

    @property
    def result(self) -> Result:
        """The whole result of the first sample; reads the rest of the stream if it is not complete.
        Raises typed errors."""
        if self._collector.result is None:
            self._read_rest()
        if self._collector.result is None:
            raise BatonError("the stream ended without a result")
        return self._collector.result

    @property
    def results(self) -> tuple[Result, ...]:
        """The results of all samples; reads the rest of the stream if they are not complete. Raises
        typed errors."""
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
            self._end(translate(error))  # a new error: `error` is the call itself
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

    `api_key`: if the gateway requires one. `ca_file`: the CA of its certificate, PEM; `tls` alone
    trusts the system's CAs. `timeout_s`: of each call except `generate`, which has its own; then
    DeadlineExceeded. None: no limit.
    """

    _grpc = grpc

    def generate(self, prompt: str | None = None, **params: Unpack[GenerateParams]) -> Generation:
        """Start a request; see GenerateParams. Raises InvalidRequest for parameters that cannot be
        encoded."""
        return Generation(*self._start(prompt, params))

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The token ids of a text, tokenised like a prompt."""
        return self._unary(unary_calls.tokenize_call(text))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of these token ids."""
        return self._unary(unary_calls.detokenize_call(token_ids))

    def model_info(self) -> ModelInfo:
        """The served model, and the nodes that serve it."""
        return self._unary(unary_calls.model_info_call())

    def abort(self, *ids: str) -> int:
        """Cancel requests by gateway id or label; returns how many were in flight."""
        return self._unary(unary_calls.abort_call(ids))

    def close(self) -> None:
        """Cancel running requests and close the connection."""
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
