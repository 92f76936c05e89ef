"""Runs one scheme over the engine: requests by their arrival times, tokens with their timestamps.

On a CPU, time is this process's CPU time, so that other processes do not count; on a GPU it is the
monotonic clock. Pauses without a request are skipped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from baton.core.metrics import TokenTimes
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.batch import SampledToken, SequenceSlice
from baton.engine.execution.cpu_steps import CompletedStep
from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.runner_protocols import LaunchedStep
from baton.engine.kv.generations import Generations
from baton.engine.kv.kv_memory import CpuKvMemory
from baton.engine.kv.limits import EngineLimits

from .schemes import Scheme
from .workload import Job


class EndingRunner:
    """A runner that ends each output with EOS exactly at the job's length. It finds the job by the
    seed of the sampling parameters. `runs_ahead` False: it waits for each step."""

    def __init__(
        self, runner: ModelRunner, jobs: Sequence[Job], eos: int, *, runs_ahead: bool
    ) -> None:
        self.runs_ahead = runs_ahead and runner.runs_ahead
        self._runner = runner
        self._ends = [job.num_prompt + job.num_outputs for job in jobs]
        self._eos = eos

    def launch(self, batch: Sequence[SequenceSlice]) -> LaunchedStep:
        step: Any = _EndingStep(self._runner.launch(batch), self._judge, batch)
        return step if self.runs_ahead else CompletedStep(step.collect())

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._runner.copy_blocks(pairs)

    def _judge(self, one: SequenceSlice, token: SampledToken | None) -> SampledToken | None:
        if token is None or one.sample is None:
            return token
        num_tokens = one.start + len(one.token_ids) + 1
        if num_tokens >= self._ends[one.sample.params.seed]:
            return token._replace(token_id=self._eos)
        return token._replace(token_id=token.token_id if token.token_id != self._eos else 1)


class _EndingStep:
    def __init__(self, step: LaunchedStep, judge: Any, batch: Sequence[SequenceSlice]) -> None:
        self._step, self._judge, self._batch = step, judge, batch
        self.number = step.number

    @property
    def device_s(self) -> float | None:
        return self._step.device_s

    def has_completed(self) -> bool:
        return self._step.has_completed()

    def collect(self) -> list[SampledToken | None]:
        return list(map(self._judge, self._batch, self._step.collect()))

    def prompt_logprobs(self) -> Mapping[int, Any]:
        return {}


@dataclass(slots=True)
class Outcome:
    """The result of one scheme. `used`, `reserved`: KV tokens, and slots reserved for them, summed
    over steps."""

    times: list[TokenTimes]
    duration_s: float
    num_preemptions: int
    used: int = 0
    reserved: int = 0
    num_running: list[int] = field(default_factory=list)

    @property
    def waste(self) -> float:
        """The share of the reserved memory that holds no token."""
        return 1 - self.used / self.reserved


class Player:
    """Runs schemes over one loaded model. `chunk_tokens`: token budget of a step with chunked
    prefill."""

    def __init__(
        self, runner: ModelRunner, num_blocks: int, block_size: int, max_len: int, chunk_tokens: int
    ) -> None:
        self._runner = runner
        self._num_blocks, self._block_size = num_blocks, block_size
        self._max_len, self._chunk_tokens = max_len, chunk_tokens
        self._is_cpu = isinstance(runner.kv, CpuKvMemory)
        self._clock: Callable[[], float] = time.process_time if self._is_cpu else time.monotonic

    def _engine(self, scheme: Scheme, jobs: Sequence[Job]) -> Engine:
        runner, eos = self._runner, self._runner.eos_token_ids[0]
        budget = self._chunk_tokens if scheme.is_chunked else 1 << 20
        limits = EngineLimits(
            self._num_blocks,
            self._block_size,
            self._max_len,
            max_num_seqs=runner.max_num_seqs,
            max_num_batched_tokens=budget,
            graph_rows=runner.graph_rows if scheme.has_graphs else (),
            graph_prompt_tokens=runner.graph_prompt_tokens if scheme.has_graphs else 0,
        )
        return Engine(
            EngineParts(
                EndingRunner(runner, jobs, eos, runs_ahead=scheme.runs_ahead),
                limits,
                Generations(self._num_blocks),
                fingerprint=scheme.name,
                eos_token_ids=[eos],
                enable_prefix_caching=scheme.has_prefix_cache,
                estimator=scheme.estimator(),
            )
        )

    def play(self, scheme: Scheme, jobs: Sequence[Job], arrivals_s: Sequence[float]) -> Outcome:
        """Run all jobs to their ends."""
        if self._is_cpu or scheme.has_graphs:
            return self._play(scheme, jobs, arrivals_s)
        from baton.engine.execution.gpu.cuda_graphs import StepGraphs

        with mock.patch.object(StepGraphs, "find", return_value=None):  # no graph is used
            return self._play(scheme, jobs, arrivals_s)

    def _play(self, scheme: Scheme, jobs: Sequence[Job], arrivals_s: Sequence[float]) -> Outcome:
        engine, clock = self._engine(scheme, jobs), self._clock
        capacity = engine.limits.capacity * self._block_size
        coming = deque(zip(arrivals_s, jobs, strict=True))
        waiting: deque[Job] = deque()
        running: dict[str, Job] = {}
        token_s: dict[str, list[float]] = {job.request.key: [] for job in jobs}
        skipped_s, began_s = 0.0, clock()
        outcome = Outcome([], 0.0, 0)
        while coming or waiting or running:
            now_s = clock() - began_s + skipped_s
            while coming and coming[0][0] <= now_s:
                waiting.append(coming.popleft()[1])
            self._admit(scheme, engine, waiting, running, capacity)
            if not running:
                skipped_s += max(0.0, coming[0][0] - now_s)  # skip pauses without a request
                continue
            step = engine.step()
            assert not step.failed, step.failed
            now_s = clock() - began_s + skipped_s
            for token in step.tokens:
                token_s[token.key].append(now_s)
                if token.finish_reason is not None:
                    del running[token.key]
            self._observe(scheme, engine, running, outcome)
        outcome.duration_s = clock() - began_s + skipped_s
        outcome.num_preemptions = engine.stats.totals().num_preemptions
        outcome.times = [
            TokenTimes(at_s, tuple(token_s[job.request.key]))
            for at_s, job in zip(arrivals_s, jobs, strict=True)
        ]
        return outcome

    def _admit(
        self,
        scheme: Scheme,
        engine: Engine,
        waiting: deque[Job],
        running: dict[str, Job],
        capacity: int,
    ) -> None:
        if scheme.is_batched and running:
            return
        reserved = sum(scheme.reserved_tokens(job, self._max_len) for job in running.values())
        while waiting:
            reserved += scheme.reserved_tokens(waiting[0], self._max_len)
            if reserved > capacity:
                return
            job = waiting.popleft()
            running[job.request.key] = job
            engine.add(job.request)

    def _observe(
        self, scheme: Scheme, engine: Engine, running: Mapping[str, Job], outcome: Outcome
    ) -> None:
        """Add up, over running sequences, the tokens in KV and the slots reserved."""
        sequences = engine._scheduler.queues.running
        outcome.num_running.append(len(sequences))
        for sequence in sequences:
            outcome.used += sequence.num_computed_tokens
            own = scheme.reserved_tokens(running[sequence.key], self._max_len)
            outcome.reserved += own or len(sequence.block_ids) * self._block_size


def warm_up(player: Player, jobs: Sequence[Job], scheme: Scheme) -> None:
    """Run a few jobs so that one-time costs of the first steps are not measured."""
    player.play(scheme, jobs[:4], [0.0] * 4)
