"""One request while it lives in an engine: its tokens, its blocks, how far its KV is computed.

      add                                            reserve
       │          admit          start         admit    │
       ▼      ──────────►      ◄────────      ◄──────   ▼
    WAITING               RUNNING       RESERVED     COMING
       │      ◄──────────    │ ▲
       │        preempt      │ │ copied
       └────────────► LOADING ─┘ first token of a held request
         admit, with host    │
         memory's blocks     ▼
                           HELD       any state ──► ENDED: finish, release, drop, abort, failure

The beams of a search are a group: they are preempted and end together. While the first of them
waits or is computed anew, the others are PARKED; then they take their part of its blocks and run.

Plain bookkeeping: decides nothing, allocates nothing.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import dataclass, field

from ...core.request.request import Request, SamplingParams, sample_key
from ...core.request.token_ids import BlockHash, block_hashes
from ..execution.constraints import Constrained, Mask, TokenCounts, mask_of

_SLICE_BLOCKS = 64  # hashed at once when a prompt is looked up


class SequenceState(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # holds no block
    LOADING = "loading"  # holds blocks, some of which host memory fills
    RUNNING = "running"  # scheduled step by step
    HELD = "held"  # computed; keeps its blocks for a puller until released
    COMING = "coming"  # holds no block; its KV is elsewhere
    RESERVED = "reserved"  # holds blocks that a pull fills
    PARKED = "parked"  # holds no block, and waits for the first of its group
    ENDED = "ended"


_PULLED = (SequenceState.COMING, SequenceState.RESERVED)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Sequences of one search, the first one first; `width`: how many there will be."""

    width: int
    members: list[Sequence] = field(default_factory=list)
    is_forked: bool = False  # from its first member, which began alone

    @property
    def has_ended(self) -> bool:
        return all(one.state is SequenceState.ENDED for one in self.members)

    @property
    def num_absent(self) -> int:
        """Sequences to come, or to come back, beside those that have blocks."""
        if not self.is_forked:
            return self.width - 1
        return sum(one.state is SequenceState.PARKED for one in self.members)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in an engine.

        token_ids   [ prompt | outputs of earlier attempts | outputs ] num_awaited_tokens
        KV          [ num_cached_tokens | computed here      | in flight )
                                        num_computed_tokens ─┘           └─ num_launched_tokens
        block_ids   [ b0 | b1 | b2 | ... ]   slot of position p: block_ids[p // block_size]

    `arrival` orders first come first served; `is_held` asks to stop behind the first token and keep
    the KV. `num_stored_blocks` leading blocks have been offered to the prefix cache; `hashes` are
    of its first full blocks, as far as they were computed: see `block_hashes`. Awaited tokens are
    sampled by steps that have been launched, but not collected; a held sequence awaits none.
    `forks` are requests that become sequences of their own with the first token sampled. Prompt
    tokens before `next_prompt_logprob` have had their log-probabilities told, if these are asked
    for; the first token has none. `constrained` is its place in its grammar, if it has one,
    and `masks` what that lets come next, and behind each draft, in the step that is planned;
    `adapter_slot` where the runner has its LoRA adapter. `draft_token_ids` are guesses at what
    follows its tokens, which the next step verifies or the one in flight: their KV comes behind
    theirs, and none of what counts tokens counts them. `drafted` is for the draft model, if there
    is one: its KV reaches over so many tokens, those of prompts that are to be computed included,
    and as far as these follow; None: there is none, and nothing lacks its KV.

    A prompt `is_passing` that was begun before the next chunk of a longer one: in every other step
    it goes first.

    A decode is clear while fewer than `num_clear_tokens` of its tokens are launched: the next one
    has room in its blocks, and what it samples is not the last token that it can have. Where it
    needs its history it is so for one step at a time.

    A beam asks for `num_candidates` in place of a token. It awaits none, and stands still until its
    `group` has decided which of them follows; a held one has no group.
    """

    request: Request
    arrival: int
    is_held: bool
    root_hash: BlockHash
    key: str = field(init=False)  # the request's
    token_ids: array[int] = field(init=False)
    sampling: SamplingParams = field(init=False)  # its request's
    num_prompt_tokens: int = field(init=False)
    most_tokens: int = field(init=False)  # by its request
    needs_history: bool = field(init=False)  # for each token, of the tokens before it
    allowed: Mask | None = field(init=False)  # its request's allowed_token_ids
    adds_to_specs: bool = field(init=False)  # to parameters and keys: history, or tokens left out
    sample_key: int | None = field(init=False)  # of its tokens' keys; None: none is drawn
    state: SequenceState = SequenceState.WAITING
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    num_computed_tokens: int = 0
    num_launched_tokens: int = 0
    num_awaited_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefill_tokens: int = 0
    num_stored_blocks: int = 0
    num_clear_tokens: int = 0
    has_started: bool = False
    was_preempted: bool = False
    is_passing: bool = False
    forks: tuple[Request, ...] = ()
    next_prompt_logprob: int = 1
    constrained: Constrained | None = None
    masks: Row[Mask] = ()
    adapter_slot: int | None = None
    draft_token_ids: Row[int] = ()
    drafted: tuple[int, Row[int]] | None = None
    num_candidates: int = 0
    group: SequenceGroup | None = None
    hashes: list[BlockHash] = field(default_factory=list)
    _counts: TokenCounts | None = None

    def __post_init__(self) -> None:
        self.key = self.request.key
        self.token_ids = self.request.known_token_ids
        self.forks = self.request.forks
        self.sampling = params = self.request.sampling
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.most_tokens = self.num_prompt_tokens + params.max_tokens
        self.needs_history = params.needs_history
        self.allowed = mask_of(params.allowed_token_ids) if params.allowed_token_ids else None
        is_masked = self.allowed is not None or params.constraint is not None
        self.adds_to_specs = params.needs_history or is_masked or params.min_tokens > 0
        self.sample_key = None
        if not params.is_greedy:
            self.sample_key = sample_key(params.seed, self.request.sample_index)

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host; the KV of the last one may be still to compute."""
        return len(self.token_ids)

    @property
    def num_drafted_tokens(self) -> int:
        """How many of its known tokens the draft model has KV of, or will have with the prompt."""
        if self.drafted is None:
            return len(self.token_ids)
        num_tokens, behind = self.drafted
        for token_id in behind:
            if num_tokens == len(self.token_ids) or self.token_ids[num_tokens] != token_id:
                break
            num_tokens += 1
        return num_tokens

    @property
    def num_slots(self) -> int:
        """Tokens that need a place in its blocks now; one that is pulled has one for its first."""
        if self.state is SequenceState.HELD:
            return self.num_computed_tokens
        num_tokens = len(self.token_ids) + self.num_awaited_tokens + (self.state in _PULLED)
        return num_tokens + len(self.draft_token_ids)

    @property
    def num_outputs(self) -> int:
        """Output tokens over all attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> array[int]:
        """Those over all attempts that the host knows."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def num_to_come(self) -> int:
        """The others of its search that have no blocks."""
        return 0 if self.group is None else self.group.num_absent

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be told."""
        is_asked = self.request.sampling.prompt_logprobs is not None
        return is_asked and self.next_prompt_logprob < len(self.request.prompt_token_ids)

    @property
    def awaits_tokens(self) -> bool:
        """Whether it goes on with the token that a step samples before that is known."""
        return not (self.is_held or self.num_candidates)

    @property
    def num_unlaunched_tokens(self) -> int:
        """Tokens, known or awaited, and drafts that no step has been launched for yet."""
        num_tokens = len(self.token_ids) + self.num_awaited_tokens + len(self.draft_token_ids)
        return num_tokens - self.num_launched_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens that were known at its admission are still to launch."""
        return self.num_launched_tokens < self.num_prefill_tokens

    @property
    def has_prefill_in_flight(self) -> bool:
        """Whether tokens that were known at its admission are launched, but not computed."""
        num_launched_tokens = min(self.num_launched_tokens, self.num_prefill_tokens)
        return self.num_computed_tokens < num_launched_tokens

    def counts(self) -> TokenCounts | None:
        """What its penalties look at, if it has any. All tokens are known."""
        if not self.sampling.has_penalties:
            return None
        if self._counts is None:
            self._counts = TokenCounts(self.request.prompt_token_ids)
        self._counts.catch_up(self.token_ids)
        return self._counts

    def block_hashes(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """The hashes of the first `num_blocks` blocks, all of them full; computed once each."""
        assert num_blocks * block_size <= len(self.token_ids)
        hashes = self.hashes
        if len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else self.root_hash
            tokens = self.token_ids[len(hashes) * block_size : num_blocks * block_size]
            hashes += block_hashes(parent, tokens, block_size)
        return hashes[:num_blocks]

    def find(
        self,
        match: Callable[[list[BlockHash]], list[int]],
        first: int,
        num_tokens: int,
        block_size: int,
    ) -> list[int]:
        """The blocks that `match` finds of its first `num_tokens` tokens, from block `first` on, by
        their hashes: `match` returns those that it has up to the first that it has not."""
        num_blocks, found = num_tokens // block_size, list[int]()
        for start in range(first, num_blocks, _SLICE_BLOCKS):
            end = min(start + _SLICE_BLOCKS, num_blocks)
            found += match(self.block_hashes(end, block_size)[start:])
            if first + len(found) < end:
                break  # the hashes behind can wait until a step is on the device
        return found
