"""The blocking client. Thread-safe: one Client serves any number of threads and streams at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack

import grpc

from ..core.errors import BatonError
from ..proto.v1 import inference_pb2_grpc
from .connection import CHANNEL_OPTIONS, channel_credentials, key_metadata, target_of
from .messages import (
    Call,
    Chunk,
    Collector,
    GenerateParams,
    ModelInfo,
    Result,
    abort_call,
    build_request,
    detokenize_call,
    model_info_call,
    tokenize_call,
    translate,
)

T = TypeVar("T")


class Generation(Iterator[Chunk]):
    """One running request: iterate over its chunks, or ask for its `result`.

    Leaving early (`with`, `close`, losing the last reference) cancels it on the server.
    """

    def __init__(self, call: Any, collector: Collector) -> None:
        self._call = call
        self._collector = collector

    @property
    def id(self) -> str:
        """The gateway's id; empty before the first chunk."""
        return self._collector.id

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

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end anything may be gone
            self._call.cancel()


class Client:
    """`with Client("127.0.0.1:50051") as client: client.generate("def f(").result.text`

    `api_key`: where the gateway asks for one. `ca_file`: who signed its certificate, PEM; `tls`
    alone trusts the system's CAs.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        ca_file: str | Path | None = None,
    ) -> None:
        """Raises InvalidRequest for an address or a key that cannot be one."""
        target = target_of(address)
        self._metadata = key_metadata(api_key)
        credentials = channel_credentials(tls=tls, ca_file=ca_file)
        self._channel = (
            grpc.insecure_channel(target, CHANNEL_OPTIONS)  # type: ignore[no-untyped-call]
            if credentials is None
            else grpc.secure_channel(target, credentials, CHANNEL_OPTIONS)  # type: ignore[no-untyped-call]
        )
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    def generate(self, prompt: str | None = None, **params: Unpack[GenerateParams]) -> Generation:
        """Start a request; see GenerateParams. Raises InvalidRequest for what cannot be sent."""
        request, timeout_s = build_request(prompt, params)
        collector = Collector()
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        return Generation(call, collector)

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
