"""The gateway addresses that a client accepts."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.client import AsyncClient, Client
from baton.client.channel import open_channel, target_of
from baton.core.errors import BatonError, InvalidRequest
from baton.proto.v1 import inference_pb2, inference_pb2_grpc


@pytest.mark.parametrize(
    "address", ["127.0.0.1:50051", "[::1]:50051", "dns:///gateway:50051", "unix:/run/baton.sock"]
)
def test_an_address_is_what_grpc_dials(address: str) -> None:
    assert target_of(address) == address


def test_an_address_as_baton_prints_it() -> None:
    assert target_of("grpc://127.0.0.1:50051") == "127.0.0.1:50051"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "nonsense:::",
        ":50051",
        "",
        "grpc://host",
        "ftp://h:1",
        "grpcs://h:1",
        "h:\u0663",
        "h:65536",
        "grpc://h:" + "9" * 5000,
        "h:1 ",
    ],
)
def test_an_address_without_a_port_is_told_at_once(address: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidRequest, match="HOST:PORT") as caught:
            kind(address)
        assert caught.value.param == "address"


@pytest.mark.parametrize(
    ("given", "param"),
    [({"address": None}, "address"), ({"address": 50051}, "address"), ({"api_key": 5}, "api_key")],
)
def test_what_is_no_text_is_told_at_once(given: Any, param: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidRequest) as caught:
            kind(**{"address": "127.0.0.1:50051", **given})
        assert caught.value.param == param


class Peers(inference_pb2_grpc.InferenceServicer):
    """Replies, and records the caller's address."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        self.seen.append(context.peer())
        return inference_pb2.TokenizeResponse()


async def test_each_client_has_a_connection_of_its_own() -> None:
    """Of gateways that share a port, the kernel chooses one for each connection."""
    server, peers = grpc.aio.server(), Peers()
    inference_pb2_grpc.add_InferenceServicer_to_server(peers, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with AsyncClient(address) as first, AsyncClient(address) as second:
        for client in (first, second, first):
            await client.tokenize("x")
    await server.stop(None)
    a, b, again = peers.seen
    assert a == again != b


class Answers(inference_pb2_grpc.InferenceServicer):
    """Replies to each request with an empty stream or a failure."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if request.text == "fail":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no engine")
        if request.text == "stay":
            await asyncio.sleep(60)
        for each in ():
            yield each


async def test_what_is_kept_of_an_ended_request_keeps_no_connection() -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Answers(), server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    kept: list[Any] = []
    for prompt in ("end", "fail", "stay"):
        async with AsyncClient(address) as client:
            generation = client.generate(prompt)
            if prompt == "stay":
                generation.cancel()
            for _ in range(2):  # the second read ends like the first
                try:
                    assert [chunk async for chunk in generation] == [] and prompt == "end"
                except BatonError as error:
                    assert prompt != "end"
                    kept.append(error)
            kept.append(generation)
    assert len(kept) == 7
    gc.collect()
    for _ in range(200):
        if not (num_connections := connections_to(address)):
            break
        await asyncio.sleep(0.01)
    await server.stop(None)
    assert num_connections == 0


def connections_to(address: str) -> int:
    """The number of TCP connections of this host to the address."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    found = (Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [row.split() for text in found for row in text.splitlines()[1:]]
    return sum(row[2].endswith(port) and row[3] == "01" for row in rows)


def test_a_ca_is_pem(tmp_path: Path) -> None:
    """A CA file that is not PEM is refused; gRPC would report an unavailable gateway at
    each call."""
    (tmp_path / "ca.crt").write_bytes(b"\x30\x82")
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidRequest, match="PEM") as caught:
            kind("127.0.0.1:1", ca_file=tmp_path / "ca.crt")
        assert caught.value.param == "ca_file"


def test_a_gateway_that_was_away_for_long_is_found_soon() -> None:
    """Reconnection waits 2 s at most; gRPC's default is two minutes, in which every call fails."""

    class Driver:
        def insecure_channel(self, target: str, options: Any) -> dict[str, int]:
            return dict(options)

    options = open_channel(Driver(), "h:1", tls=False, ca_file=None)
    assert options["grpc.max_reconnect_backoff_ms"] <= 2000


def test_the_http_side_is_another() -> None:
    for address in ("http://127.0.0.1:8000", "HTTPS://gateway:1"):
        with pytest.raises(InvalidRequest, match="gRPC port"):
            Client(address)
