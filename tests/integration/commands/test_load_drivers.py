"""The load driver on engines without a gateway counts every token."""

from __future__ import annotations

from contextlib import aclosing

from baton.bench.serve import systems
from baton.bench.serve.clients.driver_choice import connect
from baton.core.engine_config import EngineConfig


async def test_tokens_of_mixed_engines_are_counted() -> None:
    engine = EngineConfig(model="demo", device="cpu", num_kv_blocks=200)
    with systems.mixed(engine, None, 1) as target:
        async with connect(target) as driver, aclosing(driver.stream((5, 6, 7), 20)) as counts:
            assert sum([count async for count in counts]) == 20
