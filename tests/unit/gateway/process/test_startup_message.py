"""The start-up message of a gateway: its request can be pasted into a shell."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from baton.core.config import GatewayConfig
from baton.gateway.process.startup_message import startup_lines


def lines(
    model: str = "demo",
    own_http_port: int | None = None,
    has_chat_template: bool = True,
    **config: Any,
) -> tuple[str, str]:
    return startup_lines(
        GatewayConfig(**config),
        model,
        http_port=8000,
        grpc_port=50051,
        own_http_port=own_http_port,
        has_chat_template=has_chat_template,
    )


def curl_of(line: str, tmp_path: Path) -> list[str]:
    """The arguments that a shell passes to curl for the line to paste."""
    (tmp_path / "curl").write_text('#!/bin/sh\nfor a in "$@"; do printf "%s\\\\0" "$a"; done\n')
    (tmp_path / "curl").chmod(0o700)
    shown = subprocess.run(
        ["sh", "-c", line.removeprefix("Try: ")],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "BATON_API_KEY": "k-1"},
        capture_output=True,
        check=True,
    )
    return shown.stdout.decode().split("\0")[:-1]


def test_the_addresses() -> None:
    ready, _ = lines()
    assert ready == (
        "Ready: http://127.0.0.1:8000 grpc://127.0.0.1:50051 "
        "dashboard http://127.0.0.1:8000/dashboard"
    )


def test_the_dashboard_is_one_gateway_s() -> None:
    ready, _ = lines(own_http_port=9001)
    assert ready.endswith("grpc://127.0.0.1:50051 dashboard http://127.0.0.1:9001/dashboard")


@pytest.mark.parametrize(
    ("host", "dialled"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("gw.local", "gw.local")],
)
def test_whoever_listens_everywhere_is_dialled_here(host: str, dialled: str) -> None:
    assert lines(host=host)[0].split()[1] == f"http://{dialled}:8000"


def test_tls_shows_in_every_address() -> None:
    words = lines(tls_cert="cert.pem", tls_key="key.pem")[0].split()
    assert [word.partition("://")[0] for word in words[1:]] == [
        "https",
        "grpcs",
        "dashboard",
        "https",
    ]


@pytest.mark.parametrize("model", ["demo", 'it\'s $HOME `x` "y"', "模型"])
def test_the_request_survives_a_shell(model: str, tmp_path: Path) -> None:
    arguments = curl_of(lines(model)[1], tmp_path)
    assert arguments[0] == "http://127.0.0.1:8000/v1/chat/completions"
    assert json.loads(arguments[-1])["model"] == model


def test_the_request_is_one_that_the_model_can_take(tmp_path: Path) -> None:
    arguments = curl_of(lines(has_chat_template=False)[1], tmp_path)
    assert arguments[0] == "http://127.0.0.1:8000/v1/completions"
    assert json.loads(arguments[-1])["prompt"] == "hello"
    arguments = curl_of(lines(has_chat_template=False, skip_tokenizer_init=True)[1], tmp_path)
    assert json.loads(arguments[-1])["prompt"] == [1, 2, 3]


def test_the_key_is_taken_from_the_environment(tmp_path: Path) -> None:
    both = lines(api_keys="keys.json")
    assert "Authorization: Bearer k-1" in curl_of(both[1], tmp_path)
    assert "k-1" not in shlex.join(both)
