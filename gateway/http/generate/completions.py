"""POST /v1/completions: continues one or several prompts, each of them a text or token ids."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from ....core.errors import InvalidRequest
from ....core.request.json_fields import BOOLEAN, STRING, TOKEN_IDS, FieldKind, invalid, list_of
from ....core.request.request import TokenLogprobs
from ....core.request.token_ids import pack
from ....proto.v1 import inference_pb2
from ...admission.running_call import RunningCall
from ...request.output_chunk import OutputChunk
from ...text.token_text import TokenText
from ..protocol.answers import Completion, CompletionChoice, CompletionLogprobs, json_text
from ..protocol.app_state import APP_STATE
from ..protocol.event_stream import TextEventTemplate
from .generated_answer import GeneratedAnswer, Sample, TokenOf, prompt_logprobs
from .request_fields import COMMON, LOGPROBS, MAX_TOKENS, Body, generate_request
from .structured import constraint_of

ROUTES = web.RouteTableDef()

MAX_PROMPTS = 64

Prompt = str | list[int]


def _prompts(value: Any, name: str) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid(name, "a text, token ids, or a list of either")
    if not value:
        raise InvalidRequest(f"{name} is empty", name, "empty_prompt")
    if not isinstance(value[0], str | list):
        return [TOKEN_IDS.read(value, name)]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"{name} has more than {MAX_PROMPTS} prompts", name, "array_too_long")
    if isinstance(value[0], str):
        return [_text(item, f"{name}[{i}]") for i, item in enumerate(value)]
    return [TOKEN_IDS.read(item, f"{name}[{i}]") for i, item in enumerate(value)]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise invalid(name, "a text, like the first of the list")
    return value


_TEXT = STRING.within(minLength=1)
_IDS = TOKEN_IDS.within(minItems=1)
PROMPTS = FieldKind(
    {
        "anyOf": [
            _TEXT.schema,
            _IDS.schema,
            *(list_of(one, MAX_PROMPTS).within(minItems=1).schema for one in (_TEXT, _IDS)),
        ]
    },
    _prompts,
)

_FIELDS = {"prompt": PROMPTS, "max_tokens": MAX_TOKENS, "logprobs": LOGPROBS, "echo": BOOLEAN}
BODY = Body({**COMMON, **_FIELDS}, ("model", "prompt"))
_DEFAULT_MAX_TOKENS = 16
_MAX_CHOICES = 128


@ROUTES.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    """Continue a prompt, or each of several."""
    return await _Completions(request, await BODY.read(request)).run()


@dataclass(slots=True)
class EchoedPrompt:
    """A prompt that may be echoed; `scores` are set from its first sample's first chunk."""

    text: str
    token_ids: Sequence[int]
    scores: tuple[TokenLogprobs, ...] = ()


class CompletionSample(Sample):
    """One sample of one prompt: the same object in a stream and in a whole answer."""

    def __init__(
        self, index: int, found: Mapping[str, Any], prompt: EchoedPrompt, token_of: TokenOf
    ) -> None:
        super().__init__(index, found, token_of)
        self._found = found
        self._prompt = prompt
        self._shows_special = not found.get("skip_special_tokens", True)
        has_scores = "logprobs" in found or "prompt_logprobs" in found
        if not (found.get("echo") or self._returns_ids or has_scores):
            self.text_event = TextEventTemplate(
                f'{{"index":{index},"text":', ',"logprobs":null,"finish_reason":null}'
            )

    def events(self, chunk: OutputChunk) -> list[str]:
        """The JSON object for a chunk; none while its text is held back."""
        if self.text_event is not None and chunk.result is None:
            return [self.text_event.of(chunk.text)] if chunk.text else []
        return [json_text(self.choice(chunk))]

    def choice(self, chunk: OutputChunk) -> CompletionChoice:
        """The object for a chunk, which may be the whole sample."""
        found, result, prompt = self._found, chunk.result, self._prompt
        is_first, self._is_first = self._is_first, False
        echoed = prompt if is_first and found.get("echo") else None
        text = (echoed.text if echoed else "") + chunk.text
        if is_first:
            self._offsets = TextOffsets(text)
        choice = CompletionChoice(
            index=self._index,
            text=text,
            logprobs=self._logprobs(chunk, echoed) if "logprobs" in found else None,
            finish_reason=None if result is None else result.finish_reason.value,
            stop_reason=None if result is None else result.matched_stop,
        )
        if self._returns_ids:
            choice.token_ids = chunk.token_ids
            if is_first:
                choice.prompt_token_ids = list(prompt.token_ids)
        if "prompt_logprobs" in found and is_first:
            scores = prompt_logprobs(prompt.token_ids, prompt.scores, self._token_of)
            choice.prompt_logprobs = scores
        return choice

    def _logprobs(self, chunk: OutputChunk, echoed: EchoedPrompt | None) -> CompletionLogprobs:
        ids: list[int] = []
        scores: list[TokenLogprobs | None] = []
        if echoed is not None:
            ids, scores = list(echoed.token_ids), [None, *echoed.scores]
        offsets = [self._offsets.of(self._token_of(token_id)) for token_id in ids]
        offsets += [
            self._offsets.of(self._token_of(token_id), shows_special=self._shows_special)
            for token_id in chunk.token_ids
        ]
        ids, scores = [*ids, *chunk.token_ids], [*scores, *chunk.logprobs]
        return completion_logprobs(ids, scores, self._token_of, offsets)


class TextOffsets:
    """Where tokens begin in the text, in characters. A character of several tokens begins with the
    first of them and ends with the last; a token that the text omits has no length.

    `text`: the known beginning of the text. A text prompt is as the client wrote it: with special
    tokens, and without the blank that many vocabularies put before the first word.
    """

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = True  # whether the next word is the first, also after a special token

    def of(self, token: TokenText, *, shows_special: bool = False) -> int:
        """The offset of the next token; `shows_special`: the text contains its special tokens."""
        is_left_out = token.is_hidden or (token.is_special and not shows_special)
        if is_left_out and not self._text.startswith(token.text, self._at):
            data = b""
        else:
            data = self._without_added(token.data) if self._is_first else token.data
            self._is_first = token.is_special or (self._is_first and not data.strip(b" "))
        pending, _ = self._decoder.getstate()
        is_cut = bool(pending and data) and data[0] & 0xC0 != 0x80  # never completed
        begin = self._at + is_cut
        self._at += len(self._decoder.decode(data))
        return begin

    def _without_added(self, data: bytes) -> bytes:
        num_blanks = len(data) - len(data.lstrip(b" "))
        known = self._text[self._at : self._at + num_blanks]
        num_known = len(known) - len(known.lstrip(" "))
        return data if num_known == len(known) else data[num_blanks - num_known :]


def completion_logprobs(
    token_ids: Sequence[int],
    scores: Sequence[TokenLogprobs | None],
    token_of: TokenOf,
    offsets: list[int],
) -> CompletionLogprobs:
    """The log-probabilities of /v1/completions; the first token of a prompt has none.

    `top_logprobs` have the token itself beside the likeliest, and tokens of equal names once.
    """
    tokens = [token_of(token_id) for token_id in token_ids]
    return CompletionLogprobs(
        tokens=[token.name for token in tokens],
        token_logprobs=[None if score is None else score.logprob for score in scores],
        top_logprobs=[
            None if score is None else _by_text(token.name, score, token_of)
            for token, score in zip(tokens, scores, strict=True)
        ],
        text_offset=offsets,
    )


def _by_text(token: str, score: TokenLogprobs, token_of: TokenOf) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in score.top:  # of equal names, the likeliest stays
        found.setdefault(token_of(token_id).name, logprob)
    found.setdefault(token, score.logprob)
    return found


class _Completions(GeneratedAnswer):
    id_prefix = "cmpl-"
    answer_type = chunk_type = Completion

    def __init__(self, request: web.Request, found: Mapping[str, Any]) -> None:
        self._texts = found["prompt"]
        constraint, constrained_by = constraint_of(found)
        super().__init__(request, found)
        self._found = found
        self._echoes = found.get("echo", False)
        self._check()
        self.names = {"constraint": constrained_by}
        sampling = {"max_tokens": _DEFAULT_MAX_TOKENS} | constraint
        sampling |= {name: found[name] for name in ("max_tokens", "logprobs") if name in found}
        if "logprobs" in found and self._echoes and "prompt_logprobs" not in found:
            sampling["prompt_logprobs"] = found["logprobs"]
            self.names["prompt_logprobs"] = "logprobs"
        self.prompts = [
            generate_request(found, sampling, request_id=self.label, **_prompt(text))
            for text in self._texts
        ]
        self._prompts: list[EchoedPrompt] = []

    def _check(self) -> None:
        """Refuse combinations of fields that are each valid."""
        if self.num_samples * len(self._texts) > _MAX_CHOICES:
            message = f"prompts times n are more than {_MAX_CHOICES}"
            raise InvalidRequest(message, "n", "invalid_value")
        scores_prompt = self._echoes and "logprobs" in self._found
        if self.is_stream and scores_prompt and self.num_samples > 1:
            message = "echo with logprobs streams one sample of a prompt"
            raise InvalidRequest(message, "n", "invalid_value")

    def names_of(self, prompt_index: int) -> Mapping[str, str]:
        name = "prompt" if len(self._texts) == 1 else f"prompt[{prompt_index}]"
        return {"prompt": name, **self.names}

    async def samples(self, calls: Sequence[RunningCall]) -> Sequence[Sample]:
        tokenizer = self.app[APP_STATE].door.model.tokenizer
        for text, call in zip(self._texts, calls, strict=True):
            shown = text if self._echoes else ""
            if not isinstance(shown, str):
                shown = await tokenizer.decode(shown)
            self._prompts.append(EchoedPrompt(shown, call.record.request.prompt_token_ids))
        return [
            CompletionSample(
                place * self.num_samples + sample, self._found, prompt, tokenizer.token
            )
            for place, prompt in enumerate(self._prompts)
            for sample in range(self.num_samples)
        ]

    def first_chunk(self, prompt_index: int, chunk: OutputChunk) -> None:
        self._prompts[prompt_index].scores = chunk.prompt_logprobs


def _prompt(prompt: Prompt) -> Mapping[str, Any]:
    """The prompt's field of a GenerateRequest."""
    if isinstance(prompt, str):
        return {"text": prompt}
    return {"token_ids": inference_pb2.TokenIds(packed=pack(prompt))}
