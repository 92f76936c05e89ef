"""A running target from a client's side: both fronts, raw sockets, its log and its memory."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from fakes.node.node import expected_text

from baton.proto.v1 import inference_pb2

GENERATE = "/baton.v1.Inference/Generate"
PROMPT = "hello"
GOOD: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 3}
GOOD_CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 3,
}
GOOD_OF: dict[str, dict[str, Any]] = {  # by path; all others are like GOOD
    "/v1/chat/completions": GOOD_CHAT,
    "/v1/responses": {"model": "demo", "input": "hi", "max_output_tokens": 3},
    "/v1/messages": GOOD_CHAT,
    "/v1/messages/count_tokens": {name: GOOD_CHAT[name] for name in ("model", "messages")},
    "/tokenize": {"model": "demo", "prompt": PROMPT},
    "/detokenize": {"model": "demo", "tokens": [1]},
    "/v1/load_lora_adapter": {"lora_name": "fluent", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "fluent"},
}
_TARGET = Path(__file__).with_name("target.py")
_START_S = 60.0
_ANSWER_S = 20.0  # generous: the machine may be busy

# Never visible to a caller: traces, our source and model paths, internal addresses, our classes.
LEAKS = re.compile(
    r"Traceback|\.py\b|File \"|/root/|/tmp/|/home/|site-packages|0x[0-9a-f]{6,}|"
    r"<class|object at|DecodeError|aiohttp|asyncio|127\.0\.0\.1:\d+"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """`status`: HTTP's number, or gRPC's name. `code`, `param`: of the error, or empty."""

    status: int | str
    code: str
    param: str | None
    text: str
    headers: Mapping[str, str]


class Target:
    """A target that ends when the stdin of `process` closes; `log_path` has all its output."""

    def __init__(
        self, process: subprocess.Popen[bytes], started: Mapping[str, Any], log_path: Path
    ) -> None:
        self.http_port: int = started["http"]
        self.grpc_port: int = started["grpc"]
        self.node_port: int = started["node"]
        self.engine_port: int = started["engine"]
        self.incarnation: str = started["incarnation"]  # the engine's
        self.routes = [(method, path) for method, path in started["routes"]]
        self._process = process
        self._log_path = log_path
        self.channel = self.open_channel(self.grpc_port)

    def open_channel(self, port: int) -> grpc.Channel:
        options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
        return grpc.insecure_channel(f"127.0.0.1:{port}", options=options)

    # --- HTTP -------------------------------------------------------------------------------------

    def http(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """One request on a connection of its own."""
        with closing(
            http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=_ANSWER_S)
        ) as connection:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
            return _http_answer(response.status, dict(response.getheaders()), text)

    def post(self, path: str, body: bytes | Mapping[str, Any], **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} | headers
        return self.http("POST", path, data, {k.replace("_", "-"): v for k, v in given.items()})

    # --- gRPC -------------------------------------------------------------------------------------

    def generate(
        self,
        message: inference_pb2.GenerateRequest | bytes,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> Answer:
        """Generate until the end; bytes are sent verbatim."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        return self.call(GENERATE, data, metadata)

    def call(
        self,
        method: str,
        data: bytes,
        metadata: Sequence[tuple[str, str]] = (),
        *,
        channel: grpc.Channel | None = None,
    ) -> Answer:
        """Call any method with any bytes; the text is that of all chunks."""
        stub = (channel or self.channel).stream_stream(
            method, request_serializer=bytes, response_deserializer=bytes
        )
        call = stub(iter([data]), timeout=_ANSWER_S, metadata=metadata, wait_for_ready=True)
        try:
            chunks = [inference_pb2.GenerateChunk.FromString(raw) for raw in call]
        except grpc.RpcError as error:
            return _grpc_answer(error)
        return Answer("OK", "", None, "".join(chunk.text for chunk in chunks), {})

    # --- raw --------------------------------------------------------------------------------------

    @contextmanager
    def connect(self, port: int | None = None) -> Iterator[socket.socket]:
        with socket.create_connection(
            ("127.0.0.1", port or self.http_port), timeout=_ANSWER_S
        ) as plain:
            yield plain

    # --- health -----------------------------------------------------------------------------------

    def check_serves(self, **headers: str) -> None:
        """Raise unless a good request succeeds on both fronts at this moment."""
        answer = self.post("/v1/completions", GOOD, **headers)
        assert answer.status == 200, (answer, self.log_tail())
        text = json.loads(answer.text)["choices"][0]["text"]
        assert text == expected_text(PROMPT, 3)
        message = inference_pb2.GenerateRequest(text=PROMPT)
        message.sampling.max_tokens = 3
        metadata = [(key.lower(), value) for key, value in headers.items()]
        over_grpc = self.generate(message, metadata)
        assert (over_grpc.status, over_grpc.text) == ("OK", text), (over_grpc, self.log_tail())

    def log_tail(self) -> str:
        return self._log_path.read_text(errors="replace")[-4000:]

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def rss_bytes(self) -> int:
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def pid(self) -> int:
        return self._process.pid

    def num_files(self) -> int:
        return len(list(Path(f"/proc/{self._process.pid}/fd").iterdir()))


@contextmanager
def running(folder: Path, config: Mapping[str, Any]) -> Iterator[Target]:
    """A separate target; its log goes to `folder`."""
    log_path = folder / "gateway.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(_TARGET), json.dumps(dict(config))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log_path.read_text()
        target = Target(process, json.loads(line), log_path)
        yield target
        target.channel.close()
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(_START_S)
        finally:
            process.kill()


def read_answer(plain: socket.socket) -> Answer:
    """Read the next HTTP response from a raw socket."""
    response = http.client.HTTPResponse(plain)
    response.begin()
    text = response.read().decode("utf-8", "replace")
    return _http_answer(response.status, dict(response.getheaders()), text)


def read_to_end(plain: socket.socket, timeout_s: float = _ANSWER_S) -> bytes:
    """Read until the other side closes; raises TimeoutError if it does not."""
    ends_s, parts = time.monotonic() + timeout_s, []
    while True:
        plain.settimeout(max(0.01, ends_s - time.monotonic()))
        try:
            part = plain.recv(1 << 16)
        except ConnectionError:
            return b"".join(parts)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _http_answer(status: int, headers: Mapping[str, str], text: str) -> Answer:
    error: Any = {}
    if status >= 400:
        try:
            error = json.loads(text)["error"]
        except (ValueError, TypeError, KeyError):
            error = {"code": "", "param": None}
    return Answer(status, error.get("code", ""), error.get("param"), text, headers)


def _grpc_answer(error: Any) -> Answer:
    trailers = {key: str(value) for key, value in error.trailing_metadata() or ()}
    return Answer(
        error.code().name,
        trailers.get("baton-error-code", ""),
        trailers.get("baton-error-param"),
        error.details() or "",
        trailers,
    )
