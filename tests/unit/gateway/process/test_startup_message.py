"""What a gateway tells whoever started it: that its request can be pasted into a shell."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from baton.gateway.process.startup_message import StartupMessage

PLAIN = StartupMessage("127.0.0.1", 8000, 50051, "demo", knows_chats=True)


def curl_of(message: StartupMessage, tmp_path: Path) -> list[str]:
    """The arguments that a shell gives to curl for the line that is to be pasted."""
    (tmp_path / "curl").write_text('#!/bin/sh\nfor a in "$@"; do printf "%s\\\\0" "$a"; done\n')
    (tmp_path / "curl").chmod(0o700)
    _, line = message.lines()
    shown = subprocess.run(
        ["sh", "-c", line.removeprefix("Try: ")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "BATON_API_KEY": "k-1"},
        capture_output=True,
        check=True,
    )
    return shown.stdout.decode().split("\0")[:-1]


def test_the_addresses() -> None:
    ready, _ = PLAIN.lines()
    assert ready == (
        "Ready: http://127.0.0.1:8000 grpc://127.0.0.1:50051 "
        "dashboard http://127.0.0.1:8000/dashboard"
    )


def test_the_dashboard_is_one_gateway_s() -> None:
    ready, _ = replace(PLAIN, own_http_port=9001).lines()
    assert ready.endswith("grpc://127.0.0.1:50051 dashboard http://127.0.0.1:9001/dashboard")


@pytest.mark.parametrize(
    ("host", "dialled"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("gw.local", "gw.local")],
)
def test_whoever_listens_everywhere_is_dialled_here(host: str, dialled: str) -> None:
    assert replace(PLAIN, host=host).http_url == f"http://{dialled}:8000"


def test_tls_shows_in_every_address() -> None:
    words = replace(PLAIN, has_tls=True).lines()[0].split()
    assert [word.partition("://")[0] for word in words[1:]] == [
        "https",
        "grpcs",
        "dashboard",
        "https",
    ]


@pytest.mark.parametrize("model", ["demo", 'it\'s $HOME `x` "y"', "模型"])
def test_the_request_survives_a_shell(model: str, tmp_path: Path) -> None:
    arguments = curl_of(replace(PLAIN, model=model), tmp_path)
    assert arguments[0] == "http://127.0.0.1:8000/v1/chat/completions"
    assert json.loads(arguments[-1])["model"] == model


def test_the_request_is_one_that_the_model_can_take(tmp_path: Path) -> None:
    plain = replace(PLAIN, knows_chats=False)
    arguments = curl_of(plain, tmp_path)
    assert arguments[0] == "http://127.0.0.1:8000/v1/completions"
    assert json.loads(arguments[-1])["prompt"] == "hello"
    arguments = curl_of(replace(plain, knows_text=False), tmp_path)
    assert json.loads(arguments[-1])["prompt"] == [1, 2, 3]


def test_the_key_is_taken_from_the_environment(tmp_path: Path) -> None:
    assert "Authorization: Bearer k-1" in curl_of(replace(PLAIN, needs_keys=True), tmp_path)
    line = shlex.join(replace(PLAIN, needs_keys=True).lines())
    assert "k-1" not in line
