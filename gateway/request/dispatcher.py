"""Sends a request's attempts to their engines."""

from __future__ import annotations

from dataclasses import replace

from ...core.ports import Clock, Entropy
from ...core.request.request import Request, SamplingParams, Ticket
from ..validation.validation import ValidatedRequest
from .answer import Answer
from .attempt import Attempt
from .engine_link import EngineLink, Work


class Dispatcher:
    """Of one session; each attempt goes on behind the tokens that `answer` has."""

    def __init__(
        self,
        request_id: str,
        request: ValidatedRequest,
        sample_index: int,
        answer: Answer,
        clock: Clock,
        entropy: Entropy,
        deadline_s: float,
    ) -> None:
        self.request_id = request_id
        self._request = request
        self._sample_index = sample_index
        self._answer = answer
        self._clock = clock
        self._entropy = entropy
        self._deadline_s = deadline_s

    def send(self, attempt: Attempt, fork_ids: tuple[str, ...], *, may_refuse: bool) -> None:
        """To its two engines, or to the one."""
        prefill, decode = attempt.route.prefill, attempt.route.decode
        request = self._engine_request(attempt, fork_ids, may_refuse=may_refuse)
        remaining_s = self._deadline_s - self._clock.monotonic_s()
        if attempt.route.is_local:
            decode.dispatch(request, Work.LOCAL, None, remaining_s)
            return
        ticket = Ticket(self._entropy.new_id(), prefill.incarnation, decode.incarnation)
        prefill.dispatch(request, Work.PREFILL, ticket, remaining_s)
        decode.dispatch(request, Work.DECODE, ticket, remaining_s)

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
            output_token_ids=tuple(self._answer.output_ids),
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
        if self._sample_index or self._answer.prompt_scores.is_complete:
            return replace(sampling, prompt_logprobs=None)
        return sampling
