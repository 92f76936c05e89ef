"""One request in an engine: its tokens, its blocks, and how much of its KV is computed.

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
waits or is recomputed, the others are PARKED; then they share its blocks and run.

Bookkeeping only: decides nothing, allocates nothing.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import dataclass, field

from ...core.request.request import Request, sample_key
from ...core.request.sampling_params import SamplingParams
from ...core.request.token_ids import BlockHash, block_hashes
from ...kernels.sampling.sample_spec import has_penalties
from ..execution.constraints import Constrained, Mask, TokenCounts, mask_of

_SLICE_BLOCKS = 64  # hashed at once when a prompt's prefix is searched


class SequenceState(enum.Enum):
    """The states of a sequence, as drawn above."""

    WAITING = "waiting"  # has no blocks
    LOADING = "loading"  # has blocks, some of which are copied from host memory
    RUNNING = "running"  # scheduled step by step
    HELD = "held"  # computed; keeps its blocks for a puller until they are released
    COMING = "coming"  # has no blocks; its KV is on another engine
    RESERVED = "reserved"  # has blocks that a pull fills
    PARKED = "parked"  # has no blocks, and waits for the first of its group
    ENDED = "ended"


_PULLED = (SequenceState.COMING, SequenceState.RESERVED)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The sequences of one search, its leader first; `width`: how many there will be. `keys`: the
    requests that get its best hypotheses, best first."""

    width: int
    keys: tuple[str, ...]
    members: list[Sequence] = field(default_factory=list)
    is_forked: bool = False  # the first member, which began alone, has forked

    @property
    def num_absent(self) -> int:
        """Sequences that will need blocks and have none: not forked yet, or parked."""
        if not self.is_forked:
            return self.width - 1
        return sum(s.state is SequenceState.PARKED for s in self.members)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in an engine.

        token_ids   [ prompt | outputs of earlier attempts | outputs ] num_awaited_tokens
        KV          [ num_cached_tokens | computed here      | in flight )
                                        num_computed_tokens ─┘           └─ num_launched_tokens
        block_ids   [ b0 | b1 | b2 | ... ]   slot of position p: block_ids[p // block_size]

    Awaited tokens are sampled by steps that are launched and not collected; a held sequence, which
    stops after its first token and keeps its KV, awaits none. Drafts are guesses of next tokens,
    verified by the next step or the one in flight: their KV follows that of the tokens, and they
    are not counted as tokens.

    A decode is clear while fewer than `num_clear_tokens` of its tokens are launched: the next token
    has room in its blocks, and the one that is then sampled is not its last. If it needs its
    history, it is clear for one step at a time.

    A beam samples `num_candidates` instead of a token. It awaits none, and is not scheduled until
    its `group` has chosen among them; a held one has no group.
    """

    request: Request
    arrival: int  # the order of first come, first served
    is_held: bool  # stops after its first token
    root_hash: BlockHash
    key: str = field(init=False)  # of the request
    token_ids: array[int] = field(init=False)
    sampling: SamplingParams = field(init=False)  # of the request
    num_prompt_tokens: int = field(init=False)
    most_tokens: int = field(init=False)  # by its max_tokens
    needs_history: bool = field(init=False)  # sampling a token depends on all tokens before it
    allowed: Mask | None = field(init=False)  # the request's allowed_token_ids
    adds_to_specs: bool = field(init=False)  # its samples need history or leave tokens out
    sample_key: int | None = field(init=False)  # its tokens' keys follow from it; None: greedy
    state: SequenceState = SequenceState.WAITING
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    num_computed_tokens: int = 0
    num_launched_tokens: int = 0
    num_awaited_tokens: int = 0
    num_cached_tokens: int = 0
    num_prefill_tokens: int = 0
    num_stored_blocks: int = 0  # leading ones, given to the prefix cache
    num_clear_tokens: int = 0
    has_started: bool = False
    was_preempted: bool = False
    is_passing: bool = False  # a prefill begun before a longer one: first in every other step
    forks: tuple[Request, ...] = ()  # become sequences with the first token sampled
    next_prompt_logprob: int = 1  # the first prompt token whose logprob is not output yet
    constrained: Constrained | None = None  # its state in its grammar
    masks: Row[Mask] = ()  # by its grammar, for the planned step: the next token, behind each draft
    adapter_slot: int | None = None  # of its LoRA adapter, in the runner
    draft_token_ids: Row[int] = ()
    drafted: tuple[int, Row[int]] | None = None  # the draft model's KV: see num_drafted_tokens
    num_candidates: int = 0
    group: SequenceGroup | None = None
    hashes: list[BlockHash] = field(default_factory=list)  # of the first blocks: see block_hashes
    _counts: TokenCounts | None = None

    def __post_init__(self) -> None:
        self.key = self.request.key
        self.token_ids = self.request.known_token_ids
        self.forks = self.request.forks
        self.sampling = params = self.request.sampling
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.most_tokens = self.num_prompt_tokens + params.max_tokens
        self.needs_history = has_penalties(params) or params.constraint is not None
        self.allowed = mask_of(params.allowed_token_ids) if params.allowed_token_ids else None
        self.adds_to_specs = self.needs_history or self.allowed is not None or params.min_tokens > 0
        self.sample_key = None
        if params.temperature > 0:
            self.sample_key = sample_key(params.seed, self.request.sample_index)

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host; the KV of the last one may be still to compute."""
        return len(self.token_ids)

    @property
    def num_drafted_tokens(self) -> int:
        """Known tokens whose KV the draft model has, or will have once the prompt is computed:
        `drafted[0]`, and more while they equal `drafted[1]`. All, without a draft model."""
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
        """Tokens that need a slot in its blocks now; if its KV is pulled, its first output too."""
        if self.state is SequenceState.HELD:
            return self.num_computed_tokens
        num_tokens = len(self.token_ids) + self.num_awaited_tokens + (self.state in _PULLED)
        return num_tokens + len(self.draft_token_ids)

    @property
    def num_outputs(self) -> int:
        """Output tokens over all attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_to_come(self) -> int:
        """Sequences of its search that will need blocks and have none."""
        return 0 if self.group is None else self.group.num_absent

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still to be output."""
        is_requested = self.request.sampling.prompt_logprobs is not None
        return is_requested and self.next_prompt_logprob < len(self.request.prompt_token_ids)

    @property
    def awaits_tokens(self) -> bool:
        """Whether it continues with a sampled token before the host knows it."""
        return not (self.is_held or self.num_candidates)

    @property
    def num_unlaunched_tokens(self) -> int:
        """Tokens, known or awaited, and drafts that are not in a launched step."""
        num_tokens = len(self.token_ids) + self.num_awaited_tokens + len(self.draft_token_ids)
        return num_tokens - self.num_launched_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens that were known at its admission are still to launch."""
        return self.num_launched_tokens < self.num_prefill_tokens

    @property
    def has_prefill_in_flight(self) -> bool:
        """Whether tokens that were known at its admission are launched and not computed."""
        num_launched_tokens = min(self.num_launched_tokens, self.num_prefill_tokens)
        return self.num_computed_tokens < num_launched_tokens

    def counts(self) -> TokenCounts | None:
        """The token counts for its penalties, if it has any. No token may be awaited."""
        if not has_penalties(self.sampling):
            return None
        if self._counts is None:
            self._counts = TokenCounts(self.request.prompt_token_ids)
        self._counts.catch_up(self.token_ids)
        return self._counts

    def block_hashes(self, num_blocks: int, block_size: int) -> list[BlockHash]:
        """The hashes of the first `num_blocks` blocks, all of them full; each is computed once."""
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
        """The blocks that `match` finds for its first `num_tokens` tokens, from block `first` on:
        `match` returns the blocks of the hashes up to the first one that it does not have."""
        num_blocks, found = num_tokens // block_size, list[int]()
        for start in range(first, num_blocks, _SLICE_BLOCKS):
            end = min(start + _SLICE_BLOCKS, num_blocks)
            found += match(self.block_hashes(end, block_size)[start:])
            if first + len(found) < end:
                break  # the other hashes are computed while a step is on the device
        return found
