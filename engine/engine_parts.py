"""What an engine is made of, and how its parts are made and joined. Runs once, at the start."""

from __future__ import annotations

from collections.abc import Collection

from ..constraints.grammars import Grammars
from ..core.ports import Clock
from .block_room import BlockRoom
from .execution.constraints import Constraints
from .execution.runner_protocols import Runner
from .kv.block_pool import BlockPool
from .kv.disk.disk_thread import DiskThread
from .kv.disk.disk_tier import DiskTier
from .kv.generations import Generations
from .kv.host_blocks import HostBlocks
from .kv.host_copies import HostCopier
from .kv.host_tier import HostTier
from .kv.lent_prefixes import LentPrefixes
from .kv.limits import EngineLimits
from .kv.prefix_cache import CacheObserver, PrefixCache
from .lora.adapter_room import AdapterRoom
from .scheduling.admission import OutputLengthEstimator
from .scheduling.block_tables import BlockTables
from .scheduling.costs.step_cost_estimator import StepCostEstimator
from .scheduling.host_prefixes import HostPrefixes
from .scheduling.outputs import Totals
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Sequence
from .speculation.draft_model import DraftModelProposer
from .speculation.proposer import Proposer
from .speculation.speculator import Speculator


class EngineParts:
    """The parts of one engine; those that are None belong to features that it does not serve."""

    def __init__(
        self,
        runner: Runner,
        limits: EngineLimits,
        generations: Generations,
        *,
        fingerprint: str,
        eos_token_ids: Collection[int],
        enable_prefix_caching: bool = True,
        cache_observer: CacheObserver | None = None,
        estimator: OutputLengthEstimator | None = None,
        grammars: Grammars | None = None,
        clock: Clock | None = None,
        host_copier: HostCopier | None = None,
        disk: DiskThread | None = None,
        adapters: AdapterRoom[Sequence] | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """Without `grammars` the engine rejects constraints, without `adapters` LoRA adapters. The
        prefix cache extends to host memory by `host_copier`, and from there to `disk`; `proposer`
        drafts for speculation."""
        self.runner, self.limits, self.fingerprint = runner, limits, fingerprint
        self.eos_token_ids = frozenset(eos_token_ids)
        self.clock = clock or Clock()
        self.totals = Totals()  # those that the engine counts itself
        self.step_costs = costs = StepCostEstimator(limits.graph_prompt_tokens)
        self.pool, size = BlockPool(limits.num_blocks, generations), limits.block_size
        has_host = host_copier is not None and enable_prefix_caching
        blocks = HostBlocks() if has_host else None
        cache = PrefixCache(
            self.pool, is_enabled=enable_prefix_caching, observer=cache_observer, host=blocks
        )
        self.host: HostTier | None = None
        if host_copier is not None and blocks is not None:
            tier = None if disk is None else DiskTier(disk, blocks, self.clock)
            self.host = HostTier(
                *(host_copier, blocks, self.pool, cache, generations, costs.estimate, size, tier)
            )
        host = None if self.host is None else HostPrefixes(self.host, size)
        self.tables = BlockTables(self.pool, cache, size, host)
        has_draft_model = isinstance(proposer, DraftModelProposer) and not proposer.is_head
        self.tables.has_draft_model = has_draft_model
        self.output_lengths = estimator or OutputLengthEstimator()
        self.scheduler = Scheduler(limits, self.pool, self.tables, self.output_lengths, costs)
        self.adapters = adapters
        if adapters is not None:
            self.scheduler.queues.in_adapter_room = adapters.parked
        self.constraints = None if grammars is None else Constraints(grammars)
        self.speculator: Speculator | None = None
        if proposer is not None:
            of_engine = (limits, costs, self.constraints, self.eos_token_ids, self.clock)
            self.speculator = Speculator(proposer, *of_engine, runs_ahead=runner.runs_ahead)
        self.room = BlockRoom(limits, self.scheduler.admission, self.scheduler.queues, self.pool)
        self.prefixes = LentPrefixes(self.pool, cache, self.room.beside_running)
