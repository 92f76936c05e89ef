"""A scheduler with its pool and no runner: steps are planned, and treated as computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.token_ids import root_hash
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS, BlockPool
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.scheduling.admission import OutputLengthEstimator
from baton.engine.scheduling.block_tables import BlockTables
from baton.engine.scheduling.costs.step_cost_estimator import StepCostEstimator
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.sequence import Sequence

BLOCK_SIZE = 4


class Guess(OutputLengthEstimator):
    """Always returns the same estimate, to be wrong on purpose."""

    def __init__(self, num_left: int) -> None:
        super().__init__()
        self.num_left = num_left
        self.num_guesses = 0

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        self.num_guesses += 1
        return self.num_left


@dataclass
class Bench:
    """A scheduler of `capacity` blocks of 4 tokens, and a model that always outputs 9."""

    capacity: int = 100
    budget: int = 16
    max_num_seqs: int = 8
    max_held_blocks: int | None = None
    guess: int = 1
    chunk: int = 0
    graph_rows: tuple[int, ...] = ()
    graph_prompt_tokens: int = 0  # 0: as many as the rows of the largest graph
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_blocks = self.capacity + NUM_RESERVED_BLOCKS
        graph_tokens = self.graph_prompt_tokens or max(self.graph_rows, default=0)
        limits = EngineLimits(
            num_blocks, BLOCK_SIZE, 1000, self.max_num_seqs, self.budget, self.max_held_blocks,
            self.chunk, self.graph_rows, graph_tokens,
        )  # fmt: skip
        generations = Generations(num_blocks)
        self.pool = BlockPool(num_blocks, generations)
        cache = PrefixCache(self.pool)
        self.tables = BlockTables(self.pool, cache, BLOCK_SIZE)
        self.estimator = Guess(self.guess)
        self.scheduler = Scheduler(
            limits, self.pool, self.tables, self.estimator, StepCostEstimator(graph_tokens)
        )

    def new(
        self, num_tokens: int, *, is_held: bool = False, first_id: int = 0, caller_id: int = 0
    ) -> Sequence:
        """Add a sequence, named a, b, c...; `first_id` separates the token ids of sequences."""
        name = "abcdefghij"[len(self.sequences)]
        tokens = tuple(range(first_id, first_id + num_tokens))
        sampling = SamplingParams(max_tokens=500)
        request = Request(name, 0, tokens, sampling, caller_id=caller_id)
        sequence = Sequence(request, len(self.sequences), is_held, root_hash("m"))
        self.sequences.append(sequence)
        return sequence

    def add(self, num_tokens: int, *, is_held: bool = False, first_id: int = 0) -> Sequence:
        sequence = self.new(num_tokens, is_held=is_held, first_id=first_id)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """Schedule and "compute"; returns the scheduled tokens by name."""
        schedule = self.scheduler.schedule()
        self.failed = schedule.failed
        planned = [*((one, 1) for one in schedule.clear), *schedule.others]
        for sequence, num_tokens in planned:
            sequence.num_computed_tokens += num_tokens
            sequence.num_launched_tokens = sequence.num_computed_tokens
            self.tables.store(sequence)
            if sequence.num_tokens == sequence.num_computed_tokens:
                sequence.token_ids.append(9)
                if sequence.is_held:
                    self.scheduler.queues.hold(sequence)
        return {sequence.request.request_id: num_tokens for sequence, num_tokens in planned}
