"""A reasoning budget through a real engine: reasoning ends when the budget is spent, and an answer
follows. The model is tiny with random weights, has one token for each tag and never ends its output
by itself; all API front ends run in this process.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.gateway.byte_model import write_byte_model
from tokenizers import AddedToken, Tokenizer

from baton.core.config import GatewayConfig
from baton.core.engine_config import EngineConfig
from baton.gateway.http.turns import messages
from baton.offline.batch_endpoints import batch_app, serving
from baton.offline.local_calls import LocalCalls

MAX_TOKENS = 40
TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }} <tool_call>
{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}assistant:
{%- if enable_thinking is defined and not enable_thinking %}<think></think>
{%- else %}<think>{% endif %}"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
USER = [{"role": "user", "content": "hi"}]
ASKED = {"model": "thinker", "temperature": 0}
CHAT = {**ASKED, "messages": USER, "max_tokens": MAX_TOKENS}


def write_thinker(folder: Path) -> Path:
    """A model with two tags behind the byte model's tokens; its engine draws the weights."""
    write_byte_model(folder)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer.save(str(path))
    config = json.loads((folder / "config.json").read_text()) | CONFIG
    config["vocab_size"] = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinker(tmp_path_factory.mktemp("models") / "thinker")


@pytest.fixture
async def ask(model_dir: Path) -> AsyncIterator[Callable[..., Any]]:
    """A function that posts a body to a path and returns the reply."""
    pytest.importorskip("llguidance")
    engine = EngineConfig(model=str(model_dir), load_format="dummy", cpu_kv_bytes=4 << 20)
    front = GatewayConfig(model=str(model_dir))
    calls = LocalCalls.load(engine, front, lambda _: None)
    try:
        calls.begin()
        app = batch_app(calls, front)
        app.add_routes(messages.ROUTES)
        async with (
            serving(app) as path,
            aiohttp.ClientSession("http://x", connector=aiohttp.UnixConnector(str(path))) as http,
        ):

            async def post(path: str, body: dict[str, Any]) -> Any:
                async with http.post(path, json=body) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                    return answer

            yield post
    finally:
        await calls.stop()
        calls.close()


async def of_chat(ask: Callable[..., Any], budget: int | None, **more: Any) -> tuple[str, str, int]:
    limit = {} if budget is None else {"thinking_token_budget": budget}
    answer = await ask("/v1/chat/completions", {**CHAT, **limit, **more})
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert usage["completion_tokens"] == MAX_TOKENS, "nothing else ended it"
    num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    return message.get("reasoning_content") or "", message["content"] or "", num_reasoning


async def of_response(
    ask: Callable[..., Any], budget: int | None, **more: Any
) -> tuple[str, str, int]:
    limit = {} if budget is None else {"thinking_token_budget": budget}
    body = {**ASKED, "input": "hi", "max_output_tokens": MAX_TOKENS, **limit, **more}
    answer = await ask("/v1/responses", body)
    texts = {item["type"]: item["content"][0]["text"] for item in answer["output"]}
    details = answer["usage"]["output_tokens_details"]
    return texts.get("reasoning", ""), texts.get("message", ""), details["reasoning_tokens"]


async def of_message(
    ask: Callable[..., Any], budget: int | None, **more: Any
) -> tuple[str, str, int]:
    limit = {} if budget is None else {"thinking": {"type": "enabled", "budget_tokens": budget}}
    answer = await ask("/v1/messages", {**CHAT, **limit, **more})
    texts = {block["type"]: block.get("thinking", block.get("text")) for block in answer["content"]}
    num_reasoning = answer["usage"]["output_tokens_details"]["thinking_tokens"]
    return texts.get("thinking", ""), texts.get("text", ""), num_reasoning


async def test_reasoning_ends_with_its_budget_and_an_answer_follows(
    ask: Callable[..., Any],
) -> None:
    for front in (of_chat, of_response, of_message):
        free, nothing, num_free = await front(ask, None)
        assert free and not nothing and num_free == MAX_TOKENS, "without a budget it never ends"
        for budget in (1, 7):
            reasoning, content, num_reasoning = await front(ask, budget)
            assert reasoning and content, (front, budget)
            assert num_reasoning == budget + 1, "and the tag"
            assert free.startswith(reasoning[:-1]), "until then as without"
    assert (await of_chat(ask, 0))[0] == "", "none at all"


async def test_strict_tools_are_called_by_their_schema_behind_a_budget(
    ask: Callable[..., Any],
) -> None:
    schema = {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}
    schema["additionalProperties"] = False
    function = {"name": "now", "parameters": schema, "strict": True}
    tools = [{"type": "function", "function": function}]
    more = {"tools": tools, "tool_choice": "required", "thinking_token_budget": 3}
    answer = await ask("/v1/chat/completions", {**CHAT, **more, "max_tokens": 200})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert {call["name"] for call in calls} == {"now"}
    assert all(json.loads(call["arguments"]) == {"zone": "UTC"} for call in calls)
    assert choice["message"]["reasoning_content"]


async def test_an_answers_shape_holds_behind_the_budget(ask: Callable[..., Any]) -> None:
    more = {"guided_choice": ["yes", "no"]}
    answer = await ask("/v1/chat/completions", {**CHAT, "thinking_token_budget": 5, **more})
    (choice,) = answer["choices"]
    assert choice["message"]["content"] in ("yes", "no") and choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6


async def test_a_budget_is_not_asked_of_an_answer_without_reasoning(
    ask: Callable[..., Any],
) -> None:
    reasoning, content, _ = await of_chat(ask, 3, enable_thinking=False)
    assert not reasoning and content
