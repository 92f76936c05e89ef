"""Running requests that move between engines all the time: their tokens equal those of one process.
Then the source or the target engine of a move dies.

The gateway runs in this process, so that the test can choose the moves; all else is real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from deployments import marked_processes
from engines.generation import outputs_of
from fault_scenes.fault_cluster import Cluster, cluster, write_model
from node_driver import CLUSTER, OUR_MARK, SECRET

from baton.client import AsyncClient, Result
from baton.core.config import ClusterConfig, GatewayConfig
from baton.core.engine_config import EngineConfig
from baton.core.ports import Clock
from baton.core.request.constraint import Constraint, ConstraintKind
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine
from baton.gateway.moves.choice import PlannedMove
from baton.gateway.moves.mover import movable_by_engine
from baton.gateway.process.server import Gateway, serve
from baton.gateway.request import move
from baton.gateway.request.session import Session

NAMES = ("prefill-0", "decode-0")
NUM_TOKENS = 60
REGEX = "[a-z]{80}"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two engines that both prefill and decode, and refuse nothing."""
    model_dir = write_model(tmp_path_factory.mktemp("model"))
    with cluster(model_dir, *NAMES, node=("--tbt-target-ms", "2000")) as running:
        yield running
    assert not marked_processes(OUR_MARK)


@dataclass
class Scene:
    system: Cluster
    gateway: Gateway

    @property
    def moves(self) -> dict[str, int]:
        return dict(self.gateway._table.plans.moves)

    def movable(self) -> dict[str, list[Session]]:
        return movable_by_engine(self.gateway._sessions, Clock().monotonic_s())

    def move_all(self) -> None:
        """Move every movable request to the other engine."""
        mover, table = self.gateway._mover, self.gateway._table
        assert mover is not None
        for source, sessions in self.movable().items():
            others = [name for name in table.engines if name != source]
            for session in sessions if others else ():
                mover._begin(PlannedMove(session.request_id, source, others[0]), session)

    @asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        async def keep_moving() -> None:
            while True:
                self.move_all()
                await asyncio.sleep(0.01)

        task = asyncio.create_task(keep_moving())
        try:
            yield
        finally:
            task.cancel()

    async def generate(self, prompt: tuple[int, ...], settings: dict[str, Any]) -> Result:
        async with AsyncClient(f"127.0.0.1:{self.gateway.port}") as client:
            stream = client.generate(prompt_token_ids=prompt, max_tokens=NUM_TOKENS, **settings)
            return await stream.finish()


@pytest.fixture
async def scene(system: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(move, "MOVE_EVERY_S", 0.02)
    config = GatewayConfig(grpc_port=0, http_port=0, model=str(system.model_dir))
    gateway = await serve(config, ClusterConfig(system.redis.url, CLUSTER, SECRET))
    await asyncio.wait_for(gateway.startup_lines(), 20)
    yield Scene(system, gateway)
    await gateway.stop(grace_s=0.0)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 5},
    "penalties": {
        "temperature": 0.8, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.7,
        "frequency_penalty": 0.4, "min_tokens": 50,
    },
    "logprobs": {"temperature": 0.7, "seed": 7, "logprobs": 3},
    "constrained": {"temperature": 0.9, "seed": 8, "regex": REGEX},
}  # fmt: skip


async def test_tokens_of_moved_requests_are_those_of_one_process(scene: Scene) -> None:
    prompts = {name: tuple(range(5 + i, 105 + 7 * i)) for i, name in enumerate(SETTINGS)}
    async with scene.moving():
        jobs = [
            scene.generate(prompts[name], {"ignore_eos": name != "constrained"} | settings)
            for name, settings in SETTINGS.items()
        ]
        found = dict(zip(SETTINGS, await asyncio.gather(*jobs), strict=True))
    local = one_process(scene.system)
    for name, settings in SETTINGS.items():
        assert list(found[name].token_ids) == tokens_of(local, prompts[name], settings), name
        assert found[name].attempts == 1
    assert len(found["logprobs"].logprobs) == NUM_TOKENS
    assert scene.moves["moved"] >= len(SETTINGS), scene.moves


def one_process(system: Cluster) -> LocalEngine:
    config = EngineConfig(
        model=str(system.model_dir), load_format="dummy", device="cpu", num_kv_blocks=256
    )
    return LocalEngine.load(config, lambda _: None)


def tokens_of(local: LocalEngine, prompt: tuple[int, ...], settings: dict[str, Any]) -> list[int]:
    given = dict(settings)
    ignores_eos = (regex := given.pop("regex", None)) is None
    if regex is not None:
        given["constraint"] = Constraint(ConstraintKind.REGEX, regex)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=ignores_eos, **given)
    request = Request(f"{prompt[0]:032x}", 0, prompt, sampling)
    return outputs_of(local, [request])[request.key]


async def test_a_stop_string_and_samples_of_one_prompt(scene: Scene) -> None:
    """A stop string ends a moved request at the same token; several samples of one prompt do not
    move."""
    prompt, seeded = tuple(range(9, 99)), SETTINGS["seeded"] | {"ignore_eos": True}
    still = await scene.generate(prompt, seeded)
    stop = still.text[30:33]
    assert stop
    stopped = await scene.generate(prompt, seeded | {"stop": [stop]})
    async with scene.moving():
        moved = await scene.generate(prompt, seeded | {"stop": [stop]})
        num_moved = sum(scene.moves.values())
        both = await scene.generate(prompt, seeded | {"n": 2})
    assert (moved.text, moved.token_ids) == (stopped.text, stopped.token_ids)
    assert num_moved and sum(scene.moves.values()) == num_moved
    assert both.token_ids == still.token_ids


@pytest.mark.parametrize(
    ("dies", "part"),
    [
        ("source", "node"),
        pytest.param("source", "engine", marks=pytest.mark.slow),
        pytest.param("target", "node", marks=pytest.mark.slow),
        pytest.param("both", "engine", marks=pytest.mark.slow),
    ],
)
async def test_who_dies_during_a_move_costs_no_token(scene: Scene, dies: str, part: str) -> None:
    local = one_process(scene.system)
    prompt = tuple(range(30, 230))
    expected = tokens_of(local, prompt, SETTINGS["seeded"])
    settings = SETTINGS["seeded"] | {"ignore_eos": True}
    job = asyncio.create_task(scene.generate(prompt, settings))
    while not (movable := scene.movable()):  # noqa: ASYNC110 (processes)
        await asyncio.sleep(0.005)
    source = scene.gateway._table.engines[next(iter(movable))].name
    target = next(name for name in NAMES if name != source)
    scene.move_all()
    for name in {"source": [source], "target": [target], "both": [source, target]}[dies]:
        scene.system.kill(name, part)
    assert list((await job).token_ids) == expected
    scene.system.restart_dead()
