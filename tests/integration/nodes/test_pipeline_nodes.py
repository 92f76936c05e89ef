"""Hand-offs between nodes whose engines have unequal stages and ranks, and a lost stage."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines.generation import outputs_of
from fakes.ranks.linked_nodes import Nodes, connected, request_of, wait_for_no_process
from node_driver import TINY_MODEL, NodeProcess, launch

from baton.cluster.redis_server import RedisServer
from baton.core.engine_config import EngineConfig
from baton.core.errors import BatonError
from baton.core.membership import Role
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine

pytestmark = pytest.mark.slow

NUM_BLOCKS = 256
Shape = tuple[int, int]  # stages, ranks of each stage


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five layers, so that two stages differ in their number of layers."""
    folder = tmp_path_factory.mktemp("tiny")
    fields = TINY_MODEL | {"vocab_size": 253, "num_hidden_layers": 5}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> LocalEngine:
    config = EngineConfig(
        model=str(model_dir), load_format="dummy", device="cpu", num_kv_blocks=NUM_BLOCKS
    )
    return LocalEngine(config, ModelRunner(config))


@contextmanager
def nodes_of(model_dir: Path, prefill: Shape, decode: Shape) -> Iterator[Nodes]:
    flags = ("--model", str(model_dir), "--load-format", "dummy", "--rank-timeout-s", "20")
    flags += ("--num-kv-blocks", str(NUM_BLOCKS))
    started: list[NodeProcess] = []
    with RedisServer.start() as redis:
        try:
            for role, (stages, size) in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
                sizes = ("--pp", str(stages), "--tp", str(size))
                started.append(launch(role, redis.url, *flags, *sizes))
            yield Nodes(*started, redis.url)
            assert [node.end(signal.SIGTERM) for node in started] == [0, 0]
            wait_for_no_process()
        finally:
            for node in started:
                if node.process.poll() is None:
                    node.end(signal.SIGKILL)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((2, 1), (1, 2)),
        ((1, 1), (2, 2)),
        ((2, 1), (1, 1)),
        ((3, 1), (2, 2)),
    ],
    ids=str,
)
async def test_unequal_sides_equal_one_process(
    model_dir: Path, reference: LocalEngine, prefill: Shape, decode: Shape
) -> None:
    requests = [
        request_of(1),
        request_of(300, max_tokens=20),
        request_of(50, max_tokens=20, temperature=0.8, seed=6, repetition_penalty=1.2),
    ]
    with nodes_of(model_dir, prefill, decode) as nodes:
        async with connected(nodes) as pair:
            cancelled = request_of(900, max_tokens=500)
            for request in (cancelled, *requests):
                await pair.hand_off(request)
            await pair.decode.cancel(cancelled)
            await pair.prefill.cancel(cancelled)
            for request in requests:
                expected = outputs_of(reference, [request])[request.key]
                assert await pair.finish(request) == expected
            outputs = pair.decode.received[requests[1].key].outputs
            (transfer,) = [one.transfer for one in outputs if one.HasField("transfer")]
            assert transfer.transport == "shm"
            # ceil(300 / 16) blocks; each layer and head is stored once
            assert transfer.bytes == 19 * reference.runner.kv.block_bytes


def follower_pid(node: NodeProcess) -> int:
    (engine,) = node.engine_pids()
    (pid,) = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return int(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_stage_takes_its_engine_down_with_a_reason(
    model_dir: Path, number: signal.Signals
) -> None:
    flags = ("--model", str(model_dir), "--load-format", "dummy", "--rank-timeout-s", "1")
    with RedisServer.start() as redis:
        pair = [
            launch(Role.PREFILL, redis.url, *flags),
            launch(Role.DECODE, redis.url, *flags, "--pp", "2"),
        ]
        try:
            async with connected(Nodes(*pair, redis.url)) as both:
                os.kill(follower_pid(pair[1]), number)
                await both.decode.dispatch(request_of(60, max_tokens=1500), None)
                begin_s = time.monotonic()
                await both.decode.until(lambda: both.decode.ended is not None)
                assert time.monotonic() - begin_s < 1.5
            assert isinstance(both.decode.ended, BatonError)
            what = "rank 1 ended" if number == signal.SIGKILL else "rank 1 has not answered"
            assert both.decode.ended.message.startswith(what)
        finally:
            for node in pair:
                node.end(signal.SIGKILL)
        wait_for_no_process()
