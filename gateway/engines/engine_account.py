"""The load of one engine, from its heartbeats and from the requests that this gateway has there:
prompt tokens that wait and how long they take; places for decodes, and blocks for their KV.

    heartbeat: waiting tokens, by caller ─┬─ ours, sent and without a first token ► others'
    since then: ours that were sent       │
                ours with a first token ──┘  less what is computed by now, by the step cost that
                                             the engine has measured
Only the tokens of other gateways come from the heartbeat, which may be older than an output: all of
ours that was there since the previous heartbeat counts as ours, so that it is never counted twice.

    last heartbeat: requests of all gateways ─┬─ ours then ─ requests of other gateways
                                              └─ + ours now: dispatched and not ended
Several gateways may take the same place between two heartbeats; the engine queues the excess. The
blocks of requests that were sent since the heartbeat, with their expected growth, are subtracted
from the free room that it reported. A prompt is open from `sent_prompt` until its first token, a
decode from `sent_decodes` until its end; a request on an engine that does both is one of each.
Knows no tokens of requests: only their keys, times and sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ...core.errors import PromiseRefused
from ...core.ports import Clock
from ...core.step_shape import pairs_of
from ..request.engine_link import EngineOutput
from .prompts_in_flight import PromptsInFlight, SentPrompt
from .reported_load import OthersPrompts, PromptSpeed, ReportedLoad

Key: TypeAlias = tuple[str, int]  # request id, attempt

_DECAY = 0.95  # of the mean stay, per decode that ends
_UNKNOWN_AHEAD_TOKENS = 8192  # limit per caller at an engine whose cost is not known yet
_AHEAD_S = 0.5  # limit per caller, in seconds beyond a step; more prompts wait in the gateway


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt without a first token. `keys`: of the samples that wait for it; `num_tokens`: as the
    engine counts them; `cached_tokens`: expected to be cached there, or fetched; the others are to
    be computed; `in_flight`: its entry for other prompts with the same beginning."""

    keys: set[Key]
    caller_id: int
    sent_s: float
    num_tokens: int
    cached_tokens: int
    uncached_tokens: int
    pairs: int  # (query, key) pairs to compute, as in core/step_shape.py
    in_flight: SentPrompt | None


class EngineAccount:
    """Times are monotonic seconds. `max_num_seqs` 0: not reported, every sequence has a place.

    `prompts`, `released`: shared by all engines of a table. `released`: callers with a prompt or
    decode that ended, so that waiting requests may find a place; the dispatcher of these clears it.
    `has_refused`: since the last heartbeat the engine rejected a request to keep its promise.
    """

    def __init__(self, clock: Clock, max_num_seqs: int = 0) -> None:
        self.speed: PromptSpeed | None = None
        self.max_num_seqs = max_num_seqs
        self.released: set[int] = set()
        self.prompts = PromptsInFlight(clock)
        self.has_refused = False
        self._clock = clock
        # Ours, like all until the next comment.
        self.unanswered: dict[Key, _Prompt] = {}  # open prompts, by each sample
        self._decodes: dict[Key, tuple[int, float]] = {}  # by sequence: caller id, sent when
        self.own_tokens: Counter[int] = Counter()  # prompt tokens to compute, by caller
        self._num_own_pairs = 0  # summed over callers
        self._answered_tokens: Counter[int] = Counter()  # prompts closed since the last heartbeat
        self._begun_s = 0.0  # when the engine began our first open prompt, unless sent later
        self._mean_stay_s: float | None = None  # of decodes
        # From the last heartbeat, like all below.
        self._load = ReportedLoad()
        self._step_began_s = 0.0
        self.others = OthersPrompts()  # that wait there
        self._num_others = 0  # requests
        self._room_blocks = 0  # beside all requests that the engine had then

    # --- events -----------------------------------------------------------------------------------

    def heartbeat(self, load: ReportedLoad) -> None:
        before, self._load = self._load, load
        has_as_much = 0 < before.waiting_tokens <= load.waiting_tokens
        if before.num_steps != load.num_steps or not has_as_much:
            self._step_began_s = self._clock.monotonic_s()
        self.speed, self.has_refused = load.prompt_speed, False
        ours = self._answered_tokens.copy()  # the heartbeat may be older than their end
        for sent in set(self.unanswered.values()):
            ours[sent.caller_id] += sent.num_tokens
        self.others = load.others_than(ours)
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
        """Open a prompt of one or several samples, for which see _Prompt."""
        uncached_tokens, now_s = num_tokens - cached_tokens, self._clock.monotonic_s()
        pairs = pairs_of(uncached_tokens, cached_tokens)
        sizes = num_tokens, cached_tokens, uncached_tokens, pairs
        prompt = _Prompt({*keys}, caller_id, now_s, *sizes, in_flight)
        self.unanswered |= dict.fromkeys(keys, prompt)
        self.own_tokens[caller_id] += uncached_tokens
        self._num_own_pairs += pairs

    def sent_decodes(self, keys: Iterable[Key], caller_id: int, num_blocks: int) -> None:
        """Open the decodes of one or several sequences, which need `num_blocks` together."""
        self._decodes |= dict.fromkeys(keys, (caller_id, self._clock.monotonic_s()))
        self._room_blocks -= num_blocks

    def settle(self, outputs: Iterable[EngineOutput]) -> None:
        """Close the prompts and decodes that a step's outputs end; plain tokens end none."""
        for output in outputs:
            key, error = (output.request_id, output.attempt), output.error
            self.has_refused |= isinstance(error, PromiseRefused)
            if (prompt := self.unanswered.get(key)) is not None:
                if output.cached_tokens is not None:
                    self.prompts.num_index_hits += prompt.cached_tokens > 0
                    self.prompts.num_stale_hits += output.cached_tokens < prompt.cached_tokens
                # Beams have no tokens before their end: an empty output reports their prompt.
                if output.token_ids or (error is None and not output.prompt_logprobs):
                    self._close_prompt(prompt, is_computed=True)
            if output.finish_reason is not None or error is not None:
                self.ended(key)

    def ended(self, key: Key) -> None:
        """Close a request that finished, failed or was cancelled; no error if it is closed."""
        if (prompt := self.unanswered.get(key)) is not None:
            if len(prompt.keys) == 1:
                self._close_prompt(prompt, is_computed=False)
            else:  # the other samples need it
                prompt.keys.remove(key)
                del self.unanswered[key]
        if (decode := self._decodes.pop(key, None)) is not None:
            caller_id, sent_s = decode
            stay_s = self._clock.monotonic_s() - sent_s
            mean_s = stay_s if self._mean_stay_s is None else self._mean_stay_s
            self._mean_stay_s = _DECAY * mean_s + (1 - _DECAY) * stay_s
            self.released.add(caller_id)

    def _close_prompt(self, prompt: _Prompt, *, is_computed: bool) -> None:
        """Its first token has come, or never will."""
        if is_computed or prompt is next(iter(self.unanswered.values())):
            self._begun_s = self._clock.monotonic_s()
        for key in prompt.keys:
            del self.unanswered[key]
        self._answered_tokens[prompt.caller_id] += prompt.num_tokens
        self.own_tokens[prompt.caller_id] -= prompt.uncached_tokens
        self._num_own_pairs -= prompt.pairs
        if not self.own_tokens[prompt.caller_id]:
            del self.own_tokens[prompt.caller_id]
        if prompt.in_flight is not None:
            self.prompts.ended(prompt.in_flight, is_computed=is_computed)
        self.released.add(prompt.caller_id)

    # --- estimates --------------------------------------------------------------------------------

    def takes_more_of(self, caller_id: int) -> bool:
        """Whether another prompt of this caller would be computed soon.

        The engine's queue is fair, so prompts of other callers do not matter: a caller without any
        there may always send one.
        """
        own_tokens, speed = self.own_tokens[caller_id], self.speed
        if not own_tokens or speed is None:
            return own_tokens < _UNKNOWN_AHEAD_TOKENS
        return own_tokens < speed.tokens_in(_AHEAD_S + 2 * speed.step_s)

    @property
    def has_no_prompt(self) -> bool:
        """Whether no prompt waits there, by our best estimate."""
        return not (self.own_tokens or self.others.by_caller or self.others.unlisted)

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens that a new request would wait for: of all gateways by the last heartbeat,
        or ours, whichever is more, less those computed since the running step began, since of two
        engines with a prompt each one is done sooner. Attention to the context counts as the tokens
        that take as long: for a long prompt it is most of the time."""
        load = self._load
        if not load.waiting_tokens and not self.unanswered:
            return 0
        ahead, own = float(load.waiting_tokens), float(self.own_tokens.total())
        if (speed := self.speed) is not None:
            now_s = self._clock.monotonic_s()
            ahead += speed.tokens_like(load.waiting_pairs)
            ahead -= speed.tokens_in(now_s - self._step_began_s)
            own += speed.tokens_like(self._num_own_pairs)
            if self.unanswered:  # less what should be computed of our first one by now
                first = next(iter(self.unanswered.values()))
                whole = first.uncached_tokens + speed.tokens_like(first.pairs)
                own -= min(whole, speed.tokens_in(now_s - max(first.sent_s, self._begun_s)))
        return max(0, int(ahead), int(own))

    @property
    def num_requests(self) -> int:
        """Decodes of all gateways, by our best estimate."""
        return self._num_others + len(self._decodes)

    @property
    def places_per_s(self) -> float | None:
        """How many of our decodes end per second, by Little's law; None: none has ended yet."""
        return len(self._decodes) / self._mean_stay_s if self._mean_stay_s else None

    def has_place(self, num_sequences: int, num_blocks: int) -> bool:
        """An idle engine has a place for any request: no larger one could become free."""
        num_requests = self.num_requests
        if not num_requests or not self.max_num_seqs:
            return True
        has_seats = num_requests + num_sequences <= self.max_num_seqs
        return has_seats and num_blocks <= self._room_blocks
