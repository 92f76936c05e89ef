"""Coding agents against a gateway whose nodes output text given by the test.

Each agent is asked about the contents of a file: the model calls its file tool, and responds with
the tool's result. docs/clients.md describes their installation.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fakes.gateway.conversation_gateway import (
    ConversationGateway,
    conversation_gateway,
    write_conversation_model,
)

from baton.cluster.redis_server import RedisServer

pytestmark = [pytest.mark.external, pytest.mark.timeout(180)]

MAX_MODEL_LEN = 600_000  # bytes are tokens
SECRET = "quokka"
ASKED = "Which animal is in notes.txt?"
KEPT = ("PATH", "LANG", "TMPDIR")


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not on the PATH")


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture
async def gateway(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[ConversationGateway]:
    model_dir = write_conversation_model(tmp_path / "model" / "demo", MAX_MODEL_LEN)
    async with conversation_gateway(redis_server.url, model_dir, MAX_MODEL_LEN) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the agent works; its home is beside it."""
    found = tmp_path / "work"
    found.mkdir()
    (found / "notes.txt").write_text(f"a {SECRET}\n")
    (tmp_path / "home").mkdir()
    return found


def calls(tool: str, arguments: dict[str, object]) -> str:
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"I look.</think><tool_call>\n{call}\n</tool_call>"


def reads_then_answers(gateway: ConversationGateway, tool: str, arguments: dict) -> None:
    """The model calls the tool if it is offered, and responds once its result is there."""

    def answer(prompt: str) -> str:
        if SECRET in prompt:
            return f"I know.</think>It is a {SECRET}, said the model."
        return calls(tool, arguments) if f"tool {tool} " in prompt else "</think>A title"

    gateway.writes(answer)


async def run(*argv: str, cwd: Path, **environment: str) -> str:
    """The agent's stdout and stderr; of our own environment it gets only the PATH."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    child = await asyncio.create_subprocess_exec(
        *argv,
        cwd=cwd,
        env=kept | {"HOME": str(cwd.parent / "home")} | environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        out, _ = await asyncio.wait_for(child.communicate(), 120)
    finally:
        if child.returncode is None:
            child.kill()
    assert child.returncode == 0, out.decode()[-3000:]
    return out.decode()


@needs("claude")
async def test_claude_code(gateway: ConversationGateway, folder: Path) -> None:
    reads_then_answers(gateway, "Read", {"file_path": str(folder / "notes.txt")})
    out = await run(
        "claude", "-p", ASKED, "--model", "demo",
        cwd=folder,
        ANTHROPIC_BASE_URL=gateway.url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="demo",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="4000",
        DISABLE_AUTOUPDATER="1",
    )  # fmt: skip
    assert f"It is a {SECRET}, said the model." in out


@needs("codex")
async def test_codex(gateway: ConversationGateway, folder: Path) -> None:
    reads_then_answers(gateway, "exec_command", {"cmd": "cat notes.txt"})
    settings = {
        "model": "demo",
        "model_provider": "baton",
        "model_providers.baton.name": "baton",
        "model_providers.baton.base_url": f"{gateway.url}/v1",
        "model_providers.baton.wire_api": "responses",
        "web_search": "disabled",
        "analytics.enabled": False,
    }
    flags = [f"-c{name}={json.dumps(value)}" for name, value in settings.items()]
    out = await run(
        "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
        *flags, ASKED, cwd=folder,
    )  # fmt: skip
    assert f"It is a {SECRET}, said the model." in out


@needs("opencode")
async def test_opencode(gateway: ConversationGateway, folder: Path) -> None:
    reads_then_answers(gateway, "read", {"filePath": str(folder / "notes.txt")})
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{gateway.url}/v1", "apiKey": "none"},
        "models": {"demo": {"limit": {"context": MAX_MODEL_LEN, "output": 4000}}},
    }
    settings = {"provider": {"baton": provider}, "share": "disabled", "autoupdate": False}
    (folder / "opencode.json").write_text(json.dumps(settings))
    out = await run(
        "opencode", "run", "--model", "baton/demo", ASKED,
        cwd=folder, OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_AUTOUPDATE="1",
    )  # fmt: skip
    assert f"It is a {SECRET}, said the model." in out
