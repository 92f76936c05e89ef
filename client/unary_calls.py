"""The calls other than `generate`, for both clients, and the typed errors of any call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message

from ..core.errors import BatonError, InvalidRequest, from_code, from_grpc_status
from ..proto import codec
from ..proto.v1 import inference_pb2
from .messages import set_field

T = TypeVar("T")
# A unary call: the stub's method, the request, and a function that reads the response.
Call: TypeAlias = tuple[str, Message, Callable[[Any], T]]


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One engine, as the gateway reports it."""

    name: str
    role: str
    incarnation: str
    is_ready: bool
    num_blocks: int
    block_size: int
    links: tuple[str, ...]  # incarnations of the engines that it can pull KV from
    address: str  # host:port of its node


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model and the nodes that serve it."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    nodes: tuple[NodeInfo, ...]
    version: str


def tokenize_call(text: str) -> Call[tuple[int, ...]]:
    request = inference_pb2.TokenizeRequest()
    set_field(request, "text", text)
    return "Tokenize", request, lambda response: tuple(response.ids)


def detokenize_call(token_ids: Sequence[int]) -> Call[str]:
    request = inference_pb2.DetokenizeRequest()
    set_field(request, "ids", token_ids)
    return "Detokenize", request, lambda response: str(response.text)


def abort_call(ids: Sequence[str]) -> Call[int]:
    request = inference_pb2.AbortRequest()
    set_field(request, "ids", ids)
    return "Abort", request, lambda response: int(response.num_aborted)


def model_info_call() -> Call[ModelInfo]:
    return "GetModelInfo", inference_pb2.GetModelInfoRequest(), _model_info


def _model_info(wire: inference_pb2.ModelInfo) -> ModelInfo:
    nodes = [codec.same_fields(n, NodeInfo) | {"links": tuple(n.links)} for n in wire.nodes]
    fields = codec.same_fields(wire, ModelInfo) | {
        "eos_token_ids": tuple(wire.eos_token_ids),
        "nodes": tuple(NodeInfo(**node) for node in nodes),
    }
    return ModelInfo(**fields)


class UnaryCalls(ABC):
    """The calls as methods of Client."""

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The token ids of a text, tokenised like a prompt."""
        return self._unary(tokenize_call(text))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of these token ids."""
        return self._unary(detokenize_call(token_ids))

    def model_info(self) -> ModelInfo:
        """The served model, and the nodes that serve it."""
        return self._unary(model_info_call())

    def abort(self, *ids: str) -> int:
        """Cancel requests by gateway id or label; returns how many were in flight."""
        return self._unary(abort_call(ids))

    @abstractmethod
    def _unary(self, call: Call[T]) -> T: ...


def translate(error: Any) -> BatonError:
    """The typed error of a failed call: by the gateway's error code, else by the gRPC status."""
    metadata = dict(error.trailing_metadata() or ())
    details = error.details() or error.code().name
    if code := metadata.get("baton-error-code"):
        typed = from_code(str(code), details, metadata.get("baton-error-param"))
        if "retry-after-ms" in metadata:
            typed.retry_after_s = int(metadata["retry-after-ms"]) / 1000
        return typed
    if "larger than max" in details:  # gRPC's own text: the gateway never saw the message
        return InvalidRequest(f"the request is too large: {details}")
    return from_grpc_status(error.code().name, details)
