"""The driver for a target, and the driver over Baton's own client.

grpc://HOST:PORT       Baton's gateway, through its SDK; its key, if it wants one, in BATON_API_KEY
http://HOST:PORT       any server of OpenAI's completions over HTTP; several, separated by commas,
                       get requests in turn  (loadgen/openai_driver.py)
nodes:REDIS_URL        Baton's engines without a gateway, in turn  (node_driver.py)
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

from baton.client import AsyncClient
from baton.core.errors import BatonError
from baton.loadgen.driver import Driver, DriverError


class GrpcDriver:
    """A driver over Baton's own client."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def stream(self, prompt_ids: Sequence[int], num_tokens: int) -> AsyncIterator[int]:
        generation = self._client.generate(
            prompt_token_ids=prompt_ids, max_tokens=num_tokens, temperature=0.0, ignore_eos=True
        )
        async with aclosing(generation):
            try:
                async for chunk in generation:
                    if chunk.token_ids:
                        yield len(chunk.token_ids)
            except BatonError as error:
                raise DriverError(f"{error.code}: {error.message}") from error


def connect(
    target: str, model: str = "", first: int = 0, fields: Mapping[str, Any] | None = None
) -> AbstractAsyncContextManager[Driver]:
    """The driver for `target`. `model`: the model name to request, if a server needs one.

    `first`: the engine that gets the first request, if the driver distributes requests. `fields`:
    additional fields of each request's body, over HTTP only. Raises ValueError.
    """
    kind, _, address = target.partition(":")
    if fields and kind not in ("http", "https"):
        raise ValueError(f"{target}: only requests over HTTP can have further fields")
    if kind == "grpc":
        return _connect_grpc(address.removeprefix("//"))
    if kind in ("http", "https"):
        return _connect_openai(target.split(","), model, first, fields or {})
    if kind == "nodes":
        from .node_driver import connect_nodes

        return connect_nodes(address, first)
    raise ValueError(f"{target}: a target is grpc://, http:// or nodes:")


@asynccontextmanager
async def _connect_openai(
    base_urls: Sequence[str], model: str, first: int, fields: Mapping[str, Any]
) -> AsyncIterator[Driver]:
    from baton.loadgen.openai_driver import OpenAiDriver, session  # aiohttp is optional

    first %= len(base_urls)
    async with session() as http:
        yield OpenAiDriver(http, [*base_urls[first:], *base_urls[:first]], model, fields)


class _connect_grpc:
    def __init__(self, address: str) -> None:
        self._address = address

    async def __aenter__(self) -> Driver:
        self._client = AsyncClient(self._address, api_key=os.environ.get("BATON_API_KEY"))
        return GrpcDriver(self._client)

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
