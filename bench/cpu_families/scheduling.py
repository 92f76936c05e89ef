"""Host time of a decode step by its parts, with a runner whose device takes no time; operations of
the block pool.

    python -m baton.bench.cpu scheduling

    plan     schedule: running sequences, their slices, fences
    arrays   the arrays that a GPU decode step uploads: ids, positions, slots, keys, tables, shares
    collect  the sampled tokens by slice
    advance  append the tokens to their sequences
    deliver  to the sessions of `LLM` and their queues, without detokenising
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from baton.client.messages import build_request
from baton.core.config import GatewayConfig
from baton.core.request.request import TokenLogprobs
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.batch import SampledToken, SequenceSlice, StepBatch
from baton.engine.execution.gpu.step_arrays import decode_arrays, special_rows
from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.gateway.validation.served_model import ServedModel
from baton.gateway.validation.validation import ValidatedRequest
from baton.kernels.attention.attention import join_tables
from baton.kernels.attention.decode_shares import divide
from baton.offline.local_calls import LocalCalls

from ..floors.figures import Figure, time_s

BATCHES = (64, 256, 512)
_PROMPT_TOKENS = 512
_MAX_LEN = 2048
_NUM_STEPS, _NUM_WARMUPS = 100, 20
_BLOCK_SIZE = 16
_BLOCKS_A_TIME = 64
_NUM_ROUNDS = 500


@dataclass(frozen=True, slots=True)
class HostStep:
    """A launched step."""

    collect: Callable[[], list[SampledToken | None]]
    number = 0
    device_s = None

    def has_completed(self) -> bool:
        return True

    def prompt_logprobs(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        return {}


class HostRunner:
    """Prepares steps as a GPU's runner does, but computes nothing."""

    runs_ahead = True

    def launch(self, batch: Sequence[SequenceSlice]) -> HostStep:
        batch = StepBatch.of(batch)
        assert batch.num_decodes == len(batch) or any(piece.is_prompt for piece in batch.others)
        decode_arrays(batch, _BLOCK_SIZE, sum(batch.query_lens))
        assert not (special_rows(batch) or batch.has_extras)
        metadata = batch.metadata(torch.empty(0))
        seq_lens = np.array(metadata.seq_lens, np.int32)
        join_tables(metadata.block_tables)
        divide(seq_lens, 8, is_8bit=False)
        return HostStep(partial(self.results, batch))

    def results(self, batch: StepBatch) -> list[SampledToken | None]:
        """Token 7 for every sequence."""
        n = len(batch.logits_indices)
        ids, logprobs = torch.full((n,), 7), torch.zeros(n)
        tokens = SampledToken.many(ids.tolist(), logprobs.tolist())
        return batch.results(tokens)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("nobody forks")


@dataclass(frozen=True, slots=True)
class _Local:
    """The part of a LocalEngine that `LocalCalls` needs."""

    engine: Engine


def measure() -> list[Figure]:
    """Microseconds per decode step, and pool operations per second."""
    figures = [figure for batch in BATCHES for figure in _steps(batch)]
    return [*figures, _allocator()]


class _Parts:
    """Seconds of every step by part, without the time of nested parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Time every call of a method."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            result: list[Any] = []
            self._inner.append(0.0)
            took_s = time_s(lambda: result.append(call(*args, **kwargs)))
            self.seconds[part] += took_s - self._inner.pop()
            self._inner[-1] += took_s
            return result[0]

        setattr(owner, name, timed)


def _steps(batch: int) -> list[Figure]:
    samples = asyncio.run(_measure_steps(batch))
    floor, shape = _bare_loop_ms(batch) * 1e3, f"a decode step of {batch}"
    figures = [
        Figure(f"{part}, {shape}", "us", tuple(one[part] * 1e6 for one in samples))
        for part in ("plan", "arrays", "collect", "advance", "deliver")
    ]
    whole = tuple(sum(one.values()) * 1e6 for one in samples)
    target = 3000.0 if batch == 256 else None
    figures.append(
        Figure(
            f"all of the host's part, {shape}",
            "us",
            whole,
            floor,
            "a Python loop that makes one small object a request",
            target,
        )
    )
    return figures


async def _measure_steps(batch: int) -> list[dict[str, float]]:
    """All requests decode, at a context of at least 512 tokens, sampled with a temperature."""
    blocks = batch * _MAX_LEN // _BLOCK_SIZE + 2  # so that no request waits for memory
    limits = EngineLimits(blocks, _BLOCK_SIZE, _MAX_LEN, batch, 64 * _PROMPT_TOKENS)
    runner = HostRunner()
    engine = Engine(
        EngineParts(
            runner,
            limits,
            Generations(blocks),
            fingerprint="bench",
            eos_token_ids=(),
            enable_prefix_caching=False,
        )
    )
    model = ServedModel.load(GatewayConfig(model="demo", skip_tokenizer_init=True))
    calls = LocalCalls(_Local(engine), model)  # type: ignore[arg-type]
    readers = []
    for i in range(batch):
        prompt = [(i * 31 + j) % 4000 for j in range(_PROMPT_TOKENS)]
        max_tokens = _MAX_LEN - _PROMPT_TOKENS
        wire, _ = build_request(
            None,
            {
                "prompt_token_ids": prompt,
                "max_tokens": max_tokens,
                "temperature": 0.6,
                "ignore_eos": True,
            },
        )
        readers.append(asyncio.create_task(_read(calls, await calls.prepare(wire))))
    await asyncio.sleep(0)
    while len((output := engine.step()).tokens) < batch:
        calls._deliver(output)
    parts = _Parts()
    parts.watch(runner, "launch", "arrays")
    parts.watch(runner, "results", "collect")
    parts.watch(engine, "_launch", "plan")
    parts.watch(engine, "_collect", "advance")
    parts.watch(engine, "step", "plan")
    parts.watch(calls, "_deliver", "deliver")
    samples = []
    calls._deliver(output)
    for _ in range(_NUM_STEPS):
        parts.seconds.clear()
        calls._deliver(engine.step(lambda: False))
        samples.append(dict(parts.seconds))
    for reader in readers:
        reader.cancel()
    await asyncio.wait(readers)
    return samples[_NUM_WARMUPS:]


async def _read(calls: LocalCalls, request: ValidatedRequest) -> None:
    with calls.running(request) as call:
        async for _ in call.chunks():
            raise AssertionError("none of them ends")


def _bare_loop_ms(batch: int) -> float:
    def loop() -> None:
        made = []
        for i in range(batch):
            made.append(SampledToken(i, 0.0))

    return min(time_s(loop) for _ in range(20)) * 1e3


def _allocator() -> Figure:
    """One operation is a block allocated or released."""
    pool = BlockPool(64 * _BLOCKS_A_TIME + 2, Generations(64 * _BLOCKS_A_TIME + 2))

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
