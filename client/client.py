"""The client: calls to a gateway, and the streams that it reads. For asyncio: async_client.py.

A `Client` is thread-safe: any number of threads and streams may use one at once.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Unpack

import grpc
from google.protobuf.message import Message

from ..core.errors import BatonError, Cancelled
from ..core.metrics import TokenTimes
from ..core.request.request import FinishReason, TokenLogprobs
from ..proto import codec
from ..proto.v1 import inference_pb2, inference_pb2_grpc
from . import messages
from .channel import metadata_of, open_channel
from .messages import Chunk, GenerateParams, Result
from .unary_calls import Call, T, UnaryCalls, translate


class Connection:
    """What both clients share. Arguments: see Client."""

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

    def _start(self, prompt: str | None, params: GenerateParams) -> tuple[Any, int, float]:
        """The arguments of a RunningStream."""
        request, timeout_s = messages.build_request(prompt, params)
        sent_s = time.monotonic()
        return self._call("Generate", request, timeout_s), request.n or 1, sent_s

    def _call(self, method: str, request: Message, timeout_s: float | None) -> Any:
        if self._is_closed:
            raise Cancelled("the client is closed")
        return getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata)


class RunningStream:
    """One running request: its call, and the chunks so far, of which each sample's Result is
    made. `id`: the gateway's id of the request, empty before the first chunk."""

    def __init__(self, call: Any, num_samples: int = 1, sent_s: float = 0.0) -> None:
        self.id = ""
        self._call = call  # None at the stream's end: it would keep a closed client's connection
        self._error: BatonError | None = None  # which ended the stream
        self._num_samples = num_samples
        self._sent_s = sent_s
        # By sample index:
        self._chunks: defaultdict[int, list[Chunk]] = defaultdict(list)
        self._token_s: defaultdict[int, list[float]] = defaultdict(list)
        self._prompt_logprobs: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)
        self._results: dict[int, Result] = {}

    @property
    def results(self) -> tuple[Result, ...]:
        """The results of the samples that have finished: of all, at the end of the stream."""
        return tuple(self._results[index] for index in sorted(self._results))

    def cancel(self) -> None:
        """End the request on the server; no effect on a request that is over."""
        if (call := self._call) is not None:  # another thread may read the stream's end
            call.cancel()

    def _end(self, error: BatonError | None = None) -> None:
        """The stream was read to its end, or to this error. Further reads end in the same way."""
        self._call, self._error = None, error

    def _add(self, wire: inference_pb2.GenerateChunk) -> Chunk:
        """Add the next message. Raises BatonError if tokens are missing or repeated."""
        self.id, sample = wire.id, wire.sample_index
        token_ids, token_s = tuple(wire.token_ids), self._token_s[sample]
        if token_ids and wire.index != len(token_s):
            raise BatonError(f"token {len(token_s)} is missing in the stream")
        reason = codec.FINISH_FROM_WIRE.get(wire.finish_reason)
        logprobs = tuple(map(codec.logprobs_from_wire, wire.logprobs))
        chunk = Chunk(wire.text, token_ids, wire.index, reason, sample, logprobs)
        self._chunks[sample].append(chunk)
        token_s += [time.monotonic()] * len(token_ids)
        self._prompt_logprobs[sample] += map(codec.logprobs_from_wire, wire.prompt_logprobs)
        if reason is not None:
            self._results[sample] = self._finished(wire, reason)
        return chunk

    def _finished(self, wire: inference_pb2.GenerateChunk, reason: FinishReason) -> Result:
        chunks, result = self._chunks[wire.sample_index], wire.result
        has_stop_id = wire.HasField("matched_stop_id")
        fields = codec.same_fields(result, Result) | {
            "decode_node": result.decode_node or None,
            "transport": result.transport or None,
            "timeline": tuple(codec.stamps_from_wire(result.timeline)),
        }
        return Result(
            **fields,
            id=wire.id,
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
            finish_reason=reason,
            matched_stop=wire.matched_stop_id if has_stop_id else wire.matched_stop or None,
            times=TokenTimes(self._sent_s, tuple(self._token_s[wire.sample_index])),
            sample_index=wire.sample_index,
            logprobs=tuple(logprobs for chunk in chunks for logprobs in chunk.logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs[wire.sample_index]),
        )

    def __del__(self) -> None:
        with suppress(Exception):  # the loop or the interpreter may be gone
            self.cancel()


class Generation(RunningStream, Iterator[Chunk], AbstractContextManager["Generation"]):
    """One running request: iterate over its chunks, or read its `result`.

    Leaving early (`with`, `close`, dropping the last reference) cancels the request on the server.
    """

    @property
    def result(self) -> Result:
        """The first sample's result; reads the rest of the stream for it. Raises typed errors."""
        if 0 not in self._results:
            deque(self, maxlen=0)
        if 0 not in self._results:
            raise BatonError("the stream ended without a result")
        return self._results[0]

    @property
    def results(self) -> tuple[Result, ...]:
        """The results of all samples; reads and raises like `result`."""
        if len(self._results) < self._num_samples:
            deque(self, maxlen=0)
        return super().results

    def __next__(self) -> Chunk:
        if (call := self._call) is None:
            raise self._error or StopIteration
        try:
            return self._add(next(call))
        except StopIteration:
            self._end()
            raise
        except grpc.RpcError as error:
            self._end(translate(error))  # a new error: `error` is the call itself
            raise translate(error) from error

    def close(self) -> None:
        """For contextlib.closing."""
        self.cancel()

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()


class Client(Connection, UnaryCalls, AbstractContextManager["Client"]):
    """`with Client("127.0.0.1:50051") as client: client.generate("def f(").result.text`

    `api_key`: if the gateway requires one. `ca_file`: the CA of its certificate, PEM; `tls` alone
    trusts the system's CAs. `timeout_s`: of each call except `generate`, which has its own; then
    DeadlineExceeded. None: no limit.
    """

    _grpc = grpc

    def generate(self, prompt: str | None = None, **params: Unpack[GenerateParams]) -> Generation:
        """Start a request. Raises InvalidRequest for parameters that cannot be encoded."""
        return Generation(*self._start(prompt, params))

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

    def __exit__(self, *exc_info: object) -> None:
        self.close()
