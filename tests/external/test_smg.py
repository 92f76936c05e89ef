"""smg in front of a gateway over gRPC, which it sees as one vLLM engine.

smg-grpc-proto needs a protobuf version that this project's development tools do not support, so the
gateway runs on smg's interpreter; Redis and the nodes are those of a normal deployment. smg's
responses are compared with those of the deployment's own HTTP front.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from deployments import Running, free_port, running

from baton.core.engine_config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
SMG = shutil.which("smg")

pytestmark = [
    pytest.mark.external,
    pytest.mark.timeout(300),
    pytest.mark.skipif(SMG is None, reason="smg is not on the PATH"),
]

GATEWAY = "import sys; from baton.cli.launch import gateway; sys.exit(gateway())"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "read a file"}], "temperature": 0}
PROMPT = {"model": "demo", "prompt": "def read_file(path):", "temperature": 0, "max_tokens": 16}


@dataclass
class World:
    system: Running
    smg: str  # host:port
    own: str

    def post(self, path: str, body: dict[str, Any], *, at: str = "") -> tuple[int, Any]:
        status, text = ask(at or self.smg, "POST", path, body)
        return status, json.loads(text)

    def both(self, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
        """smg's response, and the deployment's own."""
        return self.post(path, body)[1], self.post(path, body, at=self.own)[1]


def ask(address: str, method: str, path: str, body: object = None) -> tuple[int, str]:
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@contextmanager
def process(*argv: str, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    running_process = subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield running_process
    finally:
        running_process.terminate()
        running_process.communicate(timeout=30)


def wait_for_model(address: str) -> None:
    """Wait until smg has its worker's model and has loaded its tokenizer."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        with suppress(OSError, ValueError):
            if json.loads(ask(address, "GET", "/v1/models")[1]).get("data"):
                return
        time.sleep(0.3)
    raise AssertionError("smg knows no model")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    assert SMG is not None
    root = tmp_path_factory.mktemp("root")
    (root / "baton").symlink_to(ROOT)
    plain = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    with running(EngineConfig(device="cpu", cpu_kv_bytes=64 << 20)) as system:
        cluster = system.deployment.cluster
        environment = plain | {
            "PYTHONPATH": str(root),
            "BATON_REDIS_URL": cluster.redis_url,
            "BATON_CLUSTER_SECRET": cluster.cluster_secret or "",
        }
        python = str(Path(SMG).with_name("python"))
        flags = ("--http-port", "0", "--grpc-port", "0")
        with process(python, "-c", GATEWAY, *flags, environment=environment) as gateway:
            assert gateway.stdout is not None
            printed = []
            for line in gateway.stdout:
                printed.append(line)
                if line.startswith("Ready: "):
                    break
            else:
                raise AssertionError("".join(printed))
            (worker,) = (word for word in line.split() if word.startswith("grpc://"))
            ports = [str(free_port()) for _ in range(2)]
            argv = (SMG, "launch", "--worker-urls", worker, "--host", "127.0.0.1")
            argv += ("--port", ports[0], "--prometheus-port", ports[1], "--log-level", "warn")
            with process(*argv, environment=plain):
                address = f"127.0.0.1:{ports[0]}"
                wait_for_model(address)
                own = system.deployment.startup_lines[0].split()[1]
                yield World(system, address, urlsplit(own).netloc)


def test_a_completion(world: World) -> None:
    theirs, own = world.both("/v1/completions", PROMPT)
    assert theirs["choices"][0]["text"] == own["choices"][0]["text"]
    assert theirs["usage"]["completion_tokens"] == own["usage"]["completion_tokens"] == 16
    assert theirs["usage"]["prompt_tokens"] == own["usage"]["prompt_tokens"]


def test_a_chat(world: World) -> None:
    theirs, own = world.both("/v1/chat/completions", CHAT | {"max_tokens": 16})
    assert theirs["choices"][0]["message"]["content"] == own["choices"][0]["message"]["content"]
    assert theirs["usage"]["prompt_tokens"] == own["usage"]["prompt_tokens"]


def test_a_stream(world: World) -> None:
    body = CHAT | {"max_tokens": 16, "stream": True, "stream_options": {"include_usage": True}}
    lines = ask(world.smg, "POST", "/v1/chat/completions", body)[1].splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
    _, own = world.post("/v1/chat/completions", CHAT | {"max_tokens": 16}, at=world.own)
    assert text == own["choices"][0]["message"]["content"]
    assert events[-1]["usage"]["completion_tokens"] == 16


def test_scores(world: World) -> None:
    body = CHAT | {"max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    theirs, own = world.both("/v1/chat/completions", body)
    for mine, wanted in zip(
        theirs["choices"][0]["logprobs"]["content"],
        own["choices"][0]["logprobs"]["content"],
        strict=True,
    ):
        assert mine["logprob"] == pytest.approx(wanted["logprob"], abs=1e-5)
        assert [t["logprob"] for t in mine["top_logprobs"]] == pytest.approx(
            [t["logprob"] for t in wanted["top_logprobs"]], abs=1e-5
        )


def test_stop_strings_and_samples(world: World) -> None:
    _, own = world.post("/v1/completions", PROMPT, at=world.own)
    stop = own["choices"][0]["text"].split()[1]
    theirs, own = world.both("/v1/completions", PROMPT | {"stop": stop})
    assert theirs["choices"][0]["text"] == own["choices"][0]["text"]
    assert theirs["choices"][0]["finish_reason"] == "stop"
    theirs, own = world.both("/v1/chat/completions", CHAT | {"max_tokens": 4, "n": 2})
    texts = [[c["message"]["content"] for c in answer["choices"]] for answer in (theirs, own)]
    assert texts[0] == texts[1]


def test_an_answer_of_a_form(world: World) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    status, theirs = world.post(
        "/v1/chat/completions", CHAT | {"max_tokens": 64, "response_format": form}
    )
    assert status == 200, theirs
    assert isinstance(json.loads(theirs["choices"][0]["message"]["content"])["a"], bool)


def test_what_is_wrong_is_the_callers_fault(world: World) -> None:
    status, theirs = world.post("/v1/completions", PROMPT | {"max_tokens": 5000})
    assert status == 400, theirs


def test_a_client_that_leaves_frees_its_blocks(world: World) -> None:
    """`running` checks at the end that no engine holds a block; here they are freed soon."""
    body = json.dumps(PROMPT | {"max_tokens": 1900, "ignore_eos": True, "stream": True})
    host, _, port = world.smg.partition(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {world.smg}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        assert b"data: " in b"".join(client.recv(4096) for _ in range(2))
    deadline_s = time.monotonic() + 10
    while True:
        ledgers = [e for engines in world.system.ledgers().values() for e in engines]
        if not any(e["blocks"]["held"] for e in ledgers):
            return
        assert time.monotonic() < deadline_s, ledgers
        time.sleep(0.1)


def test_over_http(world: World) -> None:
    """smg works in front of the deployment's HTTP, as for any server of OpenAI's API."""
    assert SMG is not None
    plain = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    ports = [str(free_port()) for _ in range(2)]
    argv = (SMG, "launch", "--worker-urls", f"http://{world.own}", "--host", "127.0.0.1")
    argv += ("--port", ports[0], "--prometheus-port", ports[1], "--log-level", "warn")
    with process(*argv, environment=plain):
        address = f"127.0.0.1:{ports[0]}"
        wait_for_model(address)
        body = CHAT | {"max_tokens": 16}
        status, answer = world.post("/v1/chat/completions", body, at=address)
        _, own = world.post("/v1/chat/completions", body, at=world.own)
        assert status == 200 and answer["choices"] == own["choices"]
        status, text = ask(address, "POST", "/v1/chat/completions", body | {"stream": True})
        assert status == 200 and text.rstrip().endswith("data: [DONE]")
