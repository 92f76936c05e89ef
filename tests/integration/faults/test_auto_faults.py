"""Nodes are killed under requests of all plans: handed off, or served whole by either kind of
engine.

The plan of a request is random, so each node is killed once it decodes; a request that a prefill
node decodes is served whole there.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fault_scenes import mixed_run
from fault_scenes.fault_cluster import cluster, write_model
from fault_scenes.faults import Reference, Scene

from baton.core.engine_config import EngineConfig

NUM_MIXED = 120
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@pytest.mark.slow
async def test_a_mix_of_requests_while_nodes_are_killed(tmp_path: Path) -> None:
    reference = Reference(write_model(tmp_path))
    requested = mixed_run.draw(NUM_MIXED, seed=2, max_prompt_tokens=120)
    kills = {20: "decode-0", 60: "prefill-0"}
    flags = {
        "gateway_0": ("--recovery-wait-s", "30"),
        "node": ("--num-kv-blocks", "100", "--tbt-target-ms", "4"),
    }
    config = EngineConfig(model=str(reference.model_dir), load_format="dummy", device="cpu")
    with cluster(reference.model_dir, "gateway-0", *NODES, **flags) as system:
        async with Scene(system, reference) as scene:
            outcome = await mixed_run.run(system, scene, requested, kills, mixed_run.decodes)
            await scene.heal()
            await scene.wait_idle()
            await mixed_run.assert_fsck_is_clean(system)
            mixed_run.Reference(config).compare(scene.streams, outcome)
            results = [stream.result for stream in scene.streams if stream.error is None]
    plans = Counter((one.prefill_node, one.decode_node) for one in results)
    print(mixed_run.describe(outcome), plans)
    assert outcome.ended["finished"] + outcome.ended["cancelled"] == NUM_MIXED
    assert outcome.ended["finished"] > 0.8 * NUM_MIXED
    assert not outcome.near_ties
    assert any(one.attempts > 1 for one in results)
    kinds = {first.partition("-")[0] for first, then in plans if first == then}
    assert kinds == {"prefill", "decode"}
