"""What a client gets of one sample: its tokens as chunks of text, then the result or an error."""

from __future__ import annotations

from typing import NamedTuple

from ...core.errors import BatonError
from ...core.ports import Clock
from ...core.request.request import FinishReason
from ...core.request.timeline import TERMINAL, Event, Stamp
from ..text.text_stream import TextStream
from ..validation.validation import ValidatedRequest
from .attempt import Attempt, OutputToken
from .engine_link import EngineOutput, TransferSummary
from .output_chunk import ChunkSink, OutputChunk, PromptScores, RequestResult, UnfinishedRun

GATEWAY = "gateway"


class Shown(NamedTuple):
    """The newest tokens for the client: those up to a stop string, if one came."""

    text: str
    tokens: list[OutputToken]
    matched_stop: str | None


class Answer:
    """Of one session. `output_ids`: the tokens so far."""

    def __init__(
        self,
        request: ValidatedRequest,
        sample_index: int,
        text: TextStream,
        sink: ChunkSink,
        arrived: Stamp,
        clock: Clock,
    ) -> None:
        self.output_ids: list[int] = []
        self.text = text
        self.prompt_scores = PromptScores(len(request.prompt_token_ids))
        self.timeline = [arrived]
        self._request = request
        self._sample_index = sample_index
        self._sink = sink
        self._clock = clock
        self._cached_tokens = 0
        self._transfer: TransferSummary | None = None

    def stamp(self, event: Event) -> None:
        self.timeline.append(Stamp(event, self._clock.unix_ns(), GATEWAY))

    def note(self, attempt: Attempt, incarnation: str, output: EngineOutput) -> None:
        """Keep what an output has beside its tokens. Terminal events are the gateway's to give."""
        if output.stamps:
            self.timeline += [stamp for stamp in output.stamps if stamp.event not in TERMINAL]
        if output.cached_tokens is not None and incarnation == attempt.pair[0]:
            self._cached_tokens = min(output.cached_tokens, len(self._request.prompt_token_ids))
        if output.transfer is not None:
            self._transfer = output.transfer

    def next(self, index: int, token_id: int) -> bool:
        """Send the usual token on; False: the client reads too slowly."""
        self.output_ids.append(token_id)
        text = self.text.next(token_id)
        return self._sink.emit(OutputChunk(text, (token_id,), index, None, self._sample_index))

    def add(self, tokens: list[OutputToken]) -> Shown:
        """Take tokens that are in order; `send` or `finish` with what is returned."""
        piece = self.text.feed([token_id for token_id, _ in tokens])
        shown = tokens[: piece.num_tokens]
        self.output_ids += [token_id for token_id, _ in shown]
        return Shown(piece.text, shown, piece.matched_stop)

    def send(self, shown: Shown) -> bool:
        """False: the client reads too slowly."""
        return not shown.tokens or self._sink.emit(self._chunk(shown.text, shown.tokens))

    def finish(
        self, attempt: Attempt, reason: FinishReason, shown: Shown, *, num_attempts: int
    ) -> None:
        """The good end."""
        matched_stop: int | str | None = shown.matched_stop
        text = shown.text if matched_stop is not None else shown.text + self.text.flush()
        if matched_stop is None:
            ids = self._request.sampling.stop_token_ids
            matched_stop = next((i for i in self.output_ids[-1:] if i in ids), None)
        result = RequestResult(
            finish_reason=reason,
            matched_stop=matched_stop,
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=len(self.output_ids),
            cached_tokens=self._cached_tokens,
            prefill_node=attempt.route.prefill.name,
            decode_node=attempt.route.decode.name if attempt.is_handed_over else None,
            transfer=self._transfer,
            attempts=num_attempts,
            seed=self._request.sampling.seed,
            timeline=tuple(self.timeline),
        )
        self._sink.emit(self._chunk(text, shown.tokens, result))

    def fail(self, error: BatonError) -> None:
        """The other end."""
        self._sink.fail(error)

    def unfinished(self, last: Attempt) -> UnfinishedRun:
        """What is known behind that end; `last`: its last attempt."""
        return UnfinishedRun(
            last.route.prefill.name,
            last.route.decode.name,
            last.is_handed_over,
            self._transfer,
            len(self.output_ids),
            tuple(self.timeline),
        )

    def _chunk(
        self, text: str, shown: list[OutputToken], result: RequestResult | None = None
    ) -> OutputChunk:
        index = len(self.output_ids) - len(shown)
        return OutputChunk(
            text,
            tuple([token_id for token_id, _ in shown]),
            index,
            result,
            self._sample_index,
            tuple([logprobs for _, logprobs in shown if logprobs is not None]),
            self.prompt_scores.all() if index == 0 else (),
        )
