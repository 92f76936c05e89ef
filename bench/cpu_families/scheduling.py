"""The host's share of a step: scheduler and block pool, with a runner that takes no time."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.request.request import Request, SamplingParams
from baton.engine.engine import Engine
from baton.engine.execution.batch import CompletedStep, SampledToken, SequenceSlice
from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.generations import LocalGenerations
from baton.engine.kv.limits import EngineLimits

from ..floors.figures import Figure, time_s

NUM_REQUESTS = 256
_PROMPT_TOKENS = 1024
_MAX_LEN = 4096
_NUM_STEPS = 40
_BLOCKS_A_TIME = 64
_NUM_ROUNDS = 500


class NullRunner:
    """Samples token 7 for everybody, at once."""

    runs_ahead = False

    def launch(self, batch: Sequence[SequenceSlice]) -> CompletedStep:
        return CompletedStep([one.sample and SampledToken(7, 0.0) for one in batch])


def measure() -> list[Figure]:
    """Milliseconds a decode step of 256 requests, and pool operations a second."""
    return [*_steps(), _allocator()]


def _steps() -> list[Figure]:
    engine = _busy_engine()
    schedule_ms, step_ms = [], []
    for _ in range(_NUM_STEPS):
        # Planning twice is harmless: nothing is launched, and the blocks are taken once.
        schedule_ms.append(time_s(engine._scheduler.schedule) * 1e3)
        step_ms.append(time_s(engine.step) * 1e3)
    floor, shape = _bare_loop_ms(), f"a decode step of {NUM_REQUESTS}"
    floor_is = "a Python loop that makes one small object a request"
    return [
        Figure(f"scheduler, {shape}", "ms", tuple(schedule_ms), floor, floor_is, target=1.0),
        Figure(f"all of the host's part, {shape}", "ms", tuple(step_ms), 3 * floor, "three such"),
    ]


def _busy_engine() -> Engine:
    """All requests decode, at a context of 1024 tokens."""
    blocks = NUM_REQUESTS * _MAX_LEN // 16 + 2  # nobody ever waits for memory
    limits = EngineLimits(blocks, 16, _MAX_LEN, NUM_REQUESTS, 64 * _PROMPT_TOKENS)
    engine = Engine(
        NullRunner(), limits, LocalGenerations(blocks), fingerprint="bench", eos_token_ids=()
    )
    sampling = SamplingParams(max_tokens=_MAX_LEN - _PROMPT_TOKENS, temperature=0.0)
    for i in range(NUM_REQUESTS):
        prompt = tuple((i * 31 + j) % 4000 for j in range(_PROMPT_TOKENS))
        engine.add(Request(f"{i:032x}", 0, prompt, sampling))
    while engine.load().waiting_tokens > NUM_REQUESTS:
        engine.step()
    assert len(engine.step().tokens) == NUM_REQUESTS
    return engine


def _bare_loop_ms() -> float:
    def loop() -> None:
        made = []
        for i in range(NUM_REQUESTS):
            made.append(SampledToken(i, 0.0))

    return min(time_s(loop) for _ in range(20)) * 1e3


def _allocator() -> Figure:
    """An operation is one block allocated, or released."""
    pool = BlockPool(64 * _BLOCKS_A_TIME + 2, LocalGenerations(64 * _BLOCKS_A_TIME + 2))

    def churn() -> None:
        for _ in range(_NUM_ROUNDS):
            ids = pool.allocate(_BLOCKS_A_TIME)
            assert ids is not None
            pool.release(ids)

    free = list(range(64 * _BLOCKS_A_TIME))

    def bare() -> None:
        for _ in range(_NUM_ROUNDS):
            ids = free[: -_BLOCKS_A_TIME - 1 : -1]
            del free[len(free) - _BLOCKS_A_TIME :]
            for block_id in reversed(ids):
                free.append(block_id)

    operations = 2 * _NUM_ROUNDS * _BLOCKS_A_TIME
    churn()
    samples = tuple(operations / time_s(churn) for _ in range(9))
    ceiling = operations / min(time_s(bare) for _ in range(9))
    return Figure(
        "block pool, allocate and release 64 at a time",
        "blocks/s",
        samples,
        ceiling,
        "a bare list as a stack",
    )
