"""Thousands of mutated requests: no internal error, no hang, no growth; a million when slow.

Each run prints its seed; `--bad-input-seed` and `--bad-input-requests` repeat it, or vary it.
"""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import grpc
import pytest
from bad_input.cases.fronts import Target
from bad_input.cases.mutants import http_head, mutated_body, mutated_head, mutated_message
from fakes.gateway.requests import validated_at_once
from google.protobuf.message import DecodeError

from baton.core.errors import InvalidRequest
from baton.gateway.http.chat.chat import BODY as CHAT
from baton.gateway.http.generate.completions import BODY as COMPLETIONS
from baton.gateway.http.generate.request_fields import Body
from baton.gateway.http.protocol.body import parse_object
from baton.gateway.validation.served_model import ModelLimits
from baton.proto.v1 import inference_pb2

# The share of requests sent in each way.
_SHARES = {"http": 0.70, "heads": 0.02, "grpc": 0.10, "validators": 0.18}
_NUM_THREADS = 4
_HANG_S = 20.0  # two seconds on an otherwise idle machine
_MAX_GROWTH_BYTES = (
    256 << 20
)  # the live page's window: a quarter of a MiB a second, until it is full
_PIPELINED = 8
_SILENCE_S = 0.2

_MAY_BE = {
    "OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED",
}  # fmt: skip


def test_some_mutants(target: Target) -> None:
    _run(target, 1_500, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_mutants(target: Target, request: pytest.FixtureRequest) -> None:
    option = request.config.getoption
    _run(target, option("--bad-input-requests"), option("--bad-input-seed"))


def _run(target: Target, num_requests: int, seed: int) -> None:
    print(f"seed {seed}: {num_requests} mutants")
    ways: dict[str, Callable[[Target, int, int], Counter[str]]] = {
        "http": _over_http, "heads": _heads, "grpc": _over_grpc, "validators": _validators,
    }  # fmt: skip
    _way(ways["http"], target, 200, seed + 1)  # warm-up: one-time allocations
    warm_bytes = target.rss_bytes()
    for name, way in ways.items():
        began_s = time.monotonic()
        verdicts = _way(way, target, int(num_requests * _SHARES[name]), seed)
        took_s = time.monotonic() - began_s
        print(f"{name}: {sum(verdicts.values())} in {took_s:.0f} s: {dict(verdicts)}")
        target.check_serves()
    grown = target.rss_bytes() - warm_bytes
    print(f"grown by {grown / 2**20:.1f} MiB")
    assert grown < _MAX_GROWTH_BYTES
    log = target.log()
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:4000]


def _way(
    way: Callable[[Target, int, int], Counter[str]], target: Target, num_requests: int, seed: int
) -> Counter[str]:
    share = num_requests // _NUM_THREADS + 1
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        parts = [pool.submit(way, target, share, seed * 1000 + i) for i in range(_NUM_THREADS)]
        total: Counter[str] = Counter()
        for part in parts:
            total += part.result()
    return total


# --- bodies over HTTP -----------------------------------------------------------------------------


def _over_http(target: Target, num_requests: int, seed: int) -> Counter[str]:
    rng, verdicts = random.Random(seed), Counter[str]()
    while sum(verdicts.values()) < num_requests:
        with target.connect() as plain, closing(plain.makefile("rb")) as file:
            plain.settimeout(_HANG_S)
            while _batch(plain, file, rng, verdicts) and sum(verdicts.values()) < num_requests:
                pass
    return verdicts


def _batch(
    plain: socket.socket, file: socket.SocketIO, rng: random.Random, verdicts: Counter[str]
) -> bool:
    """Send some requests at once and read their responses; returns whether the connection is still
    open."""
    sent = [mutated_body(rng) for _ in range(_PIPELINED)]
    plain.sendall(b"".join(http_head(path, len(body)) + body for path, body in sent))
    for path, body in sent:
        status, is_closed = _next_status(file)
        verdicts[str(status)] += 1
        assert status < 500, (path, body[:2000])
        if is_closed:
            return False
    return True


def _next_status(file: socket.SocketIO) -> tuple[int, bool]:
    """The next response's status, after reading it to its end, and whether it is the last on this
    connection."""
    line = file.readline()
    version, _, rest = line.partition(b" ")
    assert version in (b"HTTP/1.1", b"HTTP/1.0"), line
    headers = {}
    while (line := file.readline()) not in (b"\r\n", b""):
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip().lower()
    if headers.get(b"transfer-encoding") == b"chunked":
        for size in iter(lambda: int(file.readline(), 16), None):
            file.read(size + 2)
            if not size:
                break
    else:
        file.read(int(headers.get(b"content-length", 0)))
    is_closed = headers.get(b"connection") == b"close" or version == b"HTTP/1.0"
    return int(rest[:3]), is_closed


# --- heads of HTTP --------------------------------------------------------------------------------


def _heads(target: Target, num_requests: int, seed: int) -> Counter[str]:
    """A request that the server waits to complete is abandoned after a moment."""
    rng, verdicts = random.Random(seed), Counter[str]()
    for _ in range(num_requests):
        head = mutated_head(rng)
        with target.connect() as plain:
            plain.settimeout(_SILENCE_S)
            try:
                plain.sendall(head)
                answer = plain.recv(64)
            except TimeoutError:
                answer = b"HTTP/1.1 silence"
            except ConnectionError:
                answer = b""
        status = answer[9:12].decode("ascii", "replace")
        verdicts[status or "closed"] += 1
        assert not answer or answer.startswith(b"HTTP/"), answer
        assert not status.startswith("5"), head[:2000]
    return verdicts


# --- messages over gRPC ---------------------------------------------------------------------------


def _over_grpc(target: Target, num_requests: int, seed: int) -> Counter[str]:
    rng, verdicts = random.Random(seed), Counter[str]()
    with closing(target.open_channel(target.grpc_port)) as channel:
        stubs = {}
        for _ in range(num_requests):
            method, data = mutated_message(rng)
            if method not in stubs:
                stubs[method] = channel.unary_stream(
                    method, request_serializer=bytes, response_deserializer=bytes
                )
            status = "OK"
            try:
                for _chunk in stubs[method](data, timeout=_HANG_S):
                    pass
            except grpc.RpcError as error:
                status = error.code().name
                assert status in _MAY_BE, (method, data[:2000], error)
            verdicts[status] += 1
    return verdicts


# --- the validators alone -------------------------------------------------------------------------


def _validators(target: Target, num_requests: int, seed: int) -> Counter[str]:
    """The validators without a socket: they may raise certain errors only."""
    rng, verdicts = random.Random(seed), Counter[str]()
    limits = ModelLimits("demo", 264, 512, 384, 384)
    for number in range(num_requests):
        verdict = "ok"
        try:
            if number % 2:
                _, body = mutated_body(rng)
                known = COMPLETIONS if number % 4 == 1 else CHAT
                Body(known.fields).read_fields(parse_object(body))
            else:
                wire = inference_pb2.GenerateRequest.FromString(mutated_message(rng)[1])
                validated_at_once(wire, limits, lambda text: tuple(text.encode()))
        except InvalidRequest as error:
            verdict = error.code
        except DecodeError:
            verdict = "no message"
        verdicts[verdict] += 1
    return verdicts
