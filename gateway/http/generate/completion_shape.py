"""What /v1/completions writes for a sample: the same object in a stream and in a whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....core.request.logprobs import TokenLogprobs
from ...request.output_chunk import OutputChunk
from ..protocol.answers import CompletionChoice, CompletionLogprobs, json_text
from ..protocol.event_stream import TextEvent
from .logprobs import TokenOf, completion_logprobs, prompt_logprobs


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """What was asked for beside the text."""

    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False

    @property
    def is_plain(self) -> bool:
        """Text alone: most calls, so their chunks take a short way."""
        return self == CompletionOptions()


@dataclass(slots=True)
class EchoedPrompt:
    """A prompt that may be echoed; `scores` come with its first sample's first chunk."""

    text: str
    token_ids: Sequence[int]
    scores: tuple[TokenLogprobs, ...] = ()


class CompletionSample:
    """One sample of one prompt, chunk by chunk; `index` counts samples over all prompts."""

    def __init__(
        self, index: int, options: CompletionOptions, prompt: EchoedPrompt, token_of: TokenOf
    ) -> None:
        self._index = index
        self._options = options
        self._prompt = prompt
        self._token_of = token_of
        self._offset = 0
        self._is_first = True
        self.text_event: TextEvent | None = None
        if options.is_plain:
            self.text_event = TextEvent(
                f'{{"index":{index},"text":', ',"logprobs":null,"finish_reason":null}'
            )

    def events(self, chunk: OutputChunk) -> list[str]:
        """JSON of what a stream shows of this chunk: nothing while its text is held back."""
        if self.text_event is not None and chunk.result is None:
            return [self.text_event.of(chunk.text)] if chunk.text else []
        return [json_text(self.choice(chunk))]

    def choice(self, chunk: OutputChunk) -> CompletionChoice:
        """The object for a chunk, which may be the only one."""
        options, result, prompt = self._options, chunk.result, self._prompt
        is_first, self._is_first = self._is_first, False
        echoed = prompt if is_first and options.echo else None
        choice = CompletionChoice(
            index=self._index,
            text=(echoed.text if echoed else "") + chunk.text,
            logprobs=None if options.logprobs is None else self._logprobs(chunk, echoed),
            finish_reason=None if result is None else result.finish_reason.value,
            stop_reason=None if result is None else result.matched_stop,
        )
        if options.return_token_ids:
            choice.token_ids = chunk.token_ids
            if is_first:
                choice.prompt_token_ids = list(prompt.token_ids)
        if options.prompt_logprobs is not None and is_first:
            scores = prompt_logprobs(prompt.token_ids, prompt.scores, self._token_of)
            choice.prompt_logprobs = scores
        return choice

    def _logprobs(self, chunk: OutputChunk, echoed: EchoedPrompt | None) -> CompletionLogprobs:
        ids: list[int] = []
        scores: list[TokenLogprobs | None] = []
        if echoed is not None:
            ids, scores = list(echoed.token_ids), [None, *echoed.scores]
        ids, scores = [*ids, *chunk.token_ids], [*scores, *chunk.logprobs]
        shape = completion_logprobs(ids, scores, self._token_of, self._offset)
        self._offset += sum(len(self._token_of(i).text) for i in ids)
        return shape
