"""The client SDK: Client and AsyncClient over gRPC. No torch.

    from baton.client import Client

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("def fib(n):", max_tokens=64):
            print(chunk.text, end="")

Errors are those of `baton.core.errors`, raised while reading the stream.
"""

from ..core.request.request import FinishReason, TokenLogprobs
from .async_client import AsyncClient, AsyncGeneration
from .client import Client, Generation
from .messages import Chunk, Result
from .unary_calls import ModelInfo, NodeInfo

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "Chunk",
    "Client",
    "FinishReason",
    "Generation",
    "ModelInfo",
    "NodeInfo",
    "Result",
    "TokenLogprobs",
]
