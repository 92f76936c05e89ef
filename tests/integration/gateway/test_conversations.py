"""Conversations with the official clients: reasoning, tools, Responses and Anthropic's messages.

A real gateway and a private Redis; the nodes write what the test has them write.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from fakes.gateway.byte_model import write_byte_model
from fakes.node.node import FakeNode

from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.redis_server import RedisServer
from baton.cluster.secret import ClusterSecret
from baton.core.config import ClusterConfig, GatewayConfig
from baton.core.membership import Role
from baton.gateway.process.server import serve
from baton.gateway.request.session import SessionLimits
from baton.proto import codec

SECRET = "test secret"
TEMPLATE = """
{%- for tool in tools or [] %}tool {{ tool.function.name }} <tool_call>
{% endfor %}
{%- for m in messages %}
{{- m.role }}: {% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %} {{ call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %}{{ '\\n' }}
{%- endfor %}assistant:
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}"""
TOOL = {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
USER = [{"role": "user", "content": "hi"}]
PROMPT = "user: hi\nassistant:<think>\n"


@dataclass
class World:
    """A gateway and its nodes, and the clients of both companies."""

    url: str
    http: aiohttp.ClientSession
    openai: openai.AsyncOpenAI
    nodes: tuple[FakeNode, FakeNode]

    def writes(self, answer: str) -> None:
        for node in self.nodes:
            node.answer = answer

    @property
    def last_prompt(self) -> str:
        """Of the last request, as text."""
        request = codec.request_from_wire(self.nodes[0].dispatched[-1])
        return bytes(request.prompt_token_ids.tolist()).decode()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_byte_model(tmp_path_factory.mktemp("models") / "demo", max_model_len=2048)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
async def world(redis_server: RedisServer, model_dir: Path) -> AsyncIterator[World]:
    cluster = ClusterConfig(redis_server.url, f"c{time.monotonic_ns()}", SECRET)
    config = GatewayConfig(grpc_port=0, http_port=0, model=str(model_dir), max_num_requests=8)
    limits = SessionLimits(recovery_wait_s=0.3, avoid_s=0.1)
    gateway = await serve(config, cluster, session_limits=limits)
    prefill = FakeNode(Role.PREFILL, "p1", "1" * 32, secret=SECRET, max_model_len=2048)
    decode = FakeNode(
        Role.DECODE, "d1", "2" * 32, [prefill.incarnation], secret=SECRET, max_model_len=2048
    )
    directory = RedisDirectory(cluster.redis_url, cluster.cluster, ClusterSecret(SECRET))
    for node in (prefill, decode):
        node.num_blocks = 200
        await node.start()
        await directory.announce(node.member, 5.0)
    url = f"http://127.0.0.1:{gateway.http_port}"
    async with (
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(10)) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as of_openai,
    ):
        await gateway.wait_ready(5)
        yield World(url, http, of_openai, (prefill, decode))
    await gateway.stop(grace_s=0.0)
    await directory.close()
    for node in (prefill, decode):
        await node.kill()


# --- chats that reason ----------------------------------------------------------------------------


async def chat(world: World, **more: Any) -> Any:
    body: Any = {"model": "demo", "messages": USER} | more
    return await world.openai.chat.completions.create(**body)


async def test_reasoning_is_beside_the_answer(world: World) -> None:
    world.writes("let me\nsee\n</think>\n\nhello")
    answer = await chat(world)
    assert world.last_prompt == PROMPT
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("hello", "stop")
    assert choice.message.model_extra["reasoning_content"] == "let me\nsee"
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    found = {"reasoning_content": "", "content": ""}
    async for event in await chat(world, stream=True):
        for key, text in event.choices[0].delta.model_dump(exclude_unset=True).items():
            if key in found:
                found[key] += text
    assert found == {"reasoning_content": "let me\nsee", "content": "hello"}


async def test_reasoning_that_is_off_or_cut(world: World) -> None:
    world.writes("hello")
    for more in (
        {"extra_body": {"enable_thinking": False}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "none"},
    ):
        answer = await chat(world, **more)
        assert world.last_prompt.endswith("</think>\n\n")
        assert answer.choices[0].message.content == "hello"
        assert "reasoning_content" not in answer.choices[0].message.model_extra
    answer = await chat(world, max_tokens=4)
    message = answer.choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == (None, "hell")
    assert answer.choices[0].finish_reason == "length"


async def test_reasoning_is_given_back_to_the_template(world: World) -> None:
    world.writes("x</think>y")
    said = {"role": "assistant", "content": "yes", "reasoning_content": "why"}
    await chat(world, messages=[*USER, said, *USER])
    assert world.last_prompt == f"user: hi\nassistant: (why) yes\n{PROMPT}"


async def test_calls_come_behind_reasoning(world: World) -> None:
    tools = [{"type": "function", "function": TOOL}]
    world.writes(f"<tool_call> or not?</think>\n\n{CALL}")
    answer = await chat(world, tools=tools)
    (choice,) = answer.choices
    assert choice.message.model_extra["reasoning_content"] == "<tool_call> or not?"
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert choice.message.tool_calls[0].function.arguments == '{"zone": "UTC"}'


async def test_a_forced_call_ends_the_reasoning_where_no_grammar_can_follow_it(
    world: World,
) -> None:
    """The byte model's tags are several tokens."""
    world.writes(' {"zone": "UTC"}}')
    tools = [{"type": "function", "function": TOOL}]
    answer = await chat(world, tools=tools, tool_choice="required")
    assert world.last_prompt.endswith('<think>\n\n</think>\n\n<tool_call>\n{"name": "')
    assert answer.choices[0].message.model_dump(exclude_unset=True).get("reasoning_content") is None
    with pytest.raises(openai.BadRequestError) as error:
        await chat(world, response_format={"type": "json_object"})
    assert (error.value.code, error.value.param) == ("unsupported_parameter", "response_format")
    with pytest.raises(openai.BadRequestError) as error:
        await chat(world, extra_body={"thinking_token_budget": 5})
    assert error.value.param == "thinking_token_budget"
