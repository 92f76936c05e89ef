"""A gateway for a model without a tokenizer: token ids in, token ids out, text refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.core.config import GatewayConfig
from baton.core.errors import InvalidRequest, StartupFailed
from baton.gateway.text.text_stream import TextStream
from baton.gateway.validation.served_model import ServedModel
from baton.gateway.validation.validation import ValidatedRequest, validated
from baton.proto.v1 import inference_pb2


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    sizes = {"vocab_size": 100, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(StartupFailed, match="tokenizer"):
        ServedModel.load(GatewayConfig(model=str(tmp_path)))
    return ServedModel.load(GatewayConfig(model=str(tmp_path), skip_tokenizer_init=True))


async def request_of(model: ServedModel, stop: str = "", **prompt: object) -> ValidatedRequest:
    wire = inference_pb2.GenerateRequest(**prompt)
    wire.sampling.stop.extend([stop] if stop else [])
    return await validated(wire, model.limits, model.tokenizer, drawn_seed=1)


async def test_token_ids_are_served_and_have_no_text(model: ServedModel) -> None:
    request = await request_of(model, token_ids=inference_pb2.TokenIds(ids=[5, 6]))
    assert list(request.prompt_token_ids) == [5, 6]
    text = TextStream(model.tokenizer.detokenizer((5, 6)).step, request.sampling)
    assert text.feed([7, 8, 9])[0] == "" and text.flush() == ""


async def test_what_needs_text_is_refused(model: ServedModel) -> None:
    with pytest.raises(InvalidRequest, match="no tokenizer") as refused:
        await request_of(model, text="hello")
    assert refused.value.param == "prompt"
    ids = inference_pb2.TokenIds(ids=[5])
    with pytest.raises(InvalidRequest, match="stop strings") as refused:
        await request_of(model, stop="END", token_ids=ids)
    assert refused.value.param == "stop"
    with pytest.raises(InvalidRequest):
        await model.tokenizer.encode("x")
    with pytest.raises(InvalidRequest):
        await model.tokenizer.decode([1])
