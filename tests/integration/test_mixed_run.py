"""A mix of requests with cancels while each node is killed once: the GPU's run, small, on a CPU."""

from __future__ import annotations

from pathlib import Path

import mixed_run
from fault_cluster import cluster, write_model
from faults import Reference, Scene

from baton.core.config import EngineConfig

NUM_REQUESTS = 40


async def test_every_stream_is_right_while_each_node_is_killed_once(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path)
    names = ("gateway-0", "prefill-0", "decode-0")
    flags = {
        "gateway_0": ("--recovery-wait-s", "30"),
        "node": ("--num-kv-blocks", "100", "--device", "cpu"),
    }
    asked = mixed_run.draw(NUM_REQUESTS, seed=1, max_prompt_tokens=120)
    kills = {12: "decode-0", 26: "prefill-0"}
    config = EngineConfig(model=str(model_dir), load_format="dummy", device="cpu")
    with cluster(model_dir, *names, **flags) as running:
        async with Scene(running, Reference(model_dir)) as scene:
            outcome = await mixed_run.run(running, scene, asked, kills)
            await scene.heal()
            await scene.wait_idle()
            await mixed_run.assert_fsck_is_clean(running)
            mixed_run.Reference(config).compare(scene.streams, outcome)
    print(mixed_run.describe(outcome))
    assert outcome.ended["finished"] > 0.8 * NUM_REQUESTS
    assert outcome.ended["cancelled"] > 0
    assert outcome.ended["finished"] + outcome.ended["cancelled"] == NUM_REQUESTS
    assert not outcome.near_ties  # one kind of CPU, one result
