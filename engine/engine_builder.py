"""What an engine is made of, joined: pool and prefix cache, scheduler, sequences, steps, counts.

limits ─► pool ─► prefix cache ─► host memory, a disk ─► block tables ─► scheduler
                                                         sequences ─► steps ─► Engine
"""

from __future__ import annotations

from collections.abc import Collection

from ..constraints.grammars import Grammars
from ..core.ports import Clock, SystemClock
from .engine import Engine
from .engine_stats import EngineStats
from .execution.batch import Runner
from .execution.constraints import Constraints
from .input_batch import InputBatch
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
from .live_sequences import LiveSequences
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
from .stepper import Stepper


def build_engine(
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
) -> Engine:
    """Without `grammars` no request may have a constraint, without `adapters` none a LoRA
    adapter; `host_copier`: to host memory, where the prefix cache goes on, and from there
    to `disk`; `proposer`: speculation by its drafts."""
    clock = clock or SystemClock()
    estimator = estimator or OutputLengthEstimator()
    constraints = None if grammars is None else Constraints(grammars)
    pool = BlockPool(limits.num_blocks, generations)
    step_costs, step_record = StepCostEstimator(limits.graph_prompt_tokens), StepRecord()
    if not enable_prefix_caching:
        host_copier = None
    host_blocks = None if host_copier is None else HostBlocks()
    cache = PrefixCache(
        pool, is_enabled=enable_prefix_caching, observer=cache_observer, host=host_blocks
    )
    host: HostTier | None = None
    if host_copier is not None and host_blocks is not None:
        host = HostTier(
            host_copier,
            host_blocks,
            pool,
            cache,
            generations,
            step_costs.estimate,
            limits.block_size,
            None if disk is None else DiskTier(disk, host_blocks, clock),
        )
    host_prefixes = None if host is None else HostPrefixes(host, limits.block_size)
    tables = BlockTables(pool, cache, generations, limits.block_size, host_prefixes)
    tables.has_draft_model = isinstance(proposer, DraftModelProposer) and not proposer.is_head
    scheduler = Scheduler(limits, pool, tables, estimator, step_costs)
    if adapters is not None:
        scheduler.queues.parked = adapters.parked
    sequences = LiveSequences(
        runner,
        limits,
        scheduler,
        tables,
        adapters,
        constraints,
        fingerprint=fingerprint,
        eos_token_ids=eos_token_ids,
        on_end=estimator.observe,
    )
    speculator: Speculator | None = None
    if proposer is not None:
        speculator = Speculator(
            proposer,
            limits,
            step_costs,
            constraints,
            sequences.eos_token_ids,
            clock,
            runs_ahead=runner.runs_ahead,
        )
    stepper = Stepper(
        runner,
        scheduler,
        tables,
        sequences,
        InputBatch(limits.block_size, sequences.eos_token_ids),
        host=host,
        speculator=speculator,
        step_costs=step_costs,
        step_record=step_record,
        clock=clock,
        num_stages=limits.num_stages,
    )
    stats = EngineStats(
        limits,
        pool,
        scheduler,
        tables,
        sequences.by_key,
        estimator,
        adapters,
        step_record,
        step_costs,
        host,
        speculator,
    )
    return Engine(
        runner,
        limits,
        pool,
        tables,
        scheduler,
        sequences,
        stepper,
        adapters=adapters,
        prefixes=LentPrefixes(pool, cache, generations, scheduler.room_beside_running),
        stats=stats,
        step_costs=step_costs,
        step_record=step_record,
        clock=clock,
    )
