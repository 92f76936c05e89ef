"""What an engine reports of itself in a heartbeat."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.step_cost import LEAST_PROMPT_TOKENS, PromptSpeed, StepCost, StepShape
from ...proto import codec
from ...proto.v1 import node_pb2

_STEP_TOKENS = 2048  # of an engine that does not report its own
MANY_DECODES = 1 << 16  # more than any step has


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """An engine's heartbeat."""

    num_running: int
    num_waiting: int
    waiting_tokens: int
    free_blocks: int
    credit_blocks: int
    is_draining: bool
    links: frozenset[str]
    held_blocks: int = 0
    counters: node_pb2.Counters = field(default_factory=node_pb2.Counters)
    link_gbytes_per_s: Mapping[str, float] = field(default_factory=dict)
    num_steps: int = 0  # so far
    num_requests: int = 0  # of all gateways, that decode there or will
    num_stages: int = 0  # that decode at once, a share of them each; 0: one
    room_blocks: int = 0
    output_tokens: int = 0
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
    host_block_s: float = 0.0  # to copy one of them back; 0: not known
    disk_blocks: int = 0
    waiting_pairs: int = 0  # (query, key), of the waiting tokens
    waiting_by_caller: Mapping[int, int] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()  # digests of those in its host memory
    running_adapters: tuple[str, ...] = ()  # names
    waiting_adapters: tuple[str, ...] = ()

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a step with drafts adds to a sequence, the one behind them included; None
        before there are any."""
        counted = self.counters
        return 1 + sum(counted.accepted_drafts) / counted.num_drafts if counted.num_drafts else None

    def expert_imbalance(self, num_parts: int) -> float | None:
        """Of so many equal parts of the experts, in their order: tokens of the part with most of
        them over the mean; None before there are any."""
        tokens = self.counters.expert_tokens
        size = len(tokens) // max(1, num_parts)
        if not size or not sum(tokens):
            return None
        parts = [sum(tokens[n * size : (n + 1) * size]) for n in range(num_parts)]
        return max(parts) * num_parts / max(1, sum(parts))

    @property
    def takes_whole(self) -> bool:
        """Whether it may be given prompts and their decodes: it promises something to these."""
        return self.tbt_target_s is not None and not self.is_promise_withdrawn

    @property
    def prompt_speed(self) -> PromptSpeed | None:
        """At which it computes prompts beside the decodes that it has; None: not measured yet, or
        over a few decodes alone, which say nothing of prompts."""
        if self.step_cost is None or self.max_rows < LEAST_PROMPT_TOKENS:
            return None
        return self.prompt_speed_by(self.step_cost)

    @property
    def max_rows(self) -> int:
        """Of the steps that its cost was measured on: few where it never had a prompt."""
        return 0 if self.step_cost is None else self.step_cost.max_rows

    def prompt_speed_by(self, cost: StepCost) -> PromptSpeed:
        """The same, were its steps to cost as much as this."""
        return cost.prompt_speed(self.step_tokens or _STEP_TOKENS, self.decodes, self.tbt_target_s)

    def decodes_within(self, seconds: float) -> int:
        """How many like those that run a step may have that takes no longer; where not even one
        may, it makes no difference."""
        cost, now = self.step_cost, self.decodes
        if cost is None or not now.num_decodes or cost.seconds(now.scaled_to(1)) > seconds:
            return MANY_DECODES
        numbers = range(1, MANY_DECODES)
        return bisect_right(numbers, seconds, key=lambda num: cost.seconds(now.scaled_to(num)))


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
        "running_adapters": tuple(wire.running_adapters),
        "waiting_adapters": tuple(wire.waiting_adapters),
        "waiting_by_caller": {one.caller_id: one.num_tokens for one in wire.waiting_by_caller},
    }
    return ReportedLoad(**fields)


def _cost_from_wire(wire: node_pb2.Heartbeat) -> StepCost | None:
    """None where an engine has none yet, or one that cannot be."""
    if not wire.HasField("step_cost"):
        return None
    sent = wire.step_cost
    cost = StepCost(
        *(sent.base_s, tuple(sent.row_s), sent.pair_s, sent.key_s, sent.max_rows),
        *(sent.mixed_s, sent.mixed_pair_s),
    )
    return cost if cost.is_sane else None
