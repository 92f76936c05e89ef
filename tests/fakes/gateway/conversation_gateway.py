"""A real gateway over HTTP whose nodes output text given by the test: for conversations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fakes.gateway.byte_model import write_byte_model
from fakes.node.node import FakeNode
from tokenizers import AddedToken, Tokenizer

from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.secret import ClusterSecret
from baton.core.config import ClusterConfig, GatewayConfig
from baton.core.membership import Role
from baton.core.request.request import Request
from baton.gateway.process.server import serve
from baton.gateway.request.setbacks import SessionLimits
from baton.proto import codec

SECRET = "test secret"
TEMPLATE = """
{%- for tool in tools or [] %}tool {{ tool.function.name }} <tool_call>
{% endfor %}
{%- for m in messages %}
{{- m.role }}: {% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %} {{ call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %}{{ '\\n' }}
{%- endfor %}{% if add_generation_prompt %}assistant:
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""
_BLOCK_TOKENS = 16


@dataclass
class ConversationGateway:
    """The gateway's URL, and the nodes behind it."""

    url: str
    nodes: tuple[FakeNode, FakeNode]

    def writes(self, answer: str | Sequence[int] | Callable[[str], str]) -> None:
        """Set the output for every following request, or a function from prompt to output."""
        if callable(answer):
            by_prompt = answer
            for node in self.nodes:
                node.answer = lambda request: by_prompt(prompt_of(request))
            return
        for node in self.nodes:
            node.answer = answer

    @property
    def last_request(self) -> Request:
        """The last request as the nodes received it."""
        return codec.request_from_wire(self.nodes[0].dispatched[-1])

    @property
    def last_prompt(self) -> str:
        """The prompt of the last request, as text."""
        return prompt_of(self.last_request)


def prompt_of(request: Request) -> str:
    """The prompt tokens as text."""
    return bytes(request.prompt_token_ids.tolist()).decode()


def write_conversation_model(folder: Path, max_model_len: int) -> Path:
    """Write a byte model with a template for reasoning and Hermes tools."""
    write_byte_model(folder, max_model_len=max_model_len)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_tagged_model(folder: Path, max_model_len: int) -> dict[str, int]:
    """The same with one-token tags, and a template that begins the reasoning; returns their ids.

    `<tool_call>` and its end are special tokens.
    """
    write_conversation_model(folder, max_model_len)
    template = TEMPLATE.replace("{% else %}<think>\n", "")
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text) for text in ("<think>", "</think>")])
    tags = ("<tool_call>", "</tool_call>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in tags])
    tokenizer.save(str(folder / "tokenizer.json"))
    return {text: tokenizer.token_to_id(text) for text in ("<think>", "</think>", *tags)}


@asynccontextmanager
async def conversation_gateway(
    redis_url: str, model_dir: Path, max_model_len: int
) -> AsyncIterator[ConversationGateway]:
    """Yields once the gateway is ready to serve."""
    cluster = ClusterConfig(redis_url, f"c{time.monotonic_ns()}", SECRET)
    config = GatewayConfig(grpc_port=0, http_port=0, model=str(model_dir), max_num_requests=8)
    limits = SessionLimits(recovery_wait_s=0.3, avoid_s=0.1)
    gateway = await serve(config, cluster, session_limits=limits)
    prefill = FakeNode(Role.PREFILL, "p1", "1" * 32, secret=SECRET, max_model_len=max_model_len)
    decode = FakeNode(
        Role.DECODE, "d1", "2" * 32, [prefill.incarnation], secret=SECRET,
        max_model_len=max_model_len,
    )  # fmt: skip
    directory = RedisDirectory(
        RedisClient(cluster.redis_url, cluster.cluster, ClusterSecret(SECRET))
    )
    for node in (prefill, decode):
        node.num_blocks = 72 + max_model_len // _BLOCK_TOKENS
        await node.start()
        await directory.announce(node.member, 5.0)
    try:
        await asyncio.wait_for(gateway.startup_lines(), 5)
        yield ConversationGateway(f"http://127.0.0.1:{gateway.http_port}", (prefill, decode))
    finally:
        await gateway.stop(grace_s=0.0)
        await directory.close()
        for node in (prefill, decode):
            await node.kill()
