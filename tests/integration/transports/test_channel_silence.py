"""A stream between two nodes whose bytes vanish ends at both, and soon: F11 and F12 on one link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import grpc
import pytest
from fakes.node.wire_proxy import BACK, ON, WireProxy
from patience import SOON_S

from baton.core.membership import Role
from baton.node.supervisor.grpc_channels import make_server, open_node_channel


class Echo(grpc.GenericRpcHandler):
    """Any stream: what it says comes back."""

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()

    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            try:
                async for message in messages:
                    yield message
            finally:
                self.has_ended.set()

        return grpc.stream_stream_rpc_method_handler(echo)


async def test_both_ends_notice_that_nothing_comes() -> None:
    """One way, the other, or both: neither end says anything, so only a ping can tell."""
    await asyncio.gather(*map(lose, ({ON}, {BACK}, {ON, BACK})))


async def lose(ways: set[str]) -> None:
    server, port = make_server("127.0.0.1", 0)
    echo = Echo()
    server.add_generic_rpc_handlers((echo,))
    await server.start()
    with closing(WireProxy(port)) as wire:
        address = f"127.0.0.1:{wire.port}"
        async with open_node_channel(address, None, Role.PREFILL) as channel:
            call = channel.stream_stream("/a/Stream")()
            await call.write(b"hello")
            assert await call.read() == b"hello"
            await asyncio.sleep(1.5)  # longer than a silent peer is waited for
            assert not call.done() and not echo.has_ended.is_set()
            wire.lost = frozenset(ways)
            async with asyncio.timeout(SOON_S):
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await call.read()
                assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
                await echo.has_ended.wait()
    await server.stop(None)
