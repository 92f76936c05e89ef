"""Conversations with the official clients: reasoning, tools, Responses and Anthropic's messages.

A real gateway and a private Redis; the nodes output text given by the test.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.gateway.conversation_gateway import (
    ConversationGateway,
    conversation_gateway,
    write_conversation_model,
    write_tagged_model,
)

from baton.cluster.redis_server import RedisServer

MAX_MODEL_LEN = 2048
TOOL = {"name": "now", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
USER = [{"role": "user", "content": "hi"}]
PROMPT = "user: hi\nassistant:<think>\n"


@dataclass
class World:
    """A gateway and its nodes, and clients of OpenAI and Anthropic."""

    gateway: ConversationGateway
    http: aiohttp.ClientSession
    openai: openai.AsyncOpenAI

    @property
    def url(self) -> str:
        return self.gateway.url

    def writes(self, answer: str) -> None:
        self.gateway.writes(answer)

    @property
    def last_prompt(self) -> str:
        return self.gateway.last_prompt


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversation_model(tmp_path_factory.mktemp("models") / "demo", MAX_MODEL_LEN)


@pytest.fixture
async def world(redis_server: RedisServer, model_dir: Path) -> AsyncIterator[World]:
    global openai  # here: its import takes 0.7 s, and each process imports each test file
    import openai

    async with conversation_gateway(redis_server.url, model_dir, MAX_MODEL_LEN) as gateway:
        url = gateway.url
        async with (
            aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(10)) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as of_openai,
        ):
            yield World(gateway, http, of_openai)


# --- chats with reasoning -------------------------------------------------------------------------


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
    reply = {"role": "assistant", "content": "yes", "reasoning_content": "why"}
    await chat(world, messages=[*USER, reply, *USER])
    assert world.last_prompt == f"user: hi\nassistant: (why) yes\n{PROMPT}"


async def test_a_last_message_is_continued(world: World) -> None:
    """The answer holds only the new text, in a stream too; reasoning that has begun continues."""
    world.writes(" four.")
    reply = {"role": "assistant", "content": "It is"}
    more: dict[str, Any] = {
        "messages": [*USER, reply],
        "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
    }
    (choice,) = (await chat(world, **more)).choices
    assert world.last_prompt == "user: hi\nassistant: It is"
    assert (choice.message.content, choice.finish_reason) == (" four.", "stop")
    assert "reasoning_content" not in choice.message.model_extra
    events = [event async for event in await chat(world, stream=True, **more)]
    assert "".join(event.choices[0].delta.content or "" for event in events) == " four."
    reply["content"] = "<think>\nlet"
    world.writes(" me see\n</think>\n\nfour")
    (choice,) = (await chat(world, **more)).choices
    assert choice.message.content == "four"
    assert choice.message.model_extra["reasoning_content"] == " me see"


async def test_messages_alone_are_a_prompt(world: World) -> None:
    world.writes("hello")
    await chat(world, extra_body={"add_generation_prompt": False})
    assert world.last_prompt == "user: hi\n"


async def test_a_last_message_that_is_not_continued(world: World) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    wrong: Any = [
        {"messages": USER, "extra_body": {"continue_final_message": True}},
        {"messages": [{"role": "assistant", "content": "It", "tool_calls": [call]}],
         "extra_body": {"continue_final_message": True}},
        {"messages": [{"role": "assistant", "content": "It"}],
         "extra_body": {"continue_final_message": True, "add_generation_prompt": True}},
    ]  # fmt: skip
    for more in wrong:
        with pytest.raises(openai.BadRequestError) as error:
            await chat(world, **more)
        assert (error.value.code, error.value.param) == ("invalid_value", "continue_final_message")


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
    """A forced call ends the reasoning at once, as the byte model's tags are several tokens and no
    grammar can follow them."""
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


# --- models whose tags are tokens -----------------------------------------------------------------


@dataclass
class Tagged:
    """A World whose model begins with reasoning by itself; `ids`: token ids of its tags."""

    gateway: ConversationGateway
    http: aiohttp.ClientSession
    ids: dict[str, int]

    def writes(self, *pieces: str) -> None:
        """Set the model's output, from tags and texts."""
        found = [[self.ids[one]] if one in self.ids else one.encode() for one in pieces]
        self.gateway.writes([token_id for piece in found for token_id in piece])

    async def choice(self, **more: Any) -> Any:
        body = {"model": "demo", "messages": USER, **more}
        async with self.http.post("/v1/chat/completions", json=body) as answer:
            found = await answer.json()
            assert answer.status == 200, found
            return found["choices"][0]


@pytest.fixture
async def tagged(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Tagged]:
    ids = write_tagged_model(tmp_path / "demo", MAX_MODEL_LEN)
    async with (
        conversation_gateway(redis_server.url, tmp_path / "demo", MAX_MODEL_LEN) as gateway,
        aiohttp.ClientSession(gateway.url, timeout=aiohttp.ClientTimeout(10)) as http,
    ):
        yield Tagged(gateway, http, ids)


@pytest.mark.parametrize("more", [{}, {"skip_special_tokens": True}])
async def test_special_tags_are_read_whatever_a_client_hides(
    tagged: Tagged, more: dict[str, Any]
) -> None:
    call = ("<tool_call>", CALL.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    tagged.writes("<think>", "why", "</think>", "\n\n", *call, "</tool_call>")
    tools = [{"type": "function", "function": TOOL}]
    choice = await tagged.choice(tools=tools, **more)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "why"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"zone": "UTC"}'


async def test_a_forced_call_comes_behind_reasoning_that_the_model_begins(tagged: Tagged) -> None:
    pytest.importorskip("llguidance")
    tools = [{"type": "function", "function": TOOL}]
    tagged.writes("<think>", "why", "</think>", "\n\n", "<tool_call>", '\n{"name": "now", '
                  '"arguments": {}}')  # fmt: skip
    choice = await tagged.choice(tools=tools, tool_choice="required", thinking_token_budget=5)
    requested = tagged.gateway.last_request
    assert bytes(i for i in requested.prompt_token_ids if i < 256).endswith(b"\nassistant:")
    assert requested.sampling.constraint is not None
    rules = requested.sampling.constraint.source.splitlines()
    think, end, call = (tagged.ids[tag] for tag in ("<think>", "</think>", "<tool_call>"))
    assert rules[0].startswith(f"start: <[{think}]> ") and rules[0].endswith(" | body")
    assert f"{{0,5}} <[{end}]> " in rules[0]
    assert f'start: <[{call}]> "\\n{{\\"name\\": \\"" call' in rules
    assert choice["message"]["reasoning_content"] == "why"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"


# --- OpenAI's Responses API -----------------------------------------------------------------------

FLAT_TOOL: Any = {"type": "function", "strict": False, **TOOL}


async def respond(world: World, **more: Any) -> Any:
    return await world.openai.responses.create(**({"model": "demo", "input": "hi"} | more))


async def test_a_response(world: World) -> None:
    world.writes("why</think>hello")
    answer = await respond(world, instructions="Be kind.", metadata={"a": "b"})
    assert world.last_prompt == f"system: Be kind.\n{PROMPT}"
    assert (answer.status, answer.output_text, answer.error) == ("completed", "hello", None)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "why"
    usage = answer.usage
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (16, 11)
    assert usage.input_tokens == len(world.last_prompt)
    assert (answer.instructions, answer.metadata, answer.store) == ("Be kind.", {"a": "b"}, True)
    cut = await respond(world, max_output_tokens=13, store=False)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (cut.output_text, cut.output[-1].status) == ("he", "incomplete")
    stream = await respond(world, max_output_tokens=13, store=False, stream=True)
    items = [event.item async for event in stream if event.type == "response.output_item.done"]
    assert [item.status for item in items] == ["completed", "incomplete"]


async def test_the_events_of_a_response(world: World) -> None:
    world.writes(f"why</think>{CALL}\nso")
    stream = await respond(world, tools=[FLAT_TOOL], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    once = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    assert once == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    whole = events[-1].response
    reasoning, call, message = whole.output
    assert (call.name, json.loads(call.arguments)) == ("now", {"zone": "UTC"})
    arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == call.arguments
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == [reasoning, call, message]
    with_helper = ""
    async with world.openai.responses.stream(model="demo", input="hi") as helped:
        async for event in helped:
            if event.type == "response.output_text.delta":
                with_helper += event.delta
        assert (await helped.get_final_response()).output_text == with_helper


async def test_a_conversation_goes_on_by_its_id(world: World) -> None:
    world.writes(f"why</think>{CALL}")
    first = await respond(world, tools=[FLAT_TOOL], instructions="Be kind.")
    (call,) = [item for item in first.output if item.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    world.writes("</think>It is noon.")
    second = await respond(world, previous_response_id=first.id, input=[result])
    assert world.last_prompt == (
        'user: hi\nassistant: (why)  now{"zone": "UTC"}\ntool: noon\nassistant:<think>\n'
    )
    assert second.previous_response_id == first.id
    for _ in range(2):  # the same response can be continued repeatedly
        await respond(world, previous_response_id=second.id, input="Thanks")
        assert world.last_prompt.endswith(
            "tool: noon\nassistant: It is noon.\nuser: Thanks\nassistant:<think>\n"
        )
    by_hand = [
        {"role": "user", "content": "hi"},
        *(item.to_dict() for item in first.output),
        result,
    ]
    await respond(world, input=by_hand)
    assert world.last_prompt == (
        'user: hi\nassistant: (why)  now{"zone": "UTC"}\ntool: noon\nassistant:<think>\n'
    )
    unkept = await respond(world, store=False)
    for name in (unkept.id, "resp_" + "0" * 32, "wat"):
        with pytest.raises(openai.NotFoundError) as error:
            await respond(world, previous_response_id=name)
        assert (error.value.code, error.value.param) == (
            "previous_response_not_found", "previous_response_id",
        )  # fmt: skip


async def test_functions_of_a_namespace(world: World) -> None:
    """The model sees a joined name; the client receives namespace and name apart, and returns them
    so."""
    space = {"type": "namespace", "name": "clock", "description": "x", "tools": [FLAT_TOOL]}
    world.writes(f"</think>{CALL.replace('now', 'clock__now')}")
    first = await respond(world, tools=[FLAT_TOOL, space])
    assert "tool now <tool_call>\ntool clock__now <tool_call>" in world.last_prompt
    (call,) = first.output
    assert (call.name, call.to_dict()["namespace"]) == ("now", "clock")
    stream = await respond(world, tools=[space], stream=True)
    events = [event async for event in stream]
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert done.name == "now" and events[-1].response.output[0].to_dict()["namespace"] == "clock"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    by_hand = [{"role": "user", "content": "hi"}, call.to_dict(), result]
    await respond(world, input=by_hand, tools=[space])
    by_hand_prompt = world.last_prompt
    await respond(world, input=[result], tools=[space], previous_response_id=first.id)
    assert 'clock__now{"zone": "UTC"}\ntool: noon' in by_hand_prompt == world.last_prompt


async def test_a_kept_response_is_read_and_deleted(world: World) -> None:
    world.writes(f"why</think>{CALL}\nso")
    first = await respond(world, tools=[FLAT_TOOL], metadata={"a": "b"})
    assert await world.openai.responses.retrieve(first.id) == first
    events = [event async for event in await respond(world, stream=True)]
    streamed = events[-1].response
    assert await world.openai.responses.retrieve(streamed.id) == streamed
    second = await respond(world, previous_response_id=first.id, input="and?")
    await world.openai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as error:
        await world.openai.responses.retrieve(first.id)
    assert (error.value.code, error.value.param) == ("previous_response_not_found", "response_id")
    with pytest.raises(openai.NotFoundError):
        await world.openai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await respond(world, previous_response_id=first.id)
    await respond(world, previous_response_id=second.id)  # its id holds the whole conversation
    with pytest.raises(openai.BadRequestError):
        await world.openai.responses.retrieve(second.id, stream=True)
    unkept = await respond(world, store=False)
    with pytest.raises(openai.NotFoundError):
        await world.openai.responses.retrieve(unkept.id)


async def test_bad_responses_are_named_as_the_client_wrote_them(world: World) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"input": [{"role": "root", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"tools": [FLAT_TOOL | {"parameters": {"$ref": "#/a"}}]}, "tools[0].parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x" * 3000}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
        ({"include": ["web_search_call.results"]}, "include[0]"),
    ]
    for change, param in bad:
        with pytest.raises(openai.BadRequestError) as error:
            await respond(world, **change)
        assert error.value.param == param, error.value


# --- Anthropic's messages -------------------------------------------------------------------------


@pytest.fixture
async def claude(world: World) -> AsyncIterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    async with anthropic.AsyncAnthropic(
        base_url=world.url, api_key="none", max_retries=0
    ) as client:
        yield client


ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 500, "messages": USER}
USED = {"type": "tool_use", "id": "1", "name": "now", "input": {}}
ANTHROPIC_TOOL = {"name": "now", "input_schema": TOOL["parameters"]}


async def test_a_message(world: World, claude: Any) -> None:
    world.writes("why</think>hello")
    answer = await claude.messages.create(**ASKED, system="Be kind.", extra_body={"top_k": 5})
    assert world.last_prompt == f"system: Be kind.\n{PROMPT}"
    thinking, text = answer.content
    assert (thinking.thinking, text.text) == ("why", "hello")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(world.last_prompt), 16)
    answer = await claude.messages.create(**ASKED | {"max_tokens": 13})
    assert (answer.content[-1].text, answer.stop_reason) == ("he", "max_tokens")
    answer = await claude.messages.create(**ASKED, stop_sequences=["lo", "x"])
    assert answer.content[-1].text == "hel"
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "lo")
    world.writes("hello")
    answer = await claude.messages.create(**ASKED, thinking={"type": "disabled"})
    assert [block.type for block in answer.content] == ["text"]
    budget = {"type": "enabled", "budget_tokens": 1024}
    await claude.messages.create(**ASKED, thinking=budget)  # several tokens per tag: not enforced


async def test_the_events_of_a_message(world: World, claude: Any) -> None:
    world.writes(f"why</think>so\n{CALL}")
    stream = await claude.messages.create(**ASKED, tools=[ANTHROPIC_TOOL], stream=True)
    events = [event async for event in stream]
    names = [event.type for event in events]
    once = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *block * 3, "message_delta", "message_stop"]
    assert events[-2].delta.stop_reason == "tool_use"
    async with claude.messages.stream(**ASKED, tools=[ANTHROPIC_TOOL]) as helped:
        message = await helped.get_final_message()
    thinking, text, call = message.content
    assert (thinking.thinking, text.text, call.input) == ("why", "so\n", {"zone": "UTC"})
    whole = await claude.messages.create(**ASKED, tools=[ANTHROPIC_TOOL])
    assert [b.type for b in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.content[2].input == call.input
    assert (
        whole.usage.output_tokens == message.usage.output_tokens == events[-2].usage.output_tokens
    )


async def test_a_conversation_with_tools(world: World, claude: Any) -> None:
    world.writes(f"why</think>so\n{CALL}")
    first = await claude.messages.create(**ASKED, tools=[ANTHROPIC_TOOL])
    results = [
        {"type": "tool_result", "tool_use_id": first.content[-1].id,
         "content": [{"type": "text", "text": "noon"}]},
        {"type": "tool_result", "tool_use_id": "x", "content": "no", "is_error": True},
        {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
    ]  # fmt: skip
    turns = [*USER, {"role": "assistant", "content": first.content},
             {"role": "user", "content": results}]  # fmt: skip
    await claude.messages.create(**ASKED | {"messages": turns})
    assert world.last_prompt == (
        'user: hi\nassistant: (why) so\n now{"zone": "UTC"}\ntool: noon\ntool: Error: no\n'
        "user: and?\nassistant:<think>\n"
    )
    count = await claude.messages.count_tokens(model="demo", messages=turns)
    assert count.input_tokens == len(world.last_prompt)


async def test_a_last_message_of_the_assistant_is_continued(world: World, claude: Any) -> None:
    world.writes(" four.")
    turns = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    answer = await claude.messages.create(**ASKED | {"messages": turns})
    assert world.last_prompt == "user: hi\nassistant: It is"
    assert [block.text for block in answer.content] == [" four."]
    count = await claude.messages.count_tokens(model="demo", messages=turns)
    assert count.input_tokens == len(world.last_prompt)
    stream = await claude.messages.create(**ASKED | {"messages": turns}, stream=True)
    events = [event async for event in stream]
    pieces = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(pieces) == " four."


async def test_bad_messages_are_anthropics_errors(world: World, claude: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    bad: list[tuple[dict[str, Any], str]] = [
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*USER, {"role": "assistant", "content": [USED]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages[0].content[0]"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "messages"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ]  # fmt: skip
    for change, param in bad:
        with pytest.raises(anthropic.BadRequestError) as error:
            await claude.messages.create(**ASKED | change)
        body = error.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert body["error"]["param"] == param, body
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(**ASKED | {"model": "wat"})


@pytest.mark.parametrize("is_anthropic", [False, True])
async def test_a_stream_that_fails_ends_as_its_api_has_it(
    world: World, claude: Any, is_anthropic: bool
) -> None:
    anthropic = pytest.importorskip("anthropic")
    world.writes("why</think>" + "hello" * 100)
    world.gateway.nodes[1].token_s = 0.02
    events = []
    if not is_anthropic:
        async for event in await respond(world, stream=True):
            if not events:
                await _kill(world)
            events.append(event)
        assert events[-1].type == "error" and events[-1].code in ("unavailable", "node_lost")
        assert events[-1].sequence_number == len(events) - 1
        return
    with pytest.raises(anthropic.APIStatusError) as error:
        async for event in await claude.messages.create(**ASKED, stream=True):
            if not events:
                await _kill(world)
            events.append(event)
    assert error.value.body["type"] == "error"
    assert error.value.body["error"]["code"] in ("unavailable", "node_lost")


async def _kill(world: World) -> None:
    for node in world.gateway.nodes:
        await node.kill()
