"""A gateway with a low file limit: excess connections get a response, and it does not spin."""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import grpc
import pytest
from bad_input.cases.fronts import GOOD, Answer, Target, read_answer, read_to_end, running

from baton.cli.host.certs import make_certificates

_MAX_FILES = 192
_GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Target]:
    config = {"model": str(model_dir), "max_files": _MAX_FILES, "head_s": 60.0}
    with running(tmp_path_factory.mktemp("poor"), config) as started:
        yield started


@pytest.fixture(scope="module")
def poor_over_tls(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("poor_over_tls")
    make_certificates(folder)
    config = {"model": str(model_dir), "max_files": _MAX_FILES}
    config |= {"tls_cert": str(folder / "server.crt"), "tls_key": str(folder / "server.key")}
    with running(folder, config) as started:
        yield started


def ask(target: Target) -> Answer:
    with target.connect() as plain:
        plain.sendall(_GET)
        return read_answer(plain)


def cpu_s(target: Target) -> float:
    fields = Path(f"/proc/{target.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_too_many_connections_of_http_are_answered(poor: Target) -> None:
    poor.check_serves()
    with ExitStack() as stack:
        held: list[socket.socket] = []
        while len(held) < _MAX_FILES:
            plain = stack.enter_context(poor.connect())
            held.append(plain)
            plain.sendall(_GET)
            if read_answer(plain).status == 503:
                break
        assert 10 < len(held) <= _MAX_FILES // 2 + 1
        for _ in range(30):
            refused = ask(poor)
            assert (refused.status, refused.code) == (503, "unavailable")
        assert poor.num_files() < _MAX_FILES - 8, "what is spared is not used up"
        held[0].sendall(_GET)  # earlier connections still work
        assert read_answer(held[0]).status == 200
        assert poor.log().count("HTTP connections are refused") == 1
        began_s, began_cpu_s = time.monotonic(), cpu_s(poor)
        time.sleep(0.5)
        assert cpu_s(poor) - began_cpu_s < 0.5 * (time.monotonic() - began_s)
    began_s = time.monotonic()
    while ask(poor).status != 200:
        assert time.monotonic() - began_s < 1
    metrics = poor.http("GET", "/metrics").text
    found = re.search(r"baton_http_connections_refused_total\{.*\} (\d+)", metrics)
    assert found is not None and int(found[1]) >= 31
    poor.check_serves()


def test_too_many_connections_over_tls_are_answered(poor_over_tls: Target) -> None:
    context = ssl._create_unverified_context()

    def ask_over_tls(stack: ExitStack) -> tuple[ssl.SSLSocket, Answer]:
        plain = stack.enter_context(poor_over_tls.connect())
        secured = stack.enter_context(context.wrap_socket(plain))
        secured.sendall(_GET)
        return secured, read_answer(secured)

    with ExitStack() as stack:
        first, answer = ask_over_tls(stack)
        for _ in range(_MAX_FILES):
            if answer.status == 503:
                break
            _, answer = ask_over_tls(stack)
        for _ in range(20):  # more than get a response at the same time
            with ExitStack() as of_one:
                _, refused = ask_over_tls(of_one)
            assert (refused.status, refused.code) == (503, "unavailable")
        assert poor_over_tls.num_files() < _MAX_FILES - 8, "what is spared is not used up"
        first.sendall(_GET)  # earlier connections still work
        assert read_answer(first).status == 200
    began_s = time.monotonic()
    while not _answers_over_tls(poor_over_tls):
        assert time.monotonic() - began_s < 5


def test_connections_that_never_shake_hands_are_counted(poor_over_tls: Target) -> None:
    """A few excess connections may complete the handshake and get a response; the others are
    closed."""
    with ExitStack() as stack:
        silent = [stack.enter_context(poor_over_tls.connect()) for _ in range(_MAX_FILES)]
        assert read_to_end(silent[-1], 5.0) == b""
        assert poor_over_tls.num_files() < _MAX_FILES - 8, "what is spared is not used up"
        with pytest.raises(TimeoutError):
            read_to_end(silent[0], 0.1)
    began_s = time.monotonic()
    while not _answers_over_tls(poor_over_tls):
        assert time.monotonic() - began_s < 5


def _answers_over_tls(target: Target) -> bool:
    context = ssl._create_unverified_context()
    connection = http.client.HTTPSConnection("localhost", target.http_port, context=context)
    with closing(connection), suppress(OSError):
        connection.request("GET", "/live")
        return connection.getresponse().status == 200
    return False


def test_too_many_connections_of_grpc_leave_room_for_http(poor: Target) -> None:
    with ExitStack() as stack:
        for _ in range(_MAX_FILES):
            plain = stack.enter_context(poor.connect(poor.grpc_port))
            with suppress(OSError):
                plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        assert poor.post("/v1/completions", GOOD).status == 200
        assert poor.num_files() < _MAX_FILES - 8
    began_s = time.monotonic()
    with grpc.insecure_channel(f"127.0.0.1:{poor.grpc_port}", [("grpc.enable_http_proxy", 0)]) as c:
        grpc.channel_ready_future(c).result(5)
    assert time.monotonic() - began_s < 3
    poor.check_serves()
