"""What one engine has to do, by its heartbeats and by what this gateway has open there: prompt
tokens that wait, and how long they take; places of decodes, and blocks for their KV.

    heartbeat: tokens that wait, by caller ─┬─ ours, sent and not answered ► others'
    since then: ours that were sent         │
                ours that were answered  ───┘  less what is computed by now, by the engine's own
                                               measured cost of a step
Only others' tokens rest on a heartbeat, which may be older than an answer: whatever of ours was
there since the heartbeat before counts as ours, so that nothing of ours is ever taken for others'.

    last heartbeat: requests of all gateways ─┬─ ours then ─ what others have there
                                              └─ + ours now: dispatched and not ended
Several gateways may take the same place between two heartbeats; the engine queues what is too much.
Blocks of what was sent since the heartbeat are taken off the room that it named: all that it is
expected to grow to, as the engine will judge it. A prompt is here from `sent_prompt` until it is
answered, a decode from `sent_decodes` until it has ended; an engine that does both has one of each.
Knows no request's tokens: only keys, how long they stay, and what they need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, KeysView, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ...core.errors import PromiseRefused
from ...core.ports import Clock
from ...core.step_cost import pairs_of
from ..request.engine_link import EngineOutput
from .prompts_in_flight import PromptsInFlight, SentPrompt
from .reported_load import OthersPrompts, PromptSpeed, ReportedLoad

Key: TypeAlias = tuple[str, int]  # request id, attempt

_DECAY = 0.95  # of the mean stay, at each new one
_UNKNOWN_AHEAD_TOKENS = 8192  # of one caller, at an engine whose cost is not known yet
_AHEAD_S = 0.5  # of one caller's prompts, and a step, are at an engine; what is more waits here


@dataclass(slots=True, eq=False)
class _Prompt:
    """One whose first token is not here. `keys`: of its samples that want it; `num_tokens`: as the
    engine counts them; `cached_tokens`: of them should be cached there, or fetched; `in_flight`:
    for others that begin like it."""

    keys: set[Key]
    caller_id: int
    sent_s: float
    num_tokens: int
    cached_tokens: int
    pairs: int  # of those to compute, as in core/step_cost.py
    in_flight: SentPrompt | None

    @property
    def uncached_tokens(self) -> int:
        return self.num_tokens - self.cached_tokens


class _Decode(NamedTuple):
    """One sequence that goes on there, perhaps behind its prompt."""

    caller_id: int
    sent_s: float


class EngineAccount:
    """One engine's. Times are monotonic seconds. `max_num_seqs` 0: the engine did not say, and all
    have a place.

    `prompts`, `released`: of all engines of a table. `released`: callers of which something ended,
    or was answered, so that what waits may find a place; whoever dispatches what waits clears it.
    `has_refused`: it sent something back for its promise since the last heartbeat.
    """

    def __init__(self, clock: Clock, max_num_seqs: int = 0) -> None:
        self.speed: PromptSpeed | None = None
        self.max_num_seqs = max_num_seqs
        self.released: set[int] = set()
        self.prompts = PromptsInFlight(clock)
        self.has_refused = False
        self._clock = clock
        self._prompts: dict[Key, _Prompt] = {}  # by each sample; ours, as all to the next comment
        self._decodes: dict[Key, _Decode] = {}
        self._own_tokens: Counter[int] = Counter()  # of prompts, to compute, by caller
        self._num_own_tokens = self._num_own_pairs = 0  # of all callers
        self._answered_tokens: Counter[int] = Counter()  # whole prompts since the last heartbeat
        self._begun_s = 0.0  # when the engine came to the first of them, if that was not sent later
        self._mean_stay_s: float | None = None  # of decodes
        # By heartbeat, as all below.
        self._load = ReportedLoad()
        self._step_began_s = 0.0
        self._others = OthersPrompts()
        self._num_others = 0  # requests
        self._room_blocks = 0  # beside all that the engine knew of then

    # --- what happens -----------------------------------------------------------------------------

    def heartbeat(self, load: ReportedLoad) -> None:
        before, self._load = self._load, load
        has_as_much = 0 < before.waiting_tokens <= load.waiting_tokens
        if before.num_steps != load.num_steps or not has_as_much:
            self._step_began_s = self._clock.monotonic_s()
        self.speed, self.has_refused = load.prompt_speed, False
        ours = self._answered_tokens.copy()  # the engine may not have known that they were
        for sent in set(self._prompts.values()):
            ours[sent.caller_id] += sent.num_tokens
        self._others = load.others_than(ours)
        self._answered_tokens.clear()
        self._num_others = max(0, load.num_requests - len(self._decodes))
        self._room_blocks = load.room_blocks

    def sent_prompt(
        self,
        keys: Collection[Key],
        caller_id: int,
        num_tokens: int,
        cached_tokens: int,
        in_flight: SentPrompt | None = None,
    ) -> None:
        """A prompt of one or several samples is to be computed, of which so much should be cached
        there."""
        uncached_tokens, now_s = num_tokens - cached_tokens, self._clock.monotonic_s()
        pairs = pairs_of(uncached_tokens, cached_tokens)
        prompt = _Prompt({*keys}, caller_id, now_s, num_tokens, cached_tokens, pairs, in_flight)
        self._prompts |= dict.fromkeys(keys, prompt)
        self._own_tokens[caller_id] += uncached_tokens
        self._num_own_tokens += uncached_tokens
        self._num_own_pairs += pairs

    def sent_decodes(self, keys: Iterable[Key], caller_id: int, num_blocks: int) -> None:
        """One or several sequences of a prompt are to go on, which need so many blocks together."""
        self._decodes |= dict.fromkeys(keys, _Decode(caller_id, self._clock.monotonic_s()))
        self._room_blocks -= num_blocks

    def settle(self, outputs: Iterable[EngineOutput]) -> None:
        """Take note of what a step's outputs answer or end; its plain tokens do neither."""
        for output in outputs:
            key, error = (output.request_id, output.attempt), output.error
            self.has_refused |= isinstance(error, PromiseRefused)
            if (prompt := self._prompts.get(key)) is not None:
                if output.cached_tokens is not None:
                    self.prompts.num_index_hits += prompt.cached_tokens > 0
                    self.prompts.num_stale_hits += output.cached_tokens < prompt.cached_tokens
                # Beams' tokens come at their end, but that their prompt is computed is reported.
                if output.token_ids or (error is None and not output.prompt_logprobs):
                    self._close_prompt(prompt, is_computed=True)
            if output.finish_reason is not None or error is not None:
                self.ended(key)

    def ended(self, key: Key) -> None:
        """It finished, failed or was cancelled, perhaps before: others may have its place."""
        if (prompt := self._prompts.get(key)) is not None:
            if len(prompt.keys) == 1:
                self._close_prompt(prompt, is_computed=False)
            else:  # it is computed for the others
                prompt.keys.remove(key)
                del self._prompts[key]
        if (decode := self._decodes.pop(key, None)) is not None:
            stay_s = self._clock.monotonic_s() - decode.sent_s
            mean_s = stay_s if self._mean_stay_s is None else self._mean_stay_s
            self._mean_stay_s = _DECAY * mean_s + (1 - _DECAY) * stay_s
            self.released.add(decode.caller_id)

    def _close_prompt(self, prompt: _Prompt, *, is_computed: bool) -> None:
        """Its first token is here, or will not come."""
        if is_computed or prompt is next(iter(self._prompts.values())):
            self._begun_s = self._clock.monotonic_s()
        for key in prompt.keys:
            del self._prompts[key]
        self._answered_tokens[prompt.caller_id] += prompt.num_tokens
        self._own_tokens[prompt.caller_id] -= prompt.uncached_tokens
        self._num_own_tokens -= prompt.uncached_tokens
        self._num_own_pairs -= prompt.pairs
        if not self._own_tokens[prompt.caller_id]:
            del self._own_tokens[prompt.caller_id]
        if prompt.in_flight is not None:
            self.prompts.ended(prompt.in_flight, is_computed=is_computed)
        self.released.add(prompt.caller_id)

    # --- what follows -----------------------------------------------------------------------------

    def takes_more_of(self, caller_id: int) -> bool:
        """Whether another prompt of this caller would be computed soon.

        The engine's queue is fair, so others' prompts do not matter: one that has nothing there
        may always send.
        """
        own_tokens = self._own_tokens.get(caller_id, 0)
        if not own_tokens:
            return True
        limit, speed = _UNKNOWN_AHEAD_TOKENS, self.speed
        if speed is not None:
            limit = speed.tokens_in(_AHEAD_S + 2 * speed.step_s)
        return own_tokens < limit

    @property
    def has_no_prompt(self) -> bool:
        """Whether nobody's wait there, as far as we know: `fair_tokens_ahead` is 0."""
        return not (self._own_tokens or self._others.by_caller or self._others.unlisted)

    @property
    def unanswered(self) -> KeysView[Key]:
        """Of samples of prompts of ours that are there."""
        return self._prompts.keys()

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens that a new request would wait for: all gateways' by the last heartbeat, or
        ours, whichever is more, less what has been computed since the step on the device began. Two
        engines that compute a prompt each are not equals: one of them is done sooner. What they see
        counts as the tokens that take as long: of a long prompt it is most of the time."""
        load = self._load
        if not load.waiting_tokens and not self._prompts:
            return 0
        now_s = self._clock.monotonic_s()
        ahead = self._with_pairs(load.waiting_tokens, load.waiting_pairs)
        ahead -= self._computed_in(now_s - self._step_began_s)
        tokens, pairs = self._own_computed(now_s)
        own = self._with_pairs(self._num_own_tokens - tokens, self._num_own_pairs - pairs)
        return max(0, int(ahead), int(own))

    def fair_tokens_ahead(
        self, caller_id: int, num_tokens: int, held: Mapping[int, float]
    ) -> float:
        """What of `tokens_ahead` is computed before a new prompt of this caller, in an order fair
        between callers, and of what is `held`: tokens by caller that come here before it is sent.

        See OthersPrompts.fair_share.
        """
        waiting = Counter[int](held)
        waiting.update(self._own_tokens)
        share = self._others.fair_share(waiting, caller_id, num_tokens)
        return (self.tokens_ahead + sum(held.values())) * share

    def _own_computed(self, now_s: float) -> tuple[int, int]:
        """Of our first prompt there, tokens and pairs that should be computed by now."""
        if not self._prompts:
            return 0, 0
        first = next(iter(self._prompts.values()))
        computed = self._computed_in(now_s - max(first.sent_s, self._begun_s))
        whole = self._with_pairs(first.uncached_tokens, first.pairs)
        share = min(1.0, computed / max(1.0, whole))
        return round(share * first.uncached_tokens), round(share * first.pairs)

    def _with_pairs(self, num_tokens: int, pairs: int) -> float:
        """So many tokens, and as many as take as long as what they see."""
        return num_tokens + (0.0 if self.speed is None else self.speed.tokens_like(pairs))

    def _computed_in(self, seconds: float) -> int:
        return 0 if self.speed is None else self.speed.tokens_in(seconds)

    @property
    def num_requests(self) -> int:
        """Of all gateways, by our best estimate."""
        return self._num_others + len(self._decodes)

    @property
    def places_per_s(self) -> float | None:
        """How many of our places become free, by Little's law; None: none ever did."""
        return len(self._decodes) / self._mean_stay_s if self._mean_stay_s else None

    def has_place(self, num_sequences: int, num_blocks: int) -> bool:
        """An engine that has nothing takes whatever comes: no larger place can become free."""
        num_requests = self.num_requests
        if not num_requests or not self.max_num_seqs:
            return True
        has_seats = num_requests + num_sequences <= self.max_num_seqs
        return has_seats and num_blocks <= self._room_blocks
