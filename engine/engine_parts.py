"""What an engine is made of, and how its parts are made and joined. Runs once, at the start."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

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
from .scheduling.costs.step_cost_estimator import StepCostEstimator, StepRecord
from .scheduling.host_prefixes import HostPrefixes
from .scheduling.scheduler import Scheduler
from .scheduling.sequence import Sequence
from .speculation.draft_model import DraftModelProposer
from .speculation.proposer import Proposer
from .speculation.speculator import Speculator


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Parts that are None belong to features that the engine does not serve."""

    runner: Runner
    limits: EngineLimits
    clock: Clock
    fingerprint: str
    eos_token_ids: frozenset[int]
    pool: BlockPool
    tables: BlockTables
    scheduler: Scheduler
    room: BlockRoom
    prefixes: LentPrefixes
    output_lengths: OutputLengthEstimator
    step_costs: StepCostEstimator
    step_record: StepRecord
    adapters: AdapterRoom[Sequence] | None
    constraints: Constraints | None
    host: HostTier | None
    speculator: Speculator | None


def make_parts(
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
) -> EngineParts:
    """Without `grammars` the engine rejects constraints, without `adapters` LoRA adapters. The
    prefix cache extends to host memory by `host_copier`, and from there to `disk`; `proposer`
    drafts for speculation."""
    clock = clock or Clock()
    costs = StepCostEstimator(limits.graph_prompt_tokens)
    pool, size = BlockPool(limits.num_blocks, generations), limits.block_size
    has_host = host_copier is not None and enable_prefix_caching
    host_blocks = HostBlocks() if has_host else None
    cache = PrefixCache(
        pool, is_enabled=enable_prefix_caching, observer=cache_observer, host=host_blocks
    )
    host: HostTier | None = None
    if host_copier is not None and host_blocks is not None:
        tier = None if disk is None else DiskTier(disk, host_blocks, clock)
        host = HostTier(
            *(host_copier, host_blocks, pool, cache, generations, costs.estimate, size, tier)
        )
    tables = BlockTables(pool, cache, size, None if host is None else HostPrefixes(host, size))
    tables.has_draft_model = isinstance(proposer, DraftModelProposer) and not proposer.is_head
    estimator = estimator or OutputLengthEstimator()
    scheduler = Scheduler(limits, pool, tables, estimator, costs)
    if adapters is not None:
        scheduler.queues.in_adapter_room = adapters.parked
    constraints = None if grammars is None else Constraints(grammars)
    eos_ids, speculator = frozenset(eos_token_ids), None
    if proposer is not None:
        of_engine = (limits, costs, constraints, eos_ids, clock)
        speculator = Speculator(proposer, *of_engine, runs_ahead=runner.runs_ahead)
    room = BlockRoom(limits, scheduler.admission, scheduler.queues, pool)
    return EngineParts(
        runner=runner,
        limits=limits,
        clock=clock,
        fingerprint=fingerprint,
        eos_token_ids=eos_ids,
        pool=pool,
        tables=tables,
        scheduler=scheduler,
        room=room,
        prefixes=LentPrefixes(pool, cache, room.beside_running),
        output_lengths=estimator,
        step_costs=costs,
        step_record=StepRecord(),
        adapters=adapters,
        constraints=constraints,
        host=host,
        speculator=speculator,
    )
