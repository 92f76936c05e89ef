"""One dispatch of a request to a pair of engines, or to one that does all: how it is sent, whose
messages are due, and what doubt there is.

A *doubt* is a state that one of the engines must clear up soon: who is right becomes known by the
next message of the other, or, after a fixed time, the attempt counts as failed.

    the prefill engine is gone, its token is here   the decode engine may have all KV already
    the decode engine sends "cancelled"             the prefill engine ended the request itself?
    the last token is here, an earlier one is not   it is under way on the other stream, as may be
                                                    the scores of a search's prompt
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...core.errors import BatonError, Cancelled, EngineFailed, HandoffFailed
from ...core.ports import Clock, Entropy
from ...core.request.request import FinishReason, Request, SamplingParams, Ticket, TokenLogprobs
from ...core.request.timeline import Event
from ..validation.validation import ValidatedRequest
from .engine_link import EngineLink, EngineOutput, Route, Work
from .output_chunk import PromptScores, TokenSplice

OutputToken: TypeAlias = tuple[int, TokenLogprobs | None]  # the second if it was requested

_DOUBT_S = 0.25
_AFTER_HANDOFF = frozenset({Event.TRANSFER_ENDED, Event.DECODE_STARTED})


class Attempt:
    """Owned by its session. `base_index`: how many tokens were streamed before it. `is_search`: of
    beams, whose tokens all come from the decode engine, at the end; `scores` are the prompt's that
    go in front of these, if any are wanted."""

    def __init__(
        self,
        number: int,
        route: Route,
        base_index: int,
        max_tokens: int,
        *,
        is_search: bool = False,
        scores: PromptScores | None = None,
    ) -> None:
        self.number = number
        self._is_search, self._scores = is_search, scores
        self._behind_scores: list[OutputToken] = []  # tokens that wait for them
        self.route = route
        self.pair = (route.prefill.incarnation, route.decode.incarnation)
        self.is_handed_over = route.is_local  # nothing is to be
        self.finish_reason: FinishReason | None = None
        self.doubt: BatonError | None = None
        self.doubt_until_s = math.inf
        self.base_index = base_index
        self._splice: TokenSplice[OutputToken] = TokenSplice(base_index, max_tokens)
        self._total: int | None = None
        self._holders = {link.incarnation: link for link in (route.prefill, route.decode)}

    def expects(self, incarnation: str, attempt: int) -> bool:
        """Whether a message belongs to this attempt."""
        return attempt == self.number and incarnation in self.pair

    def name_of(self, incarnation: str) -> str:
        prefill, decode = self.route.prefill, self.route.decode
        return prefill.name if incarnation == prefill.incarnation else decode.name

    def partner_of(self, incarnation: str) -> EngineLink:
        """The other engine of the pair; itself where there is but one."""
        return self.route.decode if incarnation == self.pair[0] else self.route.prefill

    @property
    def is_decoding(self) -> bool:
        """Whether the second engine, or the one, goes on by itself; nothing is in doubt."""
        return self.is_handed_over and self._total is None and self.doubt is None

    @property
    def is_complete(self) -> bool:
        """The last position is known and all up to it is here, in order."""
        has_all = self._total is not None and self._splice.next_index >= self._total
        return has_all and not self._lacks_scores

    @property
    def _lacks_scores(self) -> bool:
        return self._scores is not None and not self._scores.is_complete

    @property
    def _has_first_token(self) -> bool:
        if self._is_search:
            return self.is_handed_over and not self._lacks_scores
        return self._splice.next_index > self.base_index

    def add(self, output: EngineOutput, *, now_s: float) -> list[OutputToken]:
        """Take an output's tokens; return those now in order. Raises EngineFailed on nonsense."""
        logprobs = output.logprobs or (None,) * len(output.token_ids)
        if len(logprobs) != len(output.token_ids):
            raise EngineFailed("an engine sent tokens and log-probabilities that do not match")
        pairs = [*zip(output.token_ids, logprobs)]  # noqa: B905 (just checked)
        tokens = self._splice.add(output.first_index, pairs)
        if output.finish_reason is not None and self._total is None:
            self.finish_reason = output.finish_reason
            self._total = output.first_index + len(output.token_ids)
            if not self.is_complete:
                what = "a score" if self._lacks_scores else f"token {self._splice.next_index}"
                self._begin_doubt(EngineFailed(f"{what} never came"), now_s)
        if self._lacks_scores:
            self._behind_scores += tokens
            return []
        held, self._behind_scores = self._behind_scores, []
        return held + tokens

    def takes_next(self, incarnation: str, number: int, index: int) -> bool:
        """Whether this is the usual token: in order, of the engine that decodes, not the last.

        Then it counts as taken.
        """
        return (
            number == self.number
            and self.is_handed_over
            and incarnation == self.pair[1]
            and self._total is None
            and self._splice.take_next(index)
        )

    def note_decode_progress(self, output: EngineOutput) -> None:
        """The decode engine's first sign of having all KV ends the prefill engine's part."""
        if self.is_handed_over:
            return
        has_kv = bool(output.token_ids) or output.finish_reason is not None
        if has_kv or any(stamp.event in _AFTER_HANDOFF for stamp in output.stamps):
            self.is_handed_over = True
            self._holders.pop(self.route.prefill.incarnation, None)
            self.doubt, self.doubt_until_s = None, math.inf

    def survives(self, incarnation: str, error: BatonError, *, now_s: float) -> bool:
        """Whether the attempt can go on without this engine, perhaps in doubt."""
        if incarnation == self.pair[0] and not self.route.is_local:
            if self._has_first_token and self.is_handed_over:
                return True
            if self._has_first_token and error.is_retryable and self._is_held_by_decode:
                self._begin_doubt(error, now_s)
                return True
            return False
        if self._total is not None:
            return True
        if isinstance(error, Cancelled) and not self.is_handed_over:
            self._begin_doubt(HandoffFailed("the decode node was told to stop waiting"), now_s)
            return True
        return False

    @property
    def _is_held_by_decode(self) -> bool:
        return self.route.decode.incarnation in self._holders

    def _begin_doubt(self, error: BatonError, now_s: float) -> None:
        self.doubt, self.doubt_until_s = error, now_s + _DOUBT_S

    def close(self, incarnation: str) -> None:
        """This engine holds nothing of the attempt any more."""
        self._holders.pop(incarnation, None)

    def cancel(self, request_id: str) -> None:
        """Send a Cancel to every engine that may still hold something."""
        for link in self._holders.values():
            link.cancel(request_id, self.number)
        self._holders.clear()


@dataclass(eq=False)
class Dispatcher:
    """Sends one session's attempts to their engines; each goes on behind `output_ids`, the tokens
    so far."""

    request_id: str
    _request: ValidatedRequest
    _sample_index: int
    _output_ids: Sequence[int]
    _prompt_scores: PromptScores
    _clock: Clock
    _entropy: Entropy
    _deadline_s: float

    def send(
        self,
        attempt: Attempt,
        fork_ids: tuple[str, ...],
        *,
        may_refuse: bool,
        tried_on: str | None = None,
    ) -> None:
        """To its two engines, or to the one. `tried_on`: where it is on trial, if it is."""
        request = self._engine_request(attempt, fork_ids, may_refuse=may_refuse)
        remaining_s = self._deadline_s - self._clock.monotonic_s()

        def dispatch(link: EngineLink, work: Work, ticket: Ticket | None) -> None:
            is_on_trial = link.incarnation == tried_on
            asked = replace(request, is_on_trial=True) if is_on_trial else request
            link.dispatch(asked, work, ticket, remaining_s)

        prefill, decode = attempt.route.prefill, attempt.route.decode
        if attempt.route.is_local:
            dispatch(decode, Work.LOCAL, None)
            return
        ticket = Ticket(self._entropy.new_id(), prefill.incarnation, decode.incarnation)
        dispatch(prefill, Work.PREFILL, ticket)
        dispatch(decode, Work.DECODE, ticket)

    def send_move(self, attempt: Attempt, link: EngineLink) -> None:
        """To the engine that it moves to."""
        request = self._engine_request(attempt, (), may_refuse=True)
        remaining_s = self._deadline_s - self._clock.monotonic_s()
        link.dispatch(request, Work.LOCAL, None, remaining_s)

    def _engine_request(
        self, attempt: Attempt, fork_ids: tuple[str, ...], *, may_refuse: bool
    ) -> Request:
        return Request(
            request_id=self.request_id,
            attempt=attempt.number,
            prompt_token_ids=self._request.prompt_token_ids,
            sampling=self._wanted_sampling(),
            output_token_ids=tuple(self._output_ids),
            cache_salt=self._request.options.cache_salt,
            sample_index=self._sample_index,
            fork_ids=fork_ids,
            caller_id=self._request.caller_id,
            may_refuse=may_refuse,
            adapter=self._request.adapter,
        )

    def _wanted_sampling(self) -> SamplingParams:
        """Without what is known already, or another sample's to request."""
        sampling = self._request.sampling
        if self._sample_index or self._prompt_scores.is_complete:
            return replace(sampling, prompt_logprobs=None)
        return sampling
