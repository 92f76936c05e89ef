"""Two engines and a gateway: each engine for both phases, disaggregated, or `auto`.

    arrivals ─► router, sessions ─► engine 0, engine 1 ─► tokens         all of it the product's
                                      └ steps computed by real models, one after the other

Each engine has a clock of its own, which each step advances by its duration, as if each engine had
a machine or card to itself. Both compute with one model over the same memory, since no duration
depends on the contents of the KV; nothing is copied between them, and a hand-off takes as long as
in bench/played/simulation.py. The engines wait for each step before they plan the next.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.core.membership import Role
from baton.core.metrics import TokenTimes
from baton.core.step_cost import StepCost
from baton.engine.execution.batch import SequenceSlice
from baton.engine.execution.cpu_steps import CompletedStep
from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.runner_protocols import LaunchedStep

from ..played.engine import Blocks, EngineSetup
from ..played.simulation import Call, Simulation
from .play import EndingRunner
from .workload import Job

EACH, SPLIT, AUTO = "two engines", "+ disaggregation", "+ auto"
PAIRS = (EACH, SPLIT, AUTO)
_NO_COST = StepCost(0.0, (0.0,) * 10, 0.0, 0.0)  # the devices are real
_WARM_S = 60.0  # between the warm-up requests and the measured ones


class MeasuredDevice:
    """A device that computes. Its clock stands still between steps; during a step it advances from
    the launch until the tokens are ready."""

    runs_ahead = False

    def __init__(self, runner: EndingRunner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self._at_s = 0.0
        self._began_s: float | None = None

    @property
    def now_s(self) -> float:
        """The time at the end of a step; stops the clock."""
        self._at_s, self._began_s = self.monotonic_s(), None
        return self._at_s

    @now_s.setter
    def now_s(self, seconds: float) -> None:
        self._at_s, self._began_s = seconds, self._clock()

    def monotonic_s(self) -> float:
        if self._began_s is None:
            return self._at_s
        return self._at_s + self._clock() - self._began_s

    def unix_ns(self) -> int:
        return int(self.monotonic_s() * 1e9)

    def launch(self, batch: Sequence[SequenceSlice]) -> LaunchedStep:
        return CompletedStep(self._runner.launch(batch).collect())

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._runner.copy_blocks(pairs)


@dataclass(frozen=True, slots=True)
class PairShape:
    """`chunk_tokens`: token budget of a step with decodes; `tbt_s`: the TBT that engines
    promise, with `AUTO` and with two separate engines."""

    num_blocks: int
    block_size: int
    chunk_tokens: int
    tbt_s: float
    eos: int


class PairPlayer:
    """Runs two engines over one loaded model, with step times from `clock`."""

    def __init__(self, runner: ModelRunner, shape: PairShape, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._shape = shape
        self._clock = clock

    def _setups(self, mode: str, jobs: Sequence[Job]) -> dict[str, EngineSetup]:
        shape = self._shape
        both = EngineSetup(
            Role.DECODE,
            shape.tbt_s,
            shape.chunk_tokens,
            max_num_seqs=self._runner.max_num_seqs,
            blocks=Blocks(shape.block_size, shape.num_blocks),
            eos_ids=(shape.eos,),
        )
        setups = [both, both]
        if mode != EACH:
            prefill = replace(
                both, role=Role.PREFILL, max_num_batched_tokens=4 * shape.chunk_tokens
            )
            setups = [prefill, both]
        if mode == SPLIT:
            setups = [replace(one, tbt_target_s=None) for one in setups]
        found = {}
        for number, setup in enumerate(setups):
            runner = EndingRunner(self._runner, jobs, shape.eos, runs_ahead=False)
            device = MeasuredDevice(runner, self._clock)
            found[f"{number:032x}"] = replace(
                setup, device=device, measures_first_steps=self._runner.runs_ahead
            )
        return found

    def play(self, mode: str, jobs: Sequence[Job], arrivals_s: Sequence[float]) -> list[TokenTimes]:
        """The token times of all jobs, each run to its end, after warm-up requests that do not
        count."""
        return asyncio.run(self._play(mode, jobs, arrivals_s))

    async def _play(
        self, mode: str, jobs: Sequence[Job], arrivals_s: Sequence[float]
    ) -> list[TokenTimes]:
        simulation = Simulation(_NO_COST, self._setups(mode, jobs))
        num_warm = min(8, len(jobs))
        due = [*((0.0, job) for job in jobs[:num_warm])]
        due += [(_WARM_S + at_s, job) for at_s, job in zip(arrivals_s, jobs, strict=True)]
        for at_s, job in due:
            simulation.at(at_s, lambda job=job: _call(simulation, job))  # type: ignore[misc]
        simulation.run()
        calls = simulation.calls[num_warm:]
        for call, job in zip(calls, jobs, strict=True):
            assert call.error is None and len(call.token_s) == job.num_outputs, (call.error, mode)
        return [_times(call) for call in calls]


def _call(simulation: Simulation, job: Job) -> None:
    simulation.call(
        job.num_prompt,
        job.num_outputs,
        token_ids=array("I", job.request.prompt_token_ids),
        sampling=job.request.sampling,
    )


def _times(call: Call) -> TokenTimes:
    return TokenTimes(call.arrived_s - _WARM_S, tuple(at_s - _WARM_S for at_s in call.token_s))
