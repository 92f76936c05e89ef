"""LoRA adapters in a deployment: after a hand-off, over HTTP, the tokens of merged weights."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_byte_tokenizer, write_checkpoint
from deployments import Running, running
from e2e.handing_over import hand_over
from engines.generation import outputs_of
from engines.integrity import check_integrity
from fakes.adapters import merge, write_adapter

from baton.cli.deployment.deployment import UpConfig
from baton.client import Client
from baton.core.config import GatewayConfig
from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine

NUM_TOKENS = 12
PROMPT = [5 + 7 * i % 200 for i in range(50)]
ADAPTERS = ("one", "two")


@dataclass(frozen=True)
class World:
    """A deployment with adapter `one` from its start, the folders, and tokens by model name."""

    system: Running
    http: str
    folder: Path
    expected: dict[str, list[int]]


def config(model: Path, **changes: Any) -> EngineConfig:
    fields = {"model": str(model), "device": "cpu", "cpu_kv_bytes": 16 << 20, "max_model_len": 200}
    return EngineConfig(**(fields | {"max_num_batched_tokens": 24} | changes))


def lora(base: Path) -> EngineConfig:
    return config(base, enable_lora=True, max_loras=2, max_lora_rank=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    (folder / "base").mkdir()
    write_byte_tokenizer(folder / "base")
    write_checkpoint(folder / "base", seed=9)
    for seed, name in enumerate(ADAPTERS):
        path = write_adapter(folder / name, folder / "base", seed=seed)
        merge(folder / f"{name}-merged", folder / "base", path)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    found = {}
    for name in ("base", *(f"{name}-merged" for name in ADAPTERS)):
        local = LocalEngine(config(folder / name), ModelRunner(config(folder / name)))
        outputs = outputs_of(local, [Request("a" * 32, 0, PROMPT, greedy())])
        found[name.removesuffix("-merged")] = outputs["a" * 32 + "/0"]
        local.close()
    assert len({str(tokens) for tokens in found.values()}) == 3
    return found


def greedy() -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def test_hand_off_in_one_process(folder: Path, expected: dict[str, list[int]]) -> None:
    source, puller = (
        LocalEngine(lora(folder / "base"), ModelRunner(lora(folder / "base"))) for _ in range(2)
    )
    for name in ADAPTERS:
        adapters = [each.load_adapter(name, str(folder / name)) for each in (source, puller)]
        assert adapters[0] == adapters[1]
        request = Request("a" * 32, 0, PROMPT, greedy(), adapter=adapters[0])
        assert hand_over(source, puller, request) == expected[name]
    for each in (source, puller):
        check_integrity(each.engine)
        each.close()


@pytest.fixture(scope="module")
def world(folder: Path, expected: dict[str, list[int]]) -> Iterator[World]:
    base = folder / "base"
    gateway = GatewayConfig(
        grpc_port=0, http_port=0, model=str(base), lora_modules=(f"one={folder / 'one'}",)
    )
    with running(lora(base), up=UpConfig(mode="disaggregated"), gateway=gateway) as system:
        (line,) = [line for line in system.lines if line.startswith("gateway | ready:")]
        yield World(
            system, next(part for part in line.split() if part.startswith("http")), folder, expected
        )


def call(world: World, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{world.http}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def completion(world: World, model: str) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    status, text = call(world, "/v1/completions", body)
    assert status == 200, text
    answer = json.loads(text)
    assert answer["model"] == model
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def models(world: World) -> dict[str, str | None]:
    return {one["id"]: one["parent"] for one in json.loads(call(world, "/v1/models")[1])["data"]}


def test_a_mixture_through_the_hand_off(world: World) -> None:
    assert models(world) == {"base": None, "one": "base"}
    two = {"lora_name": "two", "lora_path": str(world.folder / "two")}
    assert call(world, "/v1/load_lora_adapter", two)[0] == 200
    assert models(world) == {"base": None, "one": "base", "two": "base"}
    names = ["base", *ADAPTERS] * 3
    with ThreadPoolExecutor(len(names)) as pool:
        found = [*pool.map(lambda name: completion(world, name), names)]
    assert found == [world.expected[name] for name in names]
    with Client(world.system.address) as client:
        stream = client.generate(
            model="two",
            prompt_token_ids=PROMPT,
            max_tokens=NUM_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            n=1,
        )
        assert [i for chunk in stream for i in chunk.token_ids] == world.expected["two"]
        assert stream.result.decode_node
    assert 'max_lora="2"' in call(world, "/metrics")[1]


def test_unloaded_it_is_no_model_any_more(world: World) -> None:
    again = {"lora_name": "again", "lora_path": str(world.folder / "two")}
    assert call(world, "/v1/load_lora_adapter", again)[0] == 200
    assert call(world, "/v1/load_lora_adapter", again)[0] == 400
    assert call(world, "/v1/unload_lora_adapter", {"lora_name": "again"})[0] == 200
    assert call(world, "/v1/unload_lora_adapter", {"lora_name": "again"})[0] == 404
    assert "again" not in models(world)
    status, _ = call(world, "/v1/completions", {"model": "again", "prompt": "x"})
    assert status == 404


def test_who_runs_when_it_is_unloaded_ends_as_he_would(world: World) -> None:
    late = {"lora_name": "late", "lora_path": str(world.folder / "two")}
    assert call(world, "/v1/load_lora_adapter", late)[0] == 200
    with Client(world.system.address) as client:
        streams = [
            client.generate(
                model="late",
                prompt_token_ids=PROMPT,
                max_tokens=120,
                temperature=0.0,
                ignore_eos=True,
            )
            for _ in range(3)
        ]
        begun = [[*next(stream).token_ids] for stream in streams]
        assert call(world, "/v1/unload_lora_adapter", {"lora_name": "late"})[0] == 200
        assert call(world, "/v1/completions", {"model": "late", "prompt": "x"})[0] == 404
        for stream, found in zip(streams, begun, strict=True):
            found += [i for chunk in stream for i in chunk.token_ids]
            assert len(found) == 120 and found[:NUM_TOKENS] == world.expected["two"]
    world.system.wait_idle()
    assert call(world, "/v1/load_lora_adapter", late)[0] == 200, "the name is free"
    assert completion(world, "late") == world.expected["two"]


def test_what_an_engine_refuses_is_not_served(world: World) -> None:
    bad = {"lora_name": "bad", "lora_path": str(world.folder / "base")}
    status, text = call(world, "/v1/load_lora_adapter", bad)
    error = json.loads(text)["error"]
    assert (status, error["code"]) == (400, "adapter_refused"), text
    assert "adapter_model.safetensors" in error["message"]
    assert "bad" not in models(world)
