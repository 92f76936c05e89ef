"""An engine's heartbeat as the gateway reads it, and the speed of prompts that follows from it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...core.step_cost import KNOTS, LEAST_PROMPT_TOKENS, StepCost
from ...core.step_shape import StepShape, pairs_of
from ...proto import codec
from ...proto.v1 import node_pb2

STEP_TOKENS = 2048  # prompt tokens of a step, where an engine reports none
MANY_DECODES = 1 << 16  # more than any step has
_LEAST_TOKEN_S = 1e-12
_MOST_PART_S = 3600.0  # of a step's cost, to be believed


@dataclass(frozen=True, slots=True)
class PromptSpeed:
    """How fast an engine computes prompts now, in seconds: `step_s` per step, `token_s` per token,
    and `pair_s` per (query, key) pair; `steady_token_s`: per token of a prompt of many steps."""

    step_s: float
    token_s: float
    pair_s: float = 0.0
    steady_token_s: float = 0.0

    def prompt_seconds(self, num_tokens: int, context: int, ahead: float = 0.0) -> float:
        """The time to compute `num_tokens` of a prompt with `context` tokens before them, after
        `ahead` tokens of other prompts, whose contexts are ignored."""
        tokens = ahead + num_tokens
        tokens_s = max(self.step_s + tokens * self.token_s, tokens * self.steady_token_s)
        return tokens_s + self.pair_s * pairs_of(num_tokens, context)

    def tokens_like(self, pairs: int) -> float:
        """How many tokens take as long as these (query, key) pairs."""
        return self.pair_s * pairs / max(self.token_s, self.steady_token_s)

    def tokens_in(self, seconds: float) -> int:
        """How many tokens are computed in this time."""
        left_s = seconds - self.step_s
        if left_s <= 0:
            return 0
        tokens = left_s / self.token_s
        return int(min(tokens, seconds / self.steady_token_s) if self.steady_token_s else tokens)


def prompt_speed(
    cost: StepCost, chunk: int, beside: StepShape, promise_s: float | None
) -> PromptSpeed:
    """The speed of prompts in chunks of up to `chunk` tokens, in steps with the decodes `beside`,
    to which a TBT of `promise_s` may be promised."""
    if promise_s is not None and beside.num_decodes:
        size = cost.prompt_tokens_within(promise_s, beside, 0, chunk)
        size = max(size, min(chunk, LEAST_PROMPT_TOKENS))
        token_s = cost.seconds(replace(beside, num_prompt_tokens=size)) / size
        beside_s = cost.seconds(beside)
        # Attention to the context makes chunks smaller, down to the least, each beside the decodes.
        left = 1 - (beside_s + cost.mixed_s) / promise_s
        least = min(1.0, LEAST_PROMPT_TOKENS / size)
        pair_s = (cost.pair_s + cost.mixed_pair_s) / max(left, least)
        return PromptSpeed(beside_s, max(token_s, _LEAST_TOKEN_S), pair_s)
    small = max(1, chunk // 8)
    whole_s, small_s = (
        cost.seconds(replace(beside, num_prompt_tokens=size)) for size in (chunk, small)
    )
    token_s = max((whole_s - small_s) / max(1, chunk - small), _LEAST_TOKEN_S)
    step_s = max(0.0, small_s - small * token_s)
    return PromptSpeed(step_s, token_s, cost.pair_s, whole_s / max(1, chunk))


def decodes_within(cost: StepCost, context: float, seconds: float) -> int:
    """The most decodes of a step that takes no longer than `seconds`; `context`: the mean of their
    keys."""

    def takes_s(num: int) -> float:
        return cost.seconds(StepShape(num_decodes=num, keys=int(num * context)))

    return bisect_right(range(1, MANY_DECODES), seconds, key=takes_s)


@dataclass(frozen=True, slots=True)
class OthersPrompts:
    """Waiting prompt tokens of other gateways: `by_caller`, of the callers with most, which an
    engine lists; `unlisted`, of callers with fewer than `least_listed` each."""

    by_caller: Mapping[int, int] = field(default_factory=dict)
    unlisted: int = 0
    least_listed: int = 0


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """The last heartbeat of an engine; counts are of all gateways."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    credit_blocks: int = 0
    is_draining: bool = False
    links: frozenset[str] = frozenset()
    held_blocks: int = 0
    counters: node_pb2.Counters = field(default_factory=node_pb2.Counters)
    link_gbytes_per_s: Mapping[str, float] = field(default_factory=dict)
    num_steps: int = 0  # since the engine's start
    num_requests: int = 0  # that decode there or will
    num_stages: int = 0  # of a pipeline, each with a share of the decodes; 0: one
    room_blocks: int = 0
    output_tokens: int = 0
    mean_output_tokens: int = 0
    step_cost: StepCost | None = None
    step_cost_error: float | None = None
    decodes: StepShape = field(default_factory=StepShape)
    tbt_target_s: float | None = None
    step_tokens: int = 0
    is_promise_withdrawn: bool = False
    promise_epoch: int = 0
    promise_leader: str = ""
    decode_step_p99_s: float = 0.0
    expert_ranks: int = 0
    host_blocks: int = 0
    host_block_s: float = 0.0  # to copy one back to the device; 0: not known
    disk_blocks: int = 0
    waiting_pairs: int = 0  # (query, key), of the waiting tokens
    waiting_by_caller: Mapping[int, int] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()  # digests of those in its host memory
    running_adapters: Sequence[str] = ()  # names
    waiting_adapters: Sequence[str] = ()

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a step with drafts adds to a sequence, the one after the drafts included;
        None before there are any."""
        counted = self.counters
        return 1 + sum(counted.accepted_drafts) / counted.num_drafts if counted.num_drafts else None

    def others_than(self, ours: Mapping[int, int]) -> OthersPrompts:
        """The waiting tokens without those that are or may be `ours`, by caller."""
        listed = self.waiting_by_caller
        more = {i: count - ours.get(i, 0) for i, count in listed.items() if count > ours.get(i, 0)}
        unlisted = self.waiting_tokens - sum(listed.values())
        our_unlisted = sum(count for caller_id, count in ours.items() if caller_id not in listed)
        return OthersPrompts(more, max(0, unlisted - our_unlisted), min(listed.values(), default=0))

    @property
    def takes_whole(self) -> bool:
        """Whether it takes prompts together with their decodes, to which it promises a TBT."""
        return self.tbt_target_s is not None and not self.is_promise_withdrawn

    @property
    def prompt_speed(self) -> PromptSpeed | None:
        """The speed of prompts beside its present decodes; None: not measured, or only with a few
        decodes, whose steps do not show the cost of prompts."""
        if self.step_cost is None or self.max_rows < LEAST_PROMPT_TOKENS:
            return None
        return self.prompt_speed_by(self.step_cost)

    @property
    def max_rows(self) -> int:
        """The largest step that its cost was measured on: small where it never had a prompt."""
        return 0 if self.step_cost is None else self.step_cost.max_rows

    def prompt_speed_by(self, cost: StepCost) -> PromptSpeed:
        """The speed of prompts if steps cost `cost`."""
        chunk = self.step_tokens or STEP_TOKENS
        return prompt_speed(cost, chunk, self.decodes, self.tbt_target_s)

    def decodes_within(self, seconds: float) -> int:
        """How many decodes like the present ones fit a step of this time; MANY_DECODES where not
        even one does, since a limit would not help."""
        cost, now = self.step_cost, self.decodes
        if cost is None or not now.num_decodes:
            return MANY_DECODES
        return decodes_within(cost, now.keys / now.num_decodes, seconds) or MANY_DECODES


def load_from_wire(wire: node_pb2.Heartbeat) -> ReportedLoad:
    fields = codec.same_fields(wire, ReportedLoad) | {
        "links": frozenset(link.incarnation for link in wire.links),
        "link_gbytes_per_s": {link.incarnation: link.gbytes_per_s for link in wire.links},
        "step_cost": _cost_from_wire(wire),
        "step_cost_error": wire.step_cost.relative_error
        if wire.step_cost.HasField("relative_error")
        else None,
        "decodes": StepShape(num_decodes=wire.num_decodes, keys=wire.decode_keys),
        "tbt_target_s": wire.tbt_target_s if wire.tbt_target_s > 0 else None,
        "adapters": frozenset(wire.adapters),
        "waiting_by_caller": {one.caller_id: one.num_tokens for one in wire.waiting_by_caller},
    }
    return ReportedLoad(**fields)


def _cost_from_wire(wire: node_pb2.Heartbeat) -> StepCost | None:
    """None where the engine reports none, or an impossible one."""
    if not wire.HasField("step_cost"):
        return None
    sent = wire.step_cost
    cost = StepCost(
        *(sent.base_s, tuple(sent.row_s), sent.pair_s, sent.key_s, sent.max_rows),
        *(sent.mixed_s, sent.mixed_pair_s),
    )
    return cost if is_sane(cost) else None


def is_sane(cost: StepCost) -> bool:
    """Whether an engine's cost can be used: no part is negative or takes hours, and not all are 0.
    Sums of larger finite parts could be infinite."""
    mixed = (cost.mixed_s, cost.mixed_pair_s)
    parts = (cost.base_s, *cost.row_s, cost.pair_s, cost.key_s, *mixed)
    if len(cost.row_s) != len(KNOTS) or not all(0 <= part < _MOST_PART_S for part in parts):
        return False
    return any(parts)
