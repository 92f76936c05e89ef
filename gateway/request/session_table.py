"""All sessions of a gateway, by id: passes on to them the outputs of engines, lost engines and
timers. Also makes the sessions of a call.

A session is dispatched when it starts if no other one waits; else it waits for its turn, as does a
session that finds no place (dispatch_queue.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from ...core.errors import BatonError, Cancelled, Overloaded
from ...core.ports import Clock, Entropy
from ..text.no_tokenizer import NoTokenizer
from ..text.tokenizer import Tokenizer
from ..validation.validation import ValidatedRequest
from .best_of import best_of
from .dispatch_queue import DispatchQueue
from .engine_link import EngineOutput, PlainToken
from .output_chunk import ChunkSink
from .session import Session
from .session_output import SessionOutput
from .setbacks import engine_lost

log = logging.getLogger(__name__)

_RESERVED_SHARE = 8  # one part in so many


class SessionTable:
    """Use from one event loop. A session is in the table from `start` to its end; if it raises (our
    own bug), it fails alone.

    Owns the sessions' only timers, and the limit on requests in flight. The last eighth of that
    limit is for callers with less than their share of it, so that no caller can lock out others.
    `is_idle`: set while no request is in flight.
    """

    def __init__(
        self, clock: Clock, max_num_requests: int, queue: DispatchQueue | None = None
    ) -> None:
        self.queue = DispatchQueue() if queue is None else queue
        self._clock = clock
        self._max_num_requests = max_num_requests
        self._sessions: dict[str, Session] = {}
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}
        self._admitted: Counter[int] = Counter()  # requests in flight by caller
        self.is_idle = asyncio.Event()
        self.is_idle.set()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, request_id: str) -> Session | None:
        return self._sessions.get(request_id)

    def admit(self, caller_id: int = 0) -> None:
        """Count one more request in flight; raises Overloaded at the limit. Pair with `leave`."""
        total, most = self._admitted.total(), self._max_num_requests
        if total >= most - most // _RESERVED_SHARE:
            share = max(1, most // (1 + len(self._admitted)))
            if total >= most or self._admitted[caller_id] >= share:
                raise Overloaded(
                    f"{total} requests are in flight, {self._admitted[caller_id]} of this caller; "
                    "try again later"
                )
        self._admitted[caller_id] += 1
        self.is_idle.clear()

    def leave(self, caller_id: int = 0) -> None:
        """The call of an admitted request is over."""
        self._admitted[caller_id] -= 1
        if not self._admitted[caller_id]:
            del self._admitted[caller_id]
        if not self._admitted:
            self.is_idle.set()

    def start(self, session: Session) -> None:
        """Add a session; dispatch it at once if there is a place and no other session waits."""
        self._sessions[session.request_id] = session
        if not self.queue.shares:
            self.queue.released.clear()  # no session waits for what became free
        elif session.is_waiting:
            self.queue.add(session)
            self._arm(session)
            self._dispatch_waiting()
            return
        self._do(session, session.try_dispatch)
        self._dispatch_due()

    def engine_step(
        self,
        incarnation: str,
        outputs: Iterable[EngineOutput],
        tokens: Iterable[PlainToken] = (),
    ) -> None:
        """Pass on the outputs of one step of an engine; those of ended requests are dropped.

        First tokens and ends are in `outputs` and go first: the plain tokens of many decodes take
        milliseconds. Most of these are the next token of their session, which has a fast path.
        """
        for output in outputs:
            if session := self._sessions.get(output.request_id):
                self._do(session, session.engine_output, incarnation, output)
        sessions = self._sessions
        for request_id, attempt, index, token_id in tokens:
            if (session := sessions.get(request_id)) is None:
                continue
            try:
                was_taken = session.next_token(incarnation, attempt, index, token_id)
            except Exception:  # as in `_do`, which ends the session
                log.exception("request %s failed by a bug", request_id)
                self.cancel(session, BatonError("internal error"))
                continue
            if not was_taken:
                output = EngineOutput(request_id, attempt, index, (token_id,))
                self._do(session, session.engine_output, incarnation, output)
            elif session.is_over:
                self._forget(session)
        self._dispatch_due()

    def engine_lost(self, incarnation: str, *, has_died: bool) -> None:
        for session in list(self._sessions.values()):
            self._do(session, partial(engine_lost, session, incarnation, has_died=has_died))

    def cluster_changed(self, *, is_load_only: bool = False) -> None:
        """Waiting sessions may find a place now."""
        if not is_load_only:
            self.queue.retry_stranded()
        self._dispatch_waiting()

    def cancel(self, session: Session, error: BatonError) -> None:
        """End a session early, if it is not over."""
        self.act(session, session.cancel, error)

    def act(self, session: Session, call: Callable[..., None], *arguments: object) -> None:
        """Run a call of a session, then dispatch the sessions for which that made a place."""
        self._do(session, call, *arguments)
        self._dispatch_due()

    def end_all(self, error: BatonError) -> None:
        """End every session with the error. No waiting session is dispatched."""
        for session in list(self._sessions.values()):
            self._do(session, session.cancel, error)

    def abort(self, names: Iterable[str], tenant: str | None = None) -> int:
        """Cancel calls by gateway id or caller's label, only those of `tenant` if it is given.
        Returns how many were in flight."""
        wanted = set(names) - {""}
        found = [
            session
            for session in self._sessions.values()
            if (session.call_id in wanted or session.request.label in wanted)
            and tenant in (None, session.request.tenant)
        ]
        for session in found:
            self._do(session, session.cancel, Cancelled("aborted"))
        self._dispatch_due()
        return len({session.call_id for session in found})

    def _dispatch_due(self) -> None:
        if self.queue.shares and self.queue.is_due:
            self._dispatch_waiting()

    def _dispatch_waiting(self) -> None:
        self.queue.advance(lambda session: self._do(session, session.try_dispatch))

    def _do(self, session: Session, call: Callable[..., None], *arguments: object) -> None:
        """Run a call of a session, then note its end or its next wake-up."""
        try:
            call(*arguments)
        except Exception:  # one session's bug must not end the stream that feeds all of them
            log.exception("request %s failed by a bug", session.request_id)
            session.cancel(BatonError("internal error"))
        if session.is_over:
            self._forget(session)
        else:
            self._arm(session)
            if self.queue.shares or session.is_waiting:
                self.queue.follow(session)

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.request_id, None)
        if self.queue.shares:
            self.queue.remove(session)
        if timer := self._timers.pop(session.request_id, None):
            timer[1].cancel()

    def _arm(self, session: Session) -> None:
        """Set the session's only timer to its next wake-up."""
        due_s = session.next_wakeup_s
        if (timer := self._timers.get(session.request_id)) is not None:
            if timer[0] == due_s:
                return
            timer[1].cancel()
        delay_s = max(0.0, due_s - self._clock.monotonic_s())
        handle = asyncio.get_running_loop().call_later(delay_s, self._wake, session)
        self._timers[session.request_id] = (due_s, handle)

    def _wake(self, session: Session) -> None:
        self._timers.pop(session.request_id, None)
        self.act(session, session.tick)


def sessions_of(
    request: ValidatedRequest,
    tokenizer: Tokenizer | NoTokenizer,
    sink: ChunkSink,
    clock: Clock,
    entropy: Entropy,
    *,
    arrived_unix_ns: int,
    **for_all: Any,
) -> list[Session]:
    """One for each sample of a call; the first dispatches for all. `for_all`: see Session."""
    if request.num_samples > request.options.n:  # only the best of them are returned
        request, sink = best_of(request, sink)
    skips = request.options.skip_special_tokens

    def session(sample_index: int, siblings: Sequence[Session] = ()) -> Session:
        text = tokenizer.detokenizer(request.prompt_token_ids, skips_special_tokens=skips)
        answer = SessionOutput(
            entropy.new_id(), request, text.step, sink, clock, arrived_unix_ns, sample_index
        )
        return Session(answer, entropy=entropy, siblings=siblings, **for_all)

    siblings = [session(index) for index in range(1, request.num_samples)]
    return [session(0, siblings), *siblings]
