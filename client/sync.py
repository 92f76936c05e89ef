"""The blocking client. Thread-safe: one Client serves any number of threads and streams at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar, Unpack

import grpc

from ..core.errors import BatonError
from .connection import Connection, RunningStream
from .messages import (
    Call,
    Chunk,
    GenerateParams,
    ModelInfo,
    Result,
    abort_call,
    detokenize_call,
    model_info_call,
    tokenize_call,
    translate,
)

T = TypeVar("T")


class Generation(RunningStream, Iterator[Chunk]):
    """One running request: iterate over its chunks, or ask for its `result`.

    Leaving early (`with`, `close`, losing the last reference) cancels it on the server.
    """

    @property
    def result(self) -> Result:
        """The first sample's whole result; reads what is left first. Raises typed errors."""
        for _ in self:
            pass
        result = self._collector.result
        if result is None:
            raise BatonError("the stream ended without a result")
        return result

    @property
    def results(self) -> tuple[Result, ...]:
        """All samples' results; reads what is left of the stream first. Raises typed errors."""
        for _ in self:
            pass
        return self._collector.results

    def __next__(self) -> Chunk:
        try:
            return self._collector.add(next(self._call))
        except grpc.RpcError as error:
            raise translate(error) from error

    def cancel(self) -> None:
        """End the request on the server; a request that is over stays as it ended."""
        self._call.cancel()

    close = cancel

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()


class Client(Connection):
    """`with Client("127.0.0.1:50051") as client: client.generate("def f(").result.text`

    Its arguments: see Connection.
    """

    _channels = grpc

    def generate(self, prompt: str | None = None, **params: Unpack[GenerateParams]) -> Generation:
        """Start a request; see GenerateParams. Raises InvalidRequest for what cannot be sent."""
        return Generation(*self._start(prompt, params))

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The ids of a text as the gateway would tokenise a prompt."""
        return self._unary(tokenize_call(text))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of these ids."""
        return self._unary(detokenize_call(token_ids))

    def model_info(self) -> ModelInfo:
        """The model that is served, and the nodes that do it."""
        return self._unary(model_info_call())

    def abort(self, *ids: str) -> int:
        """Cancel requests by gateway id or label; returns how many were in flight."""
        return self._unary(abort_call(ids))

    def close(self) -> None:
        """Cancel what is running and close the connection."""
        self._channel.close()

    def _unary(self, call: Call[T]) -> T:
        try:
            method = getattr(self._stub, call.method)
            return call.decode(method(call.request, metadata=self._metadata))
        except grpc.RpcError as error:
            raise translate(error) from error

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
