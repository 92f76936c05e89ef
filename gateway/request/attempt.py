"""One dispatch of a request, to a prefill and a decode engine or to one engine for both: how it is
sent, whose outputs it accepts and in which order, and what is in doubt.

A *doubt* is a state that an output of one engine must resolve within a fixed time; else the attempt
has failed.

    the prefill engine is lost, its token is here   the decode engine may have all KV already
    the decode engine reports "cancelled"           the prefill engine ended the request itself?
    the last token is here, an earlier one is not   it is in transit on the other stream, as may be
                                                    the scores of a beam search's prompt
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import repeat

from ...core.errors import BatonError, EngineFailed
from ...core.ports import Entropy
from ...core.request.request import FinishReason, Ticket
from .engine_link import EngineOutput, Route
from .output_chunk import OutputToken
from .session_output import SessionOutput

_DOUBT_S = 0.25


class Attempt:
    """Owned by its session; it starts behind the tokens so far. Tokens are ordered by position:

            streamed or passed on  │ next_index
        0 1 2 3 4 5 6 7 8          │ 9  _  11    9 is passed on; 11 is held until 10 arrives
        └ duplicates are dropped ┘
    Two streams race: the decode engine's first token may overtake the prefill engine's. All tokens
    of a beam search come from the decode engine, at the end. Tokens that overtake the requested
    scores of the prompt are held likewise, and with `route.holds_first` the first token until the
    decode engine has started.

    `holders`: the engines that may still hold something of it, by incarnation.
    """

    def __init__(self, number: int, route: Route, answer: SessionOutput) -> None:
        self.number = number
        self.began_s = answer.clock.monotonic_s()
        self.route = route
        self.pair = (route.prefill.incarnation, route.decode.incarnation)
        self.is_local = self.pair[0] == self.pair[1]  # no KV is handed off
        self.is_handed_over = self.is_local
        self.on_trial: str | None = None  # the engine of the pair where the request is on trial
        self.finish_reason: FinishReason | None = None
        self.doubt: BatonError | None = None
        self.doubt_until_s = math.inf
        self.base_index = self.next_index = len(answer.output_ids)  # streamed before it
        self.holders = {link.incarnation: link for link in (route.prefill, route.decode)}
        self._answer = answer
        self._max_tokens = answer.request.sampling.max_tokens
        self._held: dict[int, OutputToken] = {}  # that came before their turn, by position
        self._end = math.inf  # the position behind the last token, known with the finish reason

    def send(
        self,
        entropy: Entropy,
        deadline_s: float,
        fork_ids: tuple[str, ...] = (),
        *,
        may_refuse: bool,
    ) -> None:
        """Dispatch to both engines, or to the one."""
        rest = self._answer.rest(self.number, fork_ids, may_refuse=may_refuse)
        remaining_s = deadline_s - self._answer.clock.monotonic_s()
        ticket = None if self.is_local else Ticket(entropy.new_id(), *self.pair)
        for incarnation, link in self.holders.items():
            is_on_trial = incarnation == self.on_trial
            request = replace(rest, is_on_trial=True) if is_on_trial else rest
            link.dispatch(request, self.route, ticket, remaining_s)

    def expects(self, incarnation: str, attempt: int) -> bool:
        """Whether an output belongs to this attempt."""
        return attempt == self.number and incarnation in self.pair

    @property
    def is_complete(self) -> bool:
        """The last position is known and all tokens up to it were passed on."""
        return self.next_index >= self._end and not self._answer.lacks_scores

    @property
    def _holds_first(self) -> bool:
        """Until the decode engine has started, or the first token is the last."""
        return self.route.holds_first and not self.is_handed_over and self.finish_reason is None

    @property
    def has_tokens(self) -> bool:
        """Whether its engines have sent any; those of a beam search come at its end."""
        return self.reaches(self.base_index + 1)

    def reaches(self, num_outputs: int) -> bool:
        """Whether the request has this many tokens, including one that is held."""
        return self.next_index + (self.next_index in self._held) >= num_outputs

    def note(self, incarnation: str, output: EngineOutput) -> None:
        """Record what an output reports beside its tokens."""
        self._answer.note(output, is_of_prefill=incarnation == self.pair[0])
        if not self.is_handed_over and incarnation == self.pair[1] and output.error is None:
            # The decode engine sends nothing until it has all KV: the prefill engine is done.
            self.is_handed_over = True
            self.close(self.pair[0])
            self.doubt, self.doubt_until_s = None, math.inf
        if output.finish_reason is not None:
            self.close(incarnation)

    def add(self, output: EngineOutput) -> list[OutputToken]:
        """Take an output's tokens; return those now in order. Raises EngineFailed on nonsense."""
        if output.prompt_logprobs:
            if (scores := self._answer.prompt_scores) is None:
                raise EngineFailed("an engine sent log-probabilities that were not requested")
            scores.add(output.first_prompt_index, output.prompt_logprobs)
        token_ids, end = output.token_ids, output.first_index + len(output.token_ids)
        if output.logprobs and len(output.logprobs) != len(token_ids):
            raise EngineFailed("an engine sent tokens and log-probabilities that do not match")
        if token_ids and end > self._max_tokens:
            raise EngineFailed(f"an engine sent token {end - 1} of at most {self._max_tokens}")
        found = zip(token_ids, output.logprobs or repeat(None), strict=False)
        for index, token in enumerate(found, output.first_index):
            if index >= self.next_index:
                self._held.setdefault(index, token)
        ends = output.finish_reason is not None and self.finish_reason is None
        if ends:
            self.finish_reason, self._end = output.finish_reason, end
        tokens: list[OutputToken] = []
        must_wait = self._answer.lacks_scores or self._holds_first
        while self.next_index in self._held and not must_wait:
            tokens.append(self._held.pop(self.next_index))
            self.next_index += 1
        if ends and not self.is_complete:
            what = "a score" if self._answer.lacks_scores else f"token {self.next_index}"
            self.begin_doubt(EngineFailed(f"{what} was never received"))
        return tokens

    def takes_next(self, incarnation: str, number: int, index: int) -> bool:
        """Whether this is the usual token: in order, of the engine that decodes, not the last.

        If so, it counts as passed on.
        """
        if (
            number != self.number
            or incarnation != self.pair[1]
            or not self.is_handed_over
            or index != self.next_index
            or index >= self._max_tokens
            or self._held
            or self.finish_reason is not None
        ):
            return False
        self.next_index += 1
        return True

    def begin_doubt(self, error: BatonError) -> None:
        """`error` is what the attempt fails with if nothing resolves the doubt."""
        self.doubt, self.doubt_until_s = error, self._answer.clock.monotonic_s() + _DOUBT_S

    def close(self, incarnation: str) -> None:
        """This engine holds nothing of the attempt any more."""
        self.holders.pop(incarnation, None)

    def cancel(self) -> None:
        """Send a Cancel to every engine that may still hold something."""
        for link in self.holders.values():
            link.cancel(self._answer.request_id, self.number)
        self.holders.clear()
