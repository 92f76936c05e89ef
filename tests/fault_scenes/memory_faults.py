"""Memory faults: pools that are too small, and an index with entries of evicted blocks.

Each is a small function on a scene, as in fault_scenes/breakages.py.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress

from fault_scenes.breakages import DECODES, PREFILLS
from fault_scenes.faults import BLOCK_SIZE, Scene, Stream

POOL_BLOCKS = 98
PREFIX_BLOCKS = 20
HEARTBEAT_S = 0.25
MAX_SILENCE_S = 0.8  # the gateway's limit is 1.2 s


async def ask_by_a_stale_index(scene: Scene) -> None:
    """F25: Redis is paused, so that the index lists blocks which were overwritten by other prompts.

    The gateway sends each prompt to its old engine, where it is only a miss.
    """
    firsts = [scene.ask(PREFIX_BLOCKS * BLOCK_SIZE + 5, 4) for _ in range(4)]
    homes = await _homes(firsts)
    assert sorted(homes) == sorted(2 * PREFILLS), "without hits, load decides"
    again = await _ask_again(scene, firsts)
    assert await _homes(again) == homes
    assert {stream.result.cached_tokens for stream in again} == {PREFIX_BLOCKS * BLOCK_SIZE}
    redis = scene.cluster.redis.process
    redis.send_signal(signal.SIGSTOP)
    try:
        await _rewrite_the_pools(scene)
        again = await _ask_again(scene, firsts)
        assert await _homes(again) == homes
        assert {stream.result.cached_tokens for stream in again} == {0}
    finally:
        redis.send_signal(signal.SIGCONT)


async def _homes(streams: list[Stream]) -> list[str]:
    for stream in streams:
        await stream.end()
    return [stream.result.prefill_node for stream in streams]


async def _ask_again(scene: Scene, firsts: list[Stream]) -> list[Stream]:
    await asyncio.sleep(1.2 * HEARTBEAT_S)  # until index and loads are up to date
    return [scene.ask(num_tokens=4, prompt=first.prompt) for first in firsts]


async def _rewrite_the_pools(scene: Scene) -> None:
    """Send other prompts until each prefill node has filled its pool with them."""
    num_blocks = dict.fromkeys(PREFILLS, 0)
    while min(num_blocks.values()) < POOL_BLOCKS:
        for home in await _homes([scene.ask(420, 2) for _ in range(4)]):
            num_blocks[home] += 420 // BLOCK_SIZE


async def ask_for_more_than_fits(scene: Scene) -> None:
    """F28: eight requests of 29 blocks for two pools of 98: they queue, and all complete."""
    for _ in range(8):
        scene.ask(420, 16)


async def outgrow_the_pool(scene: Scene) -> None:
    """F28: outputs are short at first, so that many requests are admitted; then all get long.

    Seven requests of 7 blocks are admitted to a pool of 98, and need 15 each at their end. On a
    busy machine they may run one after the other: then more waves follow.
    """
    client = scene.client()
    shorts = [
        client.generate(prompt_token_ids=(7, i), max_tokens=3, n=8, ignore_eos=True)
        for i in range(8)
    ]
    for generation in shorts:
        await generation.finish()
    before = await _num_preemptions(scene)
    waves = 0
    while (num_preemptions := await _num_preemptions(scene) - before) == 0:
        waves += 1
        assert waves <= 3, "nobody was preempted"
        await _ask_for_long_outputs(scene)
    print(f"F28: {num_preemptions} preemptions in {waves} waves")


async def _ask_for_long_outputs(scene: Scene) -> None:
    """Both decode engines are paused until all prompts are computed, or nearly all."""
    await asyncio.sleep(1.2 * HEARTBEAT_S)  # until all count as idle
    with scene.stopped("decode-0", "engine"), scene.stopped("decode-1", "engine"):
        streams = []
        for number in range(14):
            sampling = {"temperature": 0.9, "top_p": 0.95, "seed": number} if number % 2 else {}
            streams.append(scene.ask(110, 125, **sampling))
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_SILENCE_S):
                await asyncio.gather(*(stream.reached(1) for stream in streams))
    for stream in streams:
        await stream.end()


async def _num_preemptions(scene: Scene) -> int:
    ledgers = [await scene.ledger(name) for name in DECODES]
    return sum(ledger["num_preemptions"] for ledger in ledgers)


async def stop_the_pulls(scene: Scene) -> None:
    """F29: finished prompts use up the credit of the prefill nodes, since nobody fetches them."""
    waves = 0
    while not await _finish_prompts_that_nobody_fetches(scene):
        waves += 1
        assert waves < 3, "decode engines were missed before any prompt was computed"


async def _finish_prompts_that_nobody_fetches(scene: Scene) -> bool:
    """Whether there were any: on a slow machine the gateway may first detect the paused engines."""
    with scene.stopped("decode-0", "engine"), scene.stopped("decode-1", "engine"):
        streams = [scene.ask(420) for _ in range(6)]
        with suppress(TimeoutError):
            async with asyncio.timeout(MAX_SILENCE_S):
                await asyncio.gather(*(stream.reached(1) for stream in streams[:2]))
        have_begun = all(stream.tokens for stream in streams[:2])
        began_s = time.monotonic()
        await scene.wait_idle(*PREFILLS)
        took_s = time.monotonic() - began_s
    print(f"F29: blocks back after {took_s:.1f} s")
    for stream in streams:
        await stream.end()
    return have_begun
