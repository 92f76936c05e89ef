"""A real gateway over HTTP and a private Redis; the nodes have no engines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.gateway.byte_model import write_byte_model
from fakes.node.node import FakeNode, expected_text
from patience import AT_ONCE_S

from baton.client import AsyncClient
from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.redis_server import RedisServer
from baton.cluster.secret import ClusterSecret
from baton.core.config import ClusterConfig, GatewayConfig
from baton.core.errors import BatonError, EngineFailed
from baton.core.membership import Role
from baton.gateway.admission.running_call import RunningCall
from baton.gateway.http.protocol.body import MAX_BODY_BYTES
from baton.gateway.process.server import Gateway, serve
from baton.gateway.request.setbacks import SessionLimits

SECRET = "test secret"
PROMPT = "hello"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
PLAIN: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 9}
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 9,
}
CHAT_PROMPT = "user: hi\nassistant:"


@dataclass
class World:
    """One gateway, one prefill and one decode node; a connection pool for its HTTP port."""

    gateway: Gateway
    http: aiohttp.ClientSession
    grpc: AsyncClient
    prefill: FakeNode
    decode: FakeNode

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        """Status, headers and parsed body."""
        async with self.http.post(path, json=body, headers=headers) as answer:
            return answer.status, answer.headers, json.loads(await answer.read())

    async def refusal(self, path: str, body: Any) -> tuple[int, str, str | None]:
        """Status, code and param of a response that is an OpenAI error object."""
        status, _, answer = await self.post(path, body)
        assert set(answer) == {"error"}, answer
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error["code"], error["param"]


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_byte_model(tmp_path_factory.mktemp("models") / "demo")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
async def world(redis_server: RedisServer, model_dir: Path) -> AsyncIterator[World]:
    cluster = ClusterConfig(redis_server.url, f"c{time.monotonic_ns()}", SECRET)
    config = GatewayConfig(grpc_port=0, http_port=0, model=str(model_dir), max_num_requests=8)
    limits = SessionLimits(recovery_wait_s=0.3, avoid_s=0.1)
    gateway = await serve(config, cluster, session_limits=limits)
    prefill = FakeNode(Role.PREFILL, "p1", "1" * 32, secret=SECRET)
    decode = FakeNode(Role.DECODE, "d1", "2" * 32, [prefill.incarnation], secret=SECRET)
    directory = RedisDirectory(
        RedisClient(cluster.redis_url, cluster.cluster, ClusterSecret(SECRET))
    )
    for node in (prefill, decode):
        await node.start()
        await directory.announce(node.member, 5.0)
    base = f"http://127.0.0.1:{gateway.http_port}"
    timeout = aiohttp.ClientTimeout(10)
    async with (
        aiohttp.ClientSession(base, timeout=timeout) as http,
        AsyncClient(f"127.0.0.1:{gateway.port}") as client,
    ):
        await asyncio.wait_for(gateway.startup_lines(), 5)
        yield World(gateway, http, client, prefill, decode)
    await gateway.stop(grace_s=0.0)
    await directory.close()
    for node in (prefill, decode):
        await node.kill()


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def events_of(text: str) -> list[Any]:
    """The JSON of each event; the final [DONE] is checked and left out."""
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_what_is_refused_is_counted_once_wherever_it_is_found_out(world: World) -> None:
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
    for path in paths:
        assert (await world.post(path, {"model": 5}))[0] == 400
    body = {"model": "demo", "prompt": "x", "max_tokens": 1, "logit_bias": {"100000": 1}}
    assert (await world.post("/v1/completions", body))[0] == 400
    assert (await world.post("/v1/completions", {**body, "model": "other"}))[0] == 404
    assert (await world.post("/tokenize", {"prompt": 5}))[0] == 400, "which is no call"
    async with world.http.get("/metrics") as answer:
        lines = [line for line in (await answer.text()).splitlines() if "rejections_total{" in line]
    counted = dict(re.findall(r'reason="(\w+)"} (\d+)', "\n".join(lines)))
    assert {reason: int(number) for reason, number in counted.items() if number != "0"} == {
        "invalid_value": len(paths),
        "invalid_token_id": 1,
        "model_not_found": 1,
    }


async def test_a_whole_completion(world: World) -> None:
    status, headers, body = await world.post("/v1/completions", PLAIN, **{"X-Request-ID": "mine"})
    assert (status, headers["X-Request-ID"], headers["Server"]) == (200, "mine", "baton")
    nodes = [headers[f"x-{name}"] for name in ("prefill-node", "decode-node", "cached-tokens")]
    assert nodes == ["p1", "d1", "0"]
    assert body["choices"] == [
        {
            "index": 0,
            "text": expected_text(PROMPT, 9),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 9,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (body["object"], body["model"]) == ("text_completion", "demo")
    assert abs(body["created"] - time.time()) < 10


async def test_a_streamed_completion(world: World) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with world.http.post("/v1/completions", json=PLAIN | options) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        events = events_of(await answer.text())
        assert answer.headers["X-Request-ID"] == events[0]["id"].removeprefix("cmpl-")
    *chunks, last = events
    assert "".join(c["choices"][0]["text"] for c in chunks) == expected_text(PROMPT, 9)
    assert {c["id"] for c in events} == {last["id"]}
    assert [c["usage"] for c in chunks] == [None] * len(chunks)
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 14)
    assert (last["prefill_node"], last["decode_node"]) == ("p1", "d1")


async def test_continuous_usage(world: World) -> None:
    world.decode.token_s = 0.005
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = CHAT | {"stream": True, "stream_options": options}
    async with world.http.post("/v1/chat/completions", json=body) as answer:
        events = events_of(await answer.text())
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 9
    assert {event["usage"]["prompt_tokens"] for event in events} == {len(CHAT_PROMPT)}


async def test_a_chat(world: World) -> None:
    status, _, body = await world.post("/v1/chat/completions", CHAT)
    assert status == 200
    message = body["choices"][0]["message"]
    assert message == {"role": "assistant", "content": expected_text(CHAT_PROMPT, 9)}
    async with world.http.post("/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        deltas = [event["choices"][0]["delta"] for event in events_of(await answer.text())]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(d["content"] for d in deltas) == expected_text(CHAT_PROMPT, 9)


async def test_several_prompts_at_once(world: World) -> None:
    prompts = [f"prompt {i}" for i in range(5)]
    wanted = [expected_text(prompt, 9) for prompt in prompts]
    ids = [list(prompt.encode()) for prompt in prompts]
    for given in (prompts, ids):
        _, _, body = await world.post("/v1/completions", PLAIN | {"prompt": given, "echo": True})
        texts = [choice["text"] for choice in body["choices"]]
        assert texts == [prompt + text for prompt, text in zip(prompts, wanted, strict=True)]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4]
        assert body["usage"]["total_tokens"] == sum(map(len, prompts)) + 5 * 9
    body = PLAIN | {"prompt": prompts, "stream": True}
    async with world.http.post("/v1/completions", json=body) as answer:
        events = events_of(await answer.text())
    streamed = [""] * 5
    for choice in (event["choices"][0] for event in events):
        streamed[choice["index"]] += choice["text"]
    assert streamed == wanted
    assert len({event["id"] for event in events}) == 1


async def test_one_bad_prompt_refuses_all(world: World) -> None:
    bad = PLAIN | {"prompt": ["a", "b", ""]}
    assert await world.refusal("/v1/completions", bad) == (400, "empty_prompt", "prompt[2]")
    bad = PLAIN | {"prompt": [[1], [2, 300]], "stream": True}
    refusal = (400, "invalid_token_id", "prompt[1][1]")
    assert await world.refusal("/v1/completions", bad) == refusal
    too_many = PLAIN | {"prompt": ["a"] * 9}  # more than fit max_num_requests
    status, code, _ = await world.refusal("/v1/completions", too_many)
    assert (status, code) in ((429, "overloaded"), (503, "overloaded"))


async def test_stop_strings_and_what_is_shown_of_them(world: World) -> None:
    whole = expected_text(PROMPT, 100)
    stop = whole[10:14]
    body = PLAIN | {"max_tokens": 100, "stop": stop}
    _, _, answer = await world.post("/v1/completions", body)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        whole[:10], "stop", stop,
    )  # fmt: skip
    _, _, answer = await world.post(
        "/v1/completions", body | {"include_stop_str_in_output": True, "stream": False}
    )
    assert answer["choices"][0]["text"] == whole[:14]
    over_grpc = world.grpc.generate(
        PROMPT, max_tokens=100, stop=stop, include_stop_str_in_output=True
    )
    assert (await over_grpc.finish()).text == whole[:14]


@pytest.mark.parametrize("includes", [False, True])
async def test_a_stop_id_is_told_and_not_shown(world: World, includes: bool) -> None:
    world.prefill.answer = world.decode.answer = "abcd"
    more = {"stop_token_ids": [ord("d")], "include_stop_str_in_output": includes}
    shown = "abcd" if includes else "abc"
    _, _, answer = await world.post("/v1/completions", PLAIN | more)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        shown, "stop", ord("d"),
    )  # fmt: skip
    _, _, answer = await world.post("/v1/chat/completions", CHAT | more)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == (shown, ord("d"))
    async with world.http.post("/v1/completions", json=PLAIN | more | {"stream": True}) as answer:
        lines = (await answer.text()).splitlines()
    events = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == shown
    assert events[-1]["choices"][0]["stop_reason"] == ord("d")
    _, _, answer = await world.post("/v1/messages", CHAT | more)
    assert answer["content"][0]["text"] == shown
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    over_grpc = await world.grpc.generate(PROMPT, max_tokens=9, **more).finish()
    assert (over_grpc.text, over_grpc.matched_stop) == (shown, ord("d"))
    assert over_grpc.token_ids == tuple(b"abcd")


BAD_CALLS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": None}, 400, "missing_required", "model"),
    ({"model": "other"}, 404, "model_not_found", "model"),
    ({"model": "../../etc"}, 404, "model_not_found", "model"),
    ({"model": "x" * 300}, 404, "model_not_found", "model"),
    ({"model": ""}, 400, "missing_required", "model"),
    ({"prompt": None}, 400, "missing_required", "prompt"),
    ({"prompt": ""}, 400, "empty_prompt", "prompt"),
    ({"prompt": [264]}, 400, "invalid_token_id", "prompt[0]"),
    ({"prompt": [1] * 512}, 400, "context_length_exceeded", "prompt"),
    ({"max_tokens": 508}, 400, "context_length_exceeded", "max_tokens"),
    ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    ({"min_tokens": 10}, 400, "invalid_value", "min_tokens"),
    ({"n": 0}, 400, "invalid_value", "n"),
    ({"n": 10**9}, 400, "invalid_value", "n"),
    ({"temperature": -1}, 400, "invalid_value", "temperature"),
    ({"temperature": 2.01}, 400, "invalid_value", "temperature"),
    ({"top_p": 0}, 400, "invalid_value", "top_p"),
    ({"top_p": 1.1}, 400, "invalid_value", "top_p"),
    ({"min_p": 2}, 400, "invalid_value", "min_p"),
    ({"presence_penalty": 1e308}, 400, "invalid_value", "presence_penalty"),
    ({"logit_bias": {"264": 1}}, 400, "invalid_token_id", "logit_bias"),
    ({"logit_bias": {"1": 1e9}}, 400, "invalid_value", "logit_bias"),
    ({"logprobs": 10_000}, 400, "invalid_value", "logprobs"),
    ({"prompt_logprobs": 21}, 400, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, 400, "unsupported_parameter", "prompt_logprobs"),
    ({"stop": ["a", ""]}, 400, "invalid_value", "stop[1]"),
    ({"stop": "é" * 200}, 400, "invalid_value", "stop[0]"),
    ({"stream_options": {}}, 400, "invalid_value", "stream_options"),
    ({"cache_salt": ""}, 400, "invalid_value", "cache_salt"),
    ({"cache_salt": "a\nb"}, 400, "invalid_value", "cache_salt"),
    ({"cache_salt": "x" * 65}, 400, "invalid_value", "cache_salt"),
    ({"response_format": {"type": "wat"}}, 400, "unsupported_parameter", "response_format"),
]


@pytest.mark.parametrize(("change", "status", "code", "param"), BAD_CALLS)
async def test_bad_calls(
    world: World, change: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    assert await world.refusal("/v1/completions", PLAIN | change) == (status, code, param)
    is_about_prompt = "prompt" in change or "logprobs" in change
    if not is_about_prompt:
        reported = await world.refusal("/v1/chat/completions", CHAT | change)
        wanted = status, code, param
        if code != "context_length_exceeded":  # the template lengthens the prompt
            assert reported == wanted
    if param is None or status == 404 or set(change) & {"stream", "stream_options", "model"}:
        return
    await _same_over_grpc(world, change, code, param)


async def _same_over_grpc(world: World, change: dict[str, Any], code: str, param: str) -> None:
    """The same request over gRPC gets the same verdict, where gRPC can express it."""
    params = {"max_tokens": 9} | change
    prompt = params.pop("prompt", PROMPT)
    if prompt is None or "response_format" in params:
        return
    if isinstance(prompt, list):
        params["prompt_token_ids"], prompt = prompt, None
    if "logit_bias" in params:
        params["logit_bias"] = {int(key): value for key, value in params["logit_bias"].items()}
    with pytest.raises(BatonError) as caught:
        await world.grpc.generate(prompt, **params).finish()
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"max_tokens": None, "max_completion_tokens": 0}, "invalid_value",
         "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"top_logprobs": 2}, "invalid_value", "top_logprobs"),
        ({"messages": None}, "missing_required", "messages"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "context_length_exceeded",
         "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter",
         "tools"),
    ],
)  # fmt: skip
async def test_bad_chats(world: World, change: dict[str, Any], code: str, param: str) -> None:
    assert await world.refusal("/v1/chat/completions", CHAT | change) == (400, code, param)


async def raw(world: World, data: Any, **headers: str) -> tuple[int, str]:
    """Status and code for a body that is sent verbatim."""
    given = {"Content-Type": "application/json"} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    skipped = [key for key, value in given.items() if not value]
    kept = {key: value for key, value in given.items() if value}
    async with world.http.post(
        "/v1/completions", data=data, headers=kept, skip_auto_headers=skipped
    ) as answer:
        assert answer.content_type == "application/json"
        return answer.status, (await answer.json())["error"]["code"]


async def test_bad_bodies(world: World) -> None:
    assert await raw(world, b"") == (400, "invalid_json")
    assert await raw(world, b'{"model": "demo"} {}') == (400, "invalid_json")
    assert await raw(world, b"[]") == (400, "invalid_value")
    assert await raw(world, b"{}", Content_Type="text/plain") == (415, "unsupported_media_type")
    assert await raw(world, b"{}", Content_Type="") == (415, "unsupported_media_type")
    form = "multipart/form-data; boundary=x"
    assert await raw(world, b"{}", Content_Type=form) == (415, "unsupported_media_type")
    latin = "application/json; charset=latin-1"
    assert await raw(world, b"{}", Content_Type=latin) == (415, "unsupported_encoding")
    assert await raw(world, b"{}", Content_Encoding="gzip") == (415, "unsupported_encoding")


async def test_a_body_is_read_up_to_the_cap_and_no_further(world: World) -> None:
    body = json.dumps(PLAIN).encode()
    fitting = body + b" " * (MAX_BODY_BYTES - len(body))
    async with world.http.post(
        "/v1/completions", data=io.BytesIO(fitting), headers={"Content-Type": "application/json"}
    ) as answer:
        assert answer.status == 200
    assert await raw(world, io.BytesIO(fitting + b" ")) == (413, "request_too_large")
    reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.http_port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    num_sent = 0
    with contextlib.suppress(ConnectionError):
        while num_sent < 4 * MAX_BODY_BYTES:
            writer.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
            num_sent += 0x10000
            await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413") and b"Connection: close" in head
    writer.close()


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/nope", "/v1/../admin", "//v1/models", "/invocations", "/update_weights",
     "/pause", "/collective_rpc", "/v1/embeddings", "/v1/responses/x/y", "/V1/models",
     "/v1/models/"],
)  # fmt: skip
async def test_unknown_paths(world: World, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.http_port)
    for method in ("GET", "POST"):
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r")[0])
        body = json.loads(await reader.readexactly(length))
        assert head.startswith("HTTP/1.1 404"), head
        assert body["error"]["code"] in ("not_found", "model_not_found")
    writer.close()


async def test_wrong_methods(world: World) -> None:
    async with world.http.get("/v1/completions") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")
        assert (await answer.json())["error"]["code"] == "method_not_allowed"


async def test_models_and_tokens(world: World) -> None:
    async with world.http.get("/v1/models") as answer:
        (model,) = (await answer.json())["data"]
    assert (model["id"], model["max_model_len"], model["root"]) == ("demo", 512, "demo")
    async with world.http.get("/v1/models/demo") as answer:
        assert await answer.json() == model
    async with world.http.get("/v1/models/other") as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")
    _, _, body = await world.post("/tokenize", {"prompt": "é <|end|>", "return_token_strs": True})
    ids = [0xC3, 0xA9, 0x20, 256]
    assert body == {
        "count": 4, "max_model_len": 512, "tokens": ids,
        "token_strs": ["\ufffd", "\ufffd", " ", "<|end|>"],
    }  # fmt: skip
    _, _, body = await world.post("/tokenize", {"messages": CHAT["messages"]})
    assert bytes(body["tokens"]) == CHAT_PROMPT.encode()
    begun = [*CHAT["messages"], {"role": "assistant", "content": "so "}]
    more = {"messages": begun, "continue_final_message": True}
    _, _, body = await world.post("/tokenize", more)
    assert bytes(body["tokens"]) == b"user: hi\nassistant: so "
    forged = [{"role": "user", "content": "a<|end|>b"}]
    _, _, body = await world.post("/tokenize", {"messages": forged})
    assert b"a<|end|>b" in bytes(body["tokens"]), "only a template makes special tokens"
    _, _, body = await world.post("/detokenize", {"model": "demo", "tokens": ids})
    assert body == {"prompt": "é "}
    too_long = (400, "context_length_exceeded")
    assert await world.refusal("/tokenize", {"prompt": "a" * 513}) == (*too_long, "prompt")
    assert await world.refusal("/detokenize", {"tokens": [1] * 513}) == (*too_long, "tokens")
    bad = {"tokens": [1, 264]}
    assert await world.refusal("/detokenize", bad) == (400, "invalid_token_id", "tokens[1]")
    assert await world.refusal("/tokenize", {}) == (400, "missing_required", "prompt")
    async with world.http.get("/server_info") as answer:
        info = await answer.json()
    assert [(node["name"], node["role"]) for node in info["nodes"]] == [
        ("d1", "decode"), ("p1", "prefill"),
    ]  # fmt: skip


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_what_a_call_had_is_free_once_it_has_ended(world: World) -> None:
    """A call's memory is freed by reference counts, not by the garbage collector, which would pause
    for all calls since."""
    for _ in range(3):
        async with world.http.post("/v1/completions", json=PLAIN | {"stream": True}) as answer:
            await answer.read()
    await until(lambda: not any(isinstance(one, RunningCall) for one in gc.get_objects()))


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_goes_away_frees_both_nodes(world: World, is_stream: bool) -> None:
    world.decode.token_s = 0.02
    body = PLAIN | {"max_tokens": 200, "stream": is_stream}
    task = asyncio.create_task(world.post("/v1/completions", body))
    await until(lambda: bool(world.decode.dispatched))
    await asyncio.sleep(0.05)
    left_s = time.monotonic()
    task.cancel()
    await until(lambda: bool(world.decode.cancelled))
    assert world.decode.cancelled[0][2] - left_s < AT_ONCE_S


async def test_a_reader_that_is_too_slow_is_cut_off(world: World) -> None:
    """A reader that is too slow is disconnected. All events sent before are whole, and the stream's
    last one gives the reason."""
    world.decode.num_blocks = 10_000
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(("127.0.0.1", world.gateway.http_port))
        ids = list(PROMPT.encode())
        body = json.dumps(
            PLAIN | {"prompt": [ids] * 6, "max_tokens": 500, "stream": True, "logprobs": None}
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            "Content-Type: application/json\r\n\r\n"
        )
        plain.sendall(head.encode() + body)
        await until(lambda: bool(world.decode.cancelled), 5.0)
    await until(lambda: len(world.gateway._sessions) == 0)


async def test_a_reader_that_stops_keeps_its_place_until_its_deadline(world: World) -> None:
    """A reader that stops keeps its slot until its deadline, even if its tokens are complete, and
    too few to count as slow."""
    world.decode.num_blocks, sessions = 10_000, world.gateway._sessions
    world.gateway._door._max_request_s = 1.0
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(("127.0.0.1", world.gateway.http_port))
        body = json.dumps(
            PLAIN | {"prompt": [PROMPT] * 6, "max_tokens": 250, "stream": True, "logprobs": 20}
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            "Content-Type: application/json\r\n\r\n"
        )
        plain.sendall(head.encode() + body)
        await until(lambda: sessions._admitted.total() == 6)
        await until(lambda: len(sessions) == 0)
        assert sessions._admitted and not world.decode.cancelled
        await asyncio.wait_for(sessions.is_idle.wait(), 10)


async def test_abort_over_grpc_ends_a_stream_over_http(world: World) -> None:
    world.decode.token_s = 0.02
    body = PLAIN | {"max_tokens": 200, "stream": True}
    async with world.http.post(
        "/v1/completions", json=body, headers={"X-Request-ID": "mine"}
    ) as answer:
        await answer.content.readuntil(b"\n\n")
        assert await world.grpc.abort("mine") == 1
        rest = (await answer.text()).split("\n\n")
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "cancelled"
    assert "[DONE]" not in rest


async def test_a_gateway_that_stops_tells_whom_it_cuts_off(world: World) -> None:
    world.decode.token_s = 0.02
    body = PLAIN | {"max_tokens": 200}
    plain = asyncio.create_task(world.post("/v1/completions", body))
    async with world.http.post("/v1/completions", json=body | {"stream": True}) as answer:
        await answer.content.readuntil(b"\n\n")
        await world.gateway.stop(grace_s=0.1)
        rest = (await answer.text()).split("\n\n")
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert (error["code"], error["message"]) == ("unavailable", "this gateway is shutting down")
    status, _, error_body = await plain
    assert (status, error_body["error"]["code"]) == (503, "unavailable")


async def test_the_load_of_an_idle_deployment(world: World) -> None:
    async with world.http.get("/load") as answer:
        assert await answer.json() == {
            "server_load": 0, "num_requests_running": 0, "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0.0,
        }  # fmt: skip


async def test_failures_before_the_first_token_have_a_status(world: World) -> None:
    world.prefill.error = EngineFailed("secret path /x/y")
    status, headers, body = await world.post("/v1/completions", PLAIN | {"stream": True})
    assert (status, body["error"]["code"], body["error"]["type"]) == (
        500, "engine_failed", "server_error",
    )  # fmt: skip
    assert "/x/y" not in body["error"]["message"]
    world.prefill.error = None
    await world.decode.kill()
    status, headers, body = await world.post("/v1/completions", PLAIN)
    assert (status, headers["Retry-After"]) == (503, "1")
    assert body["error"]["code"] in ("unavailable", "node_lost")
    async with world.http.get("/ready") as answer:
        assert answer.status == 503
        assert (await answer.json())["reason"] == "no decode node is ready"


async def test_a_failure_in_a_stream_is_its_last_event(world: World) -> None:
    world.decode.token_s = 0.02
    body = PLAIN | {"max_tokens": 200, "stream": True}
    async with world.http.post("/v1/completions", json=body) as answer:
        await answer.content.readuntil(b"\n\n")
        await world.decode.kill()
        await world.prefill.kill()
        rest = (await answer.text()).split("\n\n")
    error = json.loads(rest[-2].removeprefix("data: "))["error"]
    assert error["code"] in ("unavailable", "node_lost")
    assert "[DONE]" not in rest


async def test_openapi_has_every_route_and_nothing_dangles(world: World) -> None:
    async with world.http.get("/openapi.json") as answer:
        document = await answer.json()
    assert document["openapi"] == "3.1.0"
    routes = {
        (route.resource.canonical, route.method.lower())
        for route in world.gateway._http._runner.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    listed = {(path, method) for path, item in document["paths"].items() for method in item}
    assert listed == routes
    schemas = document["components"]["schemas"]
    pending: list[Any] = [document]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].removeprefix("#/components/schemas/") in schemas
            pending += value.values()
        elif isinstance(value, list):
            pending += value


async def test_what_is_listed_is_all_there_is(world: World) -> None:
    """Every route that is served must be listed here."""
    paths = {
        route.resource.canonical
        for route in world.gateway._http._runner.app.router.routes()
        if route.resource is not None
    }
    ours = {path for path in paths if not path.startswith(("/dashboard", "/api/", "/admin/"))}
    assert ours - {"/metrics"} == {
        "/live", "/ready", "/health", "/version", "/load", "/v1/models", "/v1/models/{model}",
        "/server_info", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize",
        "/v1/responses", "/v1/responses/{response_id}", "/v1/messages", "/v1/messages/count_tokens",
        "/openapi.json", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    }  # fmt: skip


async def test_nodes_that_take_no_constraints_are_never_asked_to(world: World) -> None:
    """Nodes that do not support constraints receive none: both fronts refuse them, naming what is
    missing, and serve everything else."""
    bodies = (
        ("/v1/completions", PLAIN | {"guided_regex": "a+"}, "guided_regex"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}},
         "response_format"),
    )  # fmt: skip
    for path, body, _ in bodies:
        assert (await world.post(path, body))[0] == 200
    for engine in world.gateway._table.engines.values():
        if engine.member.role is Role.DECODE:
            engine.member = replace(engine.member, can_constrain=False)
    for path, body, param in bodies:
        refused = (400, "unsupported_parameter", param)
        assert await world.refusal(path, body) == refused
        _, _, answer = await world.post(path, body)
        assert "no decode node" in answer["error"]["message"]
        assert "structured" in answer["error"]["message"]
    with pytest.raises(BatonError, match="structured") as over_grpc:
        await world.grpc.generate(PROMPT, max_tokens=9, regex="a+").finish()
    assert over_grpc.value.code == "unsupported_parameter"
    assert (await world.post("/v1/completions", PLAIN))[0] == 200
