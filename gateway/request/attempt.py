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
from dataclasses import replace
from itertools import repeat

from ...core.errors import BatonError, Cancelled, EngineFailed, HandoffFailed
from ...core.ports import Entropy
from ...core.request.request import FinishReason, Ticket
from .answer import Answer
from .engine_link import EngineOutput, Route
from .output_chunk import OutputToken

_DOUBT_S = 0.25


class Attempt:
    """Owned by its session: it goes on where the answer is. Tokens are put in order by position:

            known already │ next_index
        0 1 2 3 4 5 6 7 8 │ 9  _  11        9 can go out; what has 11 is held until 10 comes
        └ doubles: dropped ┘
    `next_index` is the position that must come next. Two streams race: the decode engine's first
    token may overtake the prefill engine's. Of a search, of beams, all tokens come from the decode
    engine, at the end. What overtakes the prompt's scores, if these are wanted, is held likewise,
    and where `route.holds_first` a first token until its decode engine goes on.
    """

    def __init__(self, number: int, route: Route, answer: Answer, began_s: float) -> None:
        self.number = number
        self.began_s = began_s
        self.route = route
        self.pair = (route.prefill.incarnation, route.decode.incarnation)
        self.is_local = self.pair[0] == self.pair[1]  # no KV is handed off
        self.is_handed_over = self.is_local
        self.trial_side: int | None = None  # of the pair, where it is on trial
        self.finish_reason: FinishReason | None = None
        self.doubt: BatonError | None = None
        self.doubt_until_s = math.inf
        self.base_index = self.next_index = len(answer.output_ids)  # streamed before it
        self._answer = answer
        sampling = answer.request.sampling
        self._is_search = sampling.use_beam_search
        self._max_tokens = sampling.max_tokens
        self._held: dict[int, OutputToken] = {}  # that came before their turn, by position
        self._total: int | None = None
        self._holders = {link.incarnation: link for link in (route.prefill, route.decode)}

    def send(
        self,
        entropy: Entropy,
        deadline_remaining_s: float,
        fork_ids: tuple[str, ...] = (),
        *,
        may_refuse: bool,
    ) -> None:
        """To its two engines, or to the one."""
        asked = self._answer.rest(self.number, fork_ids, may_refuse=may_refuse)
        ticket = None if self.is_local else Ticket(entropy.new_id(), *self.pair)
        for side, link in enumerate(self._holders.values()):
            is_on_trial = side == self.trial_side or (self.is_local and self.trial_side is not None)
            request = replace(asked, is_on_trial=True) if is_on_trial else asked
            link.dispatch(request, self.route, ticket, deadline_remaining_s)

    def expects(self, incarnation: str, attempt: int) -> bool:
        """Whether a message belongs to this attempt."""
        return attempt == self.number and incarnation in self.pair

    @property
    def is_decoding(self) -> bool:
        """Whether the second engine, or the one, goes on by itself; nothing is in doubt."""
        return self.is_handed_over and self._total is None and self.doubt is None

    @property
    def is_complete(self) -> bool:
        """The last position is known and all up to it is here, in order."""
        has_all = self._total is not None and self.next_index >= self._total
        return has_all and not self._answer.lacks_scores

    @property
    def _holds_first(self) -> bool:
        """Until the decode engine goes on, or nothing is to follow."""
        return self.route.holds_first and not self.is_handed_over and self._total is None

    @property
    def has_tokens(self) -> bool:
        """Whether it has brought any: a search's come at its end."""
        return self.reaches(self.base_index + 1)

    def reaches(self, num_outputs: int) -> bool:
        """Whether so many are here, from the first one on, be it that the last of them waits."""
        return self.next_index + self._is_due >= num_outputs

    @property
    def _is_due(self) -> bool:
        """Whether what comes next is here."""
        return self.next_index in self._held

    @property
    def _has_first_token(self) -> bool:
        if self._is_search:
            return self.is_handed_over and not self._answer.lacks_scores
        return self.has_tokens

    def note(self, incarnation: str, output: EngineOutput) -> None:
        """Take note of what an output says beside its tokens."""
        self._answer.note(output, is_of_prefill=incarnation == self.pair[0])
        if not self.is_handed_over and incarnation == self.pair[1] and output.error is None:
            # The decode engine, which is silent until it has all KV: the other's part is over.
            self.is_handed_over = True
            self.close(self.pair[0])
            self.doubt, self.doubt_until_s = None, math.inf
        if output.finish_reason is not None:
            self.close(incarnation)

    def add(self, output: EngineOutput, *, now_s: float) -> list[OutputToken]:
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
        ends = output.finish_reason is not None and self._total is None
        if ends:
            self.finish_reason, self._total = output.finish_reason, end
        tokens: list[OutputToken] = []
        must_wait = self._answer.lacks_scores or self._holds_first
        while self._is_due and not must_wait:
            tokens.append(self._held.pop(self.next_index))
            self.next_index += 1
        if ends and not self.is_complete:
            what = "a score" if self._answer.lacks_scores else f"token {self.next_index}"
            self._begin_doubt(EngineFailed(f"{what} never came"), now_s)
        return tokens

    def takes_next(self, incarnation: str, number: int, index: int) -> bool:
        """Whether this is the usual token: in order, of the engine that decodes, not the last.

        Then it counts as taken.
        """
        is_its = number == self.number and incarnation == self.pair[1] and self.is_handed_over
        if not is_its or index != self.next_index or index >= self._max_tokens:
            return False
        if self._held or self._total is not None:
            return False
        self.next_index += 1
        return True

    def survives(self, incarnation: str, error: BatonError, *, now_s: float) -> bool:
        """Whether the attempt can go on without this engine, perhaps in doubt."""
        if incarnation == self.pair[0] and not self.is_local:
            if self._has_first_token and self.is_handed_over:
                return True
            if self._has_first_token and error.is_retryable and self.pair[1] in self._holders:
                self._begin_doubt(error, now_s)
                return True
            return False
        if self._total is not None:
            return True
        if isinstance(error, Cancelled) and not self.is_handed_over:
            self._begin_doubt(HandoffFailed("the decode node was told to stop waiting"), now_s)
            return True
        return False

    def _begin_doubt(self, error: BatonError, now_s: float) -> None:
        self.doubt, self.doubt_until_s = error, now_s + _DOUBT_S

    def close(self, incarnation: str) -> None:
        """This engine holds nothing of the attempt any more."""
        self._holders.pop(incarnation, None)

    def cancel(self) -> None:
        """Send a Cancel to every engine that may still hold something."""
        for link in self._holders.values():
            link.cancel(self._answer.request_id, self.number)
        self._holders.clear()
