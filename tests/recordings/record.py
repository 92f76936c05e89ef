"""Records conversations of the official clients, and of clients with requests of coding agents:

    python -m venv /tmp/clients && /tmp/clients/bin/pip install openai anthropic
    PYTHONPATH=tests .venv/bin/python tests/recordings/record.py /tmp/clients/bin/python [NAME ...]

A gateway over nodes that simulate the model, a proxy that records the bytes, and each script of
clients/ in turn. A script's list WRITES is the model's output. Check the difference before it is
committed: new requests come from new clients, new responses from changes of the gateway.
"""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fakes.gateway.conversation_gateway import (
    ConversationGateway,
    conversation_gateway,
    write_conversation_model,
)
from recordings.exchanges import (
    Conversation,
    Exchange,
    normalised,
    of_generating,
    read_message,
    with_ids,
)

from baton.cluster.redis_server import RedisServer

CLIENTS = Path(__file__).parent / "clients"
MAX_MODEL_LEN = 65_536


class Proxy:
    """Forwards whole requests and responses, and records them."""

    def __init__(self, gateway: ConversationGateway, writes: Iterator[str]) -> None:
        self._gateway = gateway
        self._writes = writes
        self._ids: dict[bytes, bytes] = {}
        self.exchanges: list[Exchange] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await read_message(reader):
                wrote = next(self._writes) if of_generating(request) else ""
                if wrote:
                    self._gateway.writes(wrote)
                answer = await ask(self._gateway.url, request)
                # A client sends back what it received: names of ids are recorded, not ids.
                requested = with_ids(request, {name: found for found, name in self._ids.items()})
                shown = normalised(answer, self._ids)
                self.exchanges.append(Exchange(wrote, requested.decode(), shown))
                writer.write(answer)
                await writer.drain()
        finally:
            writer.close()


async def ask(url: str, request: bytes) -> bytes:
    """Send one request's bytes on a connection of its own; returns the response's bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        writer.write(request)
        return await read_message(reader)
    finally:
        writer.close()


def writes_of(script: Path) -> list[str]:
    """The script's list WRITES, without importing its client."""
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "WRITES":
            found: list[str] = ast.literal_eval(node.value)
            return found
    raise ValueError(f"{script} has no WRITES")


async def record(gateway: ConversationGateway, python: str, script: Path) -> Conversation:
    """Run a client's script through the proxy."""
    remaining = iter(writes_of(script))
    proxy = Proxy(gateway, remaining)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 24)
    port = server.sockets[0].getsockname()[1]
    child = await asyncio.create_subprocess_exec(
        python, "-I", str(script), f"http://127.0.0.1:{port}", stdout=subprocess.PIPE
    )
    out, _ = await child.communicate()
    server.close()
    assert child.returncode == 0, f"{script} failed"
    assert next(remaining, None) is None, f"{script} asked for less than WRITES has"
    return Conversation(script.stem, out.decode().strip(), tuple(proxy.exchanges))


async def main(python: str, names: list[str]) -> None:
    scripts = sorted(path for path in CLIENTS.glob("*.py") if not names or path.stem in names)
    with tempfile.TemporaryDirectory() as folder, RedisServer.start() as redis:
        model_dir = write_conversation_model(Path(folder) / "demo", MAX_MODEL_LEN)
        for script in scripts:
            async with conversation_gateway(redis.url, model_dir, MAX_MODEL_LEN) as gateway:
                conversation = await record(gateway, python, script)
            conversation.save()
            print(f"{conversation.name}: {conversation.client}, {len(conversation.exchanges)}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
