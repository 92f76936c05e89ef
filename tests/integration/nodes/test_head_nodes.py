"""Nodes whose models have draft heads: the hand-off transfers the head's inputs from the prefill
node.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.generation import outputs_of
from fakes.ranks.linked_nodes import Nodes, connected
from fakes.speculation.eagle3_heads import DIM, head_tensors, make_head, write_head, write_target
from fakes.speculation.mtp_heads import write_model_with_head
from node_driver import launch, wait_idle

from baton.cluster.redis_server import RedisServer
from baton.core.engine_config import EngineConfig
from baton.core.membership import Role
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine

Drafts = Callable[[Sequence[int], int], list[int]]  # the formula's drafts after these tokens


def eagle3(folder: Path) -> tuple[dict[str, Any], Drafts]:
    """The second attention head weighs all positions alike, and has large weights."""
    model, head = write_target(folder), make_head()
    second = slice(DIM, 2 * DIM)
    head.q.weight[second] = 0
    torch.manual_seed(6)
    head.o.weight[:, second].normal_(0.0, 5.0)
    write_head(folder / "head", head_tensors(head))
    drafting = {"method": "eagle3", "model": str(folder / "head")}
    return drafting, partial(head.drafts, model)


def mtp(folder: Path) -> tuple[dict[str, Any], Drafts]:
    head = write_model_with_head(folder, attention=10.0)
    return {"method": "mtp"}, head.drafts


def requests() -> list[Request]:
    """Long prompts and short outputs: a head without the prompt's KV would draft differently."""
    draw = torch.Generator().manual_seed(5)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    prompts = [torch.randint(3, 64, (100 + 8 * index,), generator=draw) for index in range(12)]
    return [Request(f"{i:032x}", 0, tuple(one.tolist()), params) for i, one in enumerate(prompts)]


@pytest.mark.parametrize("write", [eagle3, pytest.param(mtp, marks=pytest.mark.slow)])
async def test_tokens_and_acceptance_behind_a_hand_off_are_those_of_one_engine(
    tmp_path: Path, write: Callable[[Path], tuple[dict[str, Any], Drafts]]
) -> None:
    """Which drafts are right is the same after a hand-off; how many pay depends on the machine's
    speed."""
    (drafting, drafts_of), requested = write(tmp_path), requests()
    config = EngineConfig(model=str(tmp_path), device="cpu", num_kv_blocks=300)
    alone = LocalEngine.load(config, print)
    expected = outputs_of(alone, requested)
    alone.close()
    flags = ("--model", str(tmp_path), "--num-kv-blocks", "300")
    flags += ("--speculative-config", json.dumps(drafting | {"num_speculative_tokens": 1}))
    with RedisServer.start() as redis:
        pair = [launch(role, redis.url, *flags) for role in (Role.PREFILL, Role.DECODE)]
        try:
            async with connected(Nodes(*pair, redis.url, flags)) as nodes:
                for request in requested:
                    await nodes.hand_off(request)
                for request in requested:
                    assert await nodes.finish(request) == expected[request.key]
                seen = nodes.decode.num_heartbeats + 1
                await nodes.decode.until(lambda: nodes.decode.num_heartbeats > seen)
                counts, received = nodes.decode.heartbeat.counters, nodes.decode.received
            await wait_idle(*(node.address for node in pair))
        finally:
            for node in pair:
                node.end(signal.SIGKILL)
    accepted = {False: 0, True: 0}  # by whether the formula's draft is right there
    alone_wrong = 0  # single tokens where the formula's draft is wrong: rejected, or not made
    for request in requested:
        known = [*request.prompt_token_ids, expected[request.key][0]]
        for tokens in filter(None, received[request.key].by_message.values()):
            is_right = drafts_of(known, 1) == tokens[:1]
            if len(tokens) == 2:
                accepted[is_right] += 1
            else:
                alone_wrong += not is_right
            known += tokens
    assert sum(accepted.values()) == sum(counts.accepted_drafts)
    num_rejected = counts.num_drafts - sum(counts.accepted_drafts)
    assert accepted[True] > 10 and accepted[False] <= 1, "but where two tokens are nearly equal"
    assert num_rejected <= alone_wrong + 1
