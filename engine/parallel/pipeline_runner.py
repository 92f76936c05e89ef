"""The stages of a pipeline as one Runner; several steps are in flight at once.

    rank 0, stage 0     launch n | launch n+1 | launch n+2 | ...
    stage 1             step n-1 | step n     | step n+1       residual stream from stage 0
    last stage          step n-2 | step n-1   | step n         samples: RESULT to rank 0

Every rank gets every step message, in the same order. The ranks of the last stage sample the same
tokens; the first of them sends the tokens to rank 0. Unlike a step of an engine of one stage, a
step has completed when rank 0 has its result: then all stages have written its KV.

    RESULT    MessagePack: CompletedStep
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from ...core.request.request import TokenLogprobs
from ..execution.batch import SampledToken, SequenceSlice
from ..execution.cpu_steps import CompletedStep
from ..execution.runner_protocols import LaunchedStep, Runner
from .parallel_runner import ParallelRunner, encode
from .rank_channel import MessageKind, RankChannel
from .rank_group import RankGroup, reporting

_LOOK_S = 0.1  # interval of checks for a lost rank while waiting for a result


_decoder = msgspec.msgpack.Decoder(CompletedStep)


class _PipelineStep:
    """A step in the pipeline."""

    number = 0  # rank 0's step count does not tell when the last stage has written its KV
    device_s = None  # rank 0's device time would not include the other stages

    def __init__(self, followers: RankGroup) -> None:
        self._followers = followers
        self._has_result = threading.Event()
        self._result: CompletedStep | None = None
        self.mine: LaunchedStep | None = None  # kept alive: the device reads its buffers

    def completed(self, result: CompletedStep) -> None:
        """Called on the watch thread."""
        self._result = result
        self._has_result.set()

    def has_completed(self) -> bool:
        self._followers.check()
        return self._has_result.is_set()

    def collect(self) -> list[SampledToken | None]:
        while not self._has_result.wait(_LOOK_S):
            self._followers.check()
        assert self._result is not None
        return self._result.results

    def prompt_logprobs(self) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        return {} if self._result is None else self._result.prompt


class PipelineRunner(ParallelRunner):
    """As ParallelRunner. One more step than there are stages may be in flight, and no step
    may follow the tokens of another in flight: they come to the host first."""

    def __init__(self, mine: Runner, followers: RankGroup) -> None:
        super().__init__(mine, followers)
        self.runs_ahead = True
        self._in_flight: deque[_PipelineStep] = deque()
        followers.on_result = self._take

    def launch(self, batch: Sequence[SequenceSlice]) -> LaunchedStep:
        step = _PipelineStep(self._followers)
        self._in_flight.append(step)
        self._followers.send(MessageKind.STEP, encode(batch))
        with self._followers.explaining:
            step.mine = self._mine.launch(batch)
        return step

    def _take(self, payload: memoryview) -> None:
        self._in_flight.popleft().completed(_decoder.decode(payload))


class ResultSender:
    """Sends the results of steps from the last stage to rank 0, in order, as they complete."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._launched: queue.SimpleQueue[LaunchedStep] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="step-results", daemon=True).start()

    def add(self, step: LaunchedStep) -> None:
        """Send the result of `step`, which was launched, once it has completed."""
        self._launched.put(step)

    def _run(self) -> None:
        with reporting(self._channel, "results of steps are not sent any more"):
            while True:
                step = self._launched.get()
                result = CompletedStep(step.collect(), step.prompt_logprobs())
                self._channel.send(MessageKind.RESULT, msgspec.msgpack.encode(result))
