"""The output of one sample for its client: tokens as chunks of text, then the result or an error.
Makes the engines' request for what is still missing behind the tokens so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace

from ...core.ports import Clock
from ...core.request.request import FinishReason, Request
from ...core.request.timeline import TERMINAL, Event, Stamp
from ..text.text_stream import TextStream
from ..validation.validation import ValidatedRequest
from .engine_link import EngineOutput, TransferSummary
from .output_chunk import ChunkSink, OutputChunk, OutputToken, RequestResult
from .prompt_scores import PromptScores

GATEWAY = "gateway"


@dataclass(slots=True, eq=False)
class SessionOutput:
    """The output of one session. `step`: see TextStream; `output_ids`: the tokens so far;
    `matched_stop`: the stop string or stop token id that ended them; `transfer`: the hand-off of
    their KV, once it is over."""

    request_id: str
    request: ValidatedRequest
    step: InitVar[Callable[[int], str]]
    sink: ChunkSink
    clock: Clock
    arrived_unix_ns: int
    sample_index: int = 0
    output_ids: list[int] = field(default_factory=list)
    matched_stop: int | str | None = None
    prompt_scores: PromptScores | None = None  # of the first sample, if requested
    transfer: TransferSummary | None = None
    _cached_tokens: int = 0
    text: TextStream = field(init=False)
    timeline: list[Stamp] = field(init=False)

    def __post_init__(self, step: Callable[[int], str]) -> None:
        includes_stop = self.request.options.include_stop_str_in_output
        self.text = TextStream(step, self.request.sampling, includes_stop=includes_stop)
        self.timeline = [Stamp(Event.ARRIVED, self.arrived_unix_ns, GATEWAY)]
        if self.request.sampling.prompt_logprobs is not None and not self.sample_index:
            self.prompt_scores = PromptScores(len(self.request.prompt_token_ids))

    def stamp(self, event: Event) -> None:
        self.timeline.append(Stamp(event, self.clock.unix_ns(), GATEWAY))

    @property
    def lacks_scores(self) -> bool:
        """Whether scores of the prompt are still missing: they precede the tokens."""
        return self.prompt_scores is not None and not self.prompt_scores.is_complete

    def rest(self, attempt: int, fork_ids: tuple[str, ...], *, may_refuse: bool) -> Request:
        """The engines' request of this attempt: to go on behind `output_ids`. It leaves out scores
        of the prompt that are known already, or that another sample has."""
        request, sampling = self.request, self.request.sampling
        if sampling.prompt_logprobs is not None and not self.lacks_scores:
            sampling = replace(sampling, prompt_logprobs=None)
        return Request(
            request_id=self.request_id,
            attempt=attempt,
            prompt_token_ids=request.prompt_token_ids,
            sampling=sampling,
            output_token_ids=tuple(self.output_ids),
            cache_salt=request.options.cache_salt,
            sample_index=self.sample_index,
            fork_ids=fork_ids,
            caller_id=request.caller_id,
            may_refuse=may_refuse,
            adapter=request.adapter,
        )

    def note(self, output: EngineOutput, *, is_of_prefill: bool) -> None:
        """Keep what an output has beside its tokens. Terminal events are stamped by the gateway."""
        if output.stamps:
            self.timeline += [stamp for stamp in output.stamps if stamp.event not in TERMINAL]
        if output.cached_tokens is not None and is_of_prefill:
            self._cached_tokens = min(output.cached_tokens, len(self.request.prompt_token_ids))
        if output.transfer is not None:
            self.transfer = output.transfer

    def next(self, index: int, token_id: int) -> bool:
        """Send one token of a text without stop strings; False: the client reads too slowly."""
        self.output_ids.append(token_id)
        text = self.text.next(token_id)
        return self.sink.emit(OutputChunk(text, (token_id,), index, None, self.sample_index))

    def add(self, tokens: list[OutputToken]) -> OutputChunk:
        """Add the next tokens. Returns the chunk for the sink or `finish`: up to the end of the
        first stop string, if there is one."""
        text, num_tokens, stop = self.text.feed([token_id for token_id, _ in tokens])
        shown, index = tokens[:num_tokens], len(self.output_ids)
        token_ids = tuple([token_id for token_id, _ in shown])
        self.output_ids += token_ids
        logprobs = tuple([logprobs for _, logprobs in shown if logprobs is not None])
        chunk = OutputChunk(text, token_ids, index, None, self.sample_index, logprobs)
        if self.prompt_scores is not None and shown and not index:
            chunk.prompt_logprobs = self.prompt_scores.all()
        self.matched_stop = stop
        return chunk

    def finish(
        self, reason: FinishReason, chunk: OutputChunk, nodes: tuple[str, str | None], attempts: int
    ) -> None:
        """Send the last chunk, with the result. `nodes`: of the prompt, and of the decode."""
        if self.prompt_scores is not None and not self.output_ids:
            chunk.prompt_logprobs = self.prompt_scores.all()
        if self.matched_stop is None:
            chunk.text += self.text.flush()
            ids = self.request.sampling.stop_token_ids
            self.matched_stop = next((i for i in self.output_ids[-1:] if i in ids), None)
        chunk.result = RequestResult(
            finish_reason=reason,
            matched_stop=self.matched_stop,
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=len(self.output_ids),
            cached_tokens=self._cached_tokens,
            prefill_node=nodes[0],
            decode_node=nodes[1],
            transfer=self.transfer,
            attempts=attempts,
            seed=self.request.sampling.seed,
            timeline=tuple(self.timeline),
        )
        self.sink.emit(chunk)
