"""An engine over a runner's model and the other ranks, made from its configuration."""

from __future__ import annotations

from ..constraints.grammars import Grammars
from ..core.engine_config import EngineConfig
from .engine import Engine
from .engine_parts import EngineParts
from .execution.runner import ModelRunner
from .execution.runner_protocols import Drafter, Runner
from .kv.disk.disk_thread import make_disk
from .kv.generations import Generations
from .kv.host_copies import HostCopier
from .kv.limits import EngineLimits
from .kv.prefix_cache import CacheObserver
from .lora.adapter_room import AdapterRoom
from .lora.rank_adapters import RankAdapters
from .model import fingerprint
from .parallel.parallel_runner import ParallelRunner, RankedDrafter
from .parallel.pipeline_runner import PipelineRunner
from .parallel.rank_group import RankGroup
from .parallel.ranked_adapters import RankedAdapters
from .parallel.ranked_copies import RankedCopier
from .scheduling.sequence import Sequence
from .speculation.proposers import make_proposer


def limits_of(config: EngineConfig, runner: ModelRunner) -> EngineLimits:
    return EngineLimits(
        num_blocks=runner.kv.num_blocks,
        block_size=config.kv_block_size,
        max_model_len=runner.max_model_len,
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk_tokens=runner.prefill_chunk_tokens,
        graph_rows=runner.graph_rows,
        graph_prompt_tokens=runner.graph_prompt_tokens,
        num_stages=config.pipeline_parallel_size,
        block_bytes=runner.engine_block_bytes,
    )


def grammars_of(runner: ModelRunner) -> Grammars:
    return Grammars(runner.model_dir, runner.model_config.vocab_size, runner.eos_token_ids)


class Assembly:
    """`engine` with what its configuration enables: `adapters` of all ranks, a disk."""

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        followers: RankGroup | None,
        limits: EngineLimits,
        generations: Generations,
        grammars: Grammars,
        cache_observer: CacheObserver | None = None,
    ) -> None:
        """`runner` is rank 0's, and the only one without `followers`. Raises StartupFailed."""
        short = fingerprint.short(runner.fingerprint)
        steps: Runner = runner
        drafter: Drafter = runner
        self._host_copier: HostCopier | None = runner.host_copier
        self.adapters: RankAdapters | RankedAdapters | None = runner.adapters
        if followers is not None:
            kind = PipelineRunner if config.pipeline_parallel_size > 1 else ParallelRunner
            steps, drafter = kind(runner, followers), RankedDrafter(runner, followers)
            if runner.host_copier is not None:
                block_bytes = runner.engine_block_bytes
                self._host_copier = RankedCopier(runner.host_copier, followers, block_bytes)
            if runner.adapters is not None:
                self.adapters = RankedAdapters(runner.adapters, followers)
        self._disk = make_disk(config, runner.host_copier, short)
        room: AdapterRoom[Sequence] | None = None
        if self.adapters is not None:
            room = AdapterRoom(self.adapters, config.max_loras, config.num_host_adapters)
        self.engine = Engine(
            EngineParts(
                steps,
                limits,
                generations,
                fingerprint=short,
                eos_token_ids=runner.eos_token_ids,
                enable_prefix_caching=config.enable_prefix_caching,
                cache_observer=cache_observer,
                grammars=grammars,
                host_copier=self._host_copier,
                disk=self._disk,
                adapters=room,
                proposer=make_proposer(config.speculation, drafter),
            )
        )
        self.engine.promise.tbt_target_s = config.tbt_target_s

    def begin(self) -> None:
        """Set up host memory and a disk in the background; steps take longer meanwhile."""
        if self._host_copier is not None:
            self._host_copier.begin()
        if self._disk is not None:
            self._disk.begin()

    def close(self) -> None:
        """No step may be in flight."""
        if self._disk is not None:
            self._disk.close()
