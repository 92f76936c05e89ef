"""What `baton up` minds before it starts anything, and how often it starts a node again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from baton.cli.deployment import Child, Deployment
from baton.cli.up import about_shared_gpus
from baton.core.config import EngineConfig, GatewayConfig, NodeConfig, UpConfig


@pytest.mark.parametrize(
    ("prefill", "decode"), [(None, None), ("0", None), (None, "0"), ("0,1", "2,3"), ("1", "11")]
)
def test_roles_with_gpus_of_their_own_are_no_worry(prefill: str | None, decode: str | None) -> None:
    up = UpConfig(prefill_gpus=prefill, decode_gpus=decode)
    assert about_shared_gpus(up, EngineConfig()) == ""


def test_a_gpu_that_both_roles_have_is_named_with_what_to_do() -> None:
    up = UpConfig(prefill_gpus="0, 1", decode_gpus="1,2")
    said = about_shared_gpus(up, EngineConfig())
    assert "share GPU 1," in said
    assert "--gpu-memory-utilization 0.45" in said


def test_a_gpu_that_holds_both_is_named_alone() -> None:
    up = UpConfig(prefill_gpus="0", decode_gpus="0")
    said = about_shared_gpus(up, EngineConfig(gpu_memory_utilization=0.4))
    assert said == "prefill and decode share GPU 0"


class Sleepers(Deployment):
    """A deployment whose parts do nothing."""

    async def _launch(self, name: str, *configs: object) -> Child:
        process = await asyncio.create_subprocess_exec("sleep", "60")
        child = Child(name, configs, process, asyncio.get_running_loop().create_future())
        self.children.append(child)
        return child

    async def kill(self, name: str) -> None:
        """Returns once it runs again, or will not."""
        (victim,) = (child for child in self.children if child.name == name)
        victim.process.kill()
        await victim.process.wait()
        async with asyncio.timeout(10):
            while victim in self.children and not self.keeping.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            while name not in {child.name for child in self.children}:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def keep_in_background(self) -> None:
        self.keeping = asyncio.create_task(self.keep())


@pytest.fixture
async def sleepers() -> AsyncIterator[Sleepers]:
    deployment = Sleepers(
        UpConfig(), EngineConfig(), NodeConfig(), GatewayConfig(), lambda name, line: None
    )
    for name in ("gateway", "prefill-0", "decode-0"):
        await deployment._launch(name)
    deployment.keep_in_background()
    yield deployment
    deployment.keeping.cancel()
    await asyncio.gather(deployment.keeping, return_exceptions=True)
    await deployment.stop()


async def test_a_node_that_keeps_ending_ends_all(
    sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.cli.deployment._MOST_ENDS", 2)
    for name in ("decode-0", "decode-0", "prefill-0", "prefill-0"):
        await sleepers.kill(name)
    assert not sleepers.keeping.done()
    await sleepers.kill("decode-0")
    assert await sleepers.keeping == "decode-0"


async def test_a_node_that_lived_long_may_end_once_more(
    sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.cli.deployment._MOST_ENDS", 1)
    monkeypatch.setattr("baton.cli.deployment._WELL_S", 0.0)
    for _ in range(5):
        await sleepers.kill("decode-0")
    assert not sleepers.keeping.done()


async def test_the_end_of_the_gateway_ends_all(sleepers: Sleepers) -> None:
    await sleepers.kill("gateway")
    assert await sleepers.keeping == "gateway"
