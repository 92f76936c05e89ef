"""Conversations recorded from the official clients, replayed byte for byte: tests/recordings/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.gateway.conversation_gateway import conversation_gateway, write_conversation_model
from recordings.exchanges import Conversation, conversations, normalised, with_ids
from recordings.record import MAX_MODEL_LEN, ask

from baton.cluster.redis_server import RedisServer


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversation_model(tmp_path_factory.mktemp("models") / "demo", MAX_MODEL_LEN)


@pytest.mark.parametrize("conversation", conversations(), ids=lambda one: one.name)
async def test_a_conversation_is_answered_as_it_was(
    redis_server: RedisServer, model_dir: Path, conversation: Conversation
) -> None:
    ids: dict[bytes, bytes] = {}
    async with conversation_gateway(redis_server.url, model_dir, MAX_MODEL_LEN) as gateway:
        for exchange in conversation.exchanges:
            gateway.writes(exchange.writes)
            answer = await ask(gateway.url, with_ids(exchange.request.encode(), ids))
            assert normalised(answer, ids) == exchange.answer


def test_there_is_one_of_each_kind() -> None:
    found = {one.name for one in conversations()}
    assert found == {
        path.stem for path in Path(__file__).parents[2].glob("recordings/clients/*.py")
    }
