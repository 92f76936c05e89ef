"""The stages of a pipeline as one Runner: a step goes through all of them, several at once.

    rank 0, stage 0     launch n | launch n+1 | launch n+2 | ...
    stage 1             step n-1 | step n     | step n+1       residual stream from stage 0
    last stage          step n-2 | step n-1   | step n         samples: RESULT to rank 0

Every rank gets every step message, in one order. The ranks of the last stage sample alike; the
first of them sends what was sampled. Unlike a step on ranks of one stage, a step here has completed
when its result has come: that means that all stages have written its KV.

    RESULT    MessagePack: StepResult
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from ...core.errors import EngineFailed
from ...core.request.request import TokenLogprobs
from ..execution.batch import SampledToken, SequenceSlice
from ..execution.runner_protocols import LaunchedStep, Runner
from .parallel_runner import ParallelRunner, encode
from .rank_channel import MessageKind, RankChannel
from .rank_group import RankGroup, report_failure

_LOOK_S = 0.1  # how often who waits for a result looks whether there can be one


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Of one step, as the last stage sends it."""

    tokens: list[SampledToken | None]
    prompt: dict[int, tuple[TokenLogprobs, ...]]


_decoder = msgspec.msgpack.Decoder(StepResult)


class _PipelineStep:
    """A step in the pipeline."""

    number = 0  # rank 0's count has no part in when the last stage has written its KV
    device_s = None  # nor its device in the others' parts

    def __init__(self, followers: RankGroup) -> None:
        self._followers = followers
        self._has_result = threading.Event()
        self._result: StepResult | None = None
        self.mine: LaunchedStep | None = None  # kept: the device reads what it holds

    def completed(self, result: StepResult) -> None:
        """On the watch thread."""
        self._result = result
        self._has_result.set()

    def has_completed(self) -> bool:
        self._followers.check()
        return self._has_result.is_set()

    def collect(self) -> list[SampledToken | None]:
        while not self._has_result.wait(_LOOK_S):
            self._followers.check()
        assert self._result is not None
        return self._result.tokens

    def prompt_logprobs(self) -> Mapping[int, tuple[TokenLogprobs, ...]]:
        return {} if self._result is None else self._result.prompt


class PipelineRunner:
    """`mine` is rank 0's. As many steps may be in flight as there are stages, and one more, and
    none of them may follow another's tokens: those come to the host first."""

    runs_ahead = True

    def __init__(self, mine: Runner, followers: RankGroup) -> None:
        self._mine = mine
        self._followers = followers
        self._in_flight: deque[_PipelineStep] = deque()
        followers.on_result = self._take

    def launch(self, batch: Sequence[SequenceSlice]) -> LaunchedStep:
        step = _PipelineStep(self._followers)
        self._in_flight.append(step)
        self._followers.send(MessageKind.STEP, encode(batch))
        try:
            step.mine = self._mine.launch(batch)
        except EngineFailed as error:
            raise self._followers.explain(error) from error
        return step

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """On the others it is done before whatever is sent to them next."""
        self._followers.copy_blocks(pairs)
        self._mine.copy_blocks(pairs)

    def _take(self, payload: memoryview) -> None:
        self._in_flight.popleft().completed(_decoder.decode(payload))


def join_ranks(mine: Runner, followers: RankGroup | None, num_stages: int) -> Runner:
    """The runner of an engine, of which `mine` is rank 0's."""
    if followers is None:
        return mine
    if num_stages > 1:
        return PipelineRunner(mine, followers)
    return ParallelRunner(mine, followers)


class ResultSender:
    """The last stage's: sends the results of steps in their order, each once it has completed."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._launched: queue.SimpleQueue[LaunchedStep] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="step-results", daemon=True).start()

    def add(self, step: LaunchedStep) -> None:
        """A step was launched."""
        self._launched.put(step)

    def _run(self) -> None:
        try:
            while True:
                step = self._launched.get()
                result = StepResult(step.collect(), dict(step.prompt_logprobs()))
                self._channel.send(MessageKind.RESULT, msgspec.msgpack.encode(result))
        except OSError:
            return  # rank 0 is gone
        except Exception as error:  # of this thread: nobody else would see it
            report_failure(self._channel, error, "results of steps are not sent any more")
