"""An engine of the model that a runner has and of the other ranks, as its configuration says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..constraints.grammars import Grammars
from ..core.engine_config import EngineConfig
from ..core.errors import BatonError
from ..core.request.request import Adapter, Request
from .engine import Engine
from .execution.runner import ModelRunner
from .kv.disk.disk_thread import make_disk
from .kv.generations import Generations, LocalGenerations
from .kv.limits import EngineLimits
from .kv.prefix_cache import CacheObserver
from .lora.adapter_room import refuse_adapter, room_for
from .model import fingerprint
from .parallel.pipeline_runner import join_ranks
from .parallel.rank_group import RankGroup
from .parallel.rank_processes import Ranks, start_ranks
from .parallel.ranked_adapters import adapters_of
from .parallel.ranked_copies import host_copier_of
from .parallel.ranked_drafts import drafter_of
from .speculation.proposers import make_proposer

_FOLLOWER_MODULE = "baton.engine.parallel.rank_worker"


def limits_of(config: EngineConfig, runner: ModelRunner) -> EngineLimits:
    return EngineLimits(
        num_blocks=runner.kv.num_blocks,
        block_size=config.block_size,
        max_model_len=runner.max_model_len,
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefill_chunk_tokens=runner.prefill_chunk_tokens,
        graph_rows=runner.graph_rows,
        graph_prompt_tokens=runner.graph_prompt_tokens,
        num_stages=config.pipeline_parallel_size,
    )


def grammars_of(runner: ModelRunner) -> Grammars:
    return Grammars(runner.model_dir, runner.model_config.vocab_size, runner.eos_token_ids)


class Assembly:
    """`engine`, and what else its configuration asks for: `adapters`, of all ranks, and a disk."""

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
        self._host_copier = host_copier_of(runner, followers)
        self._disk = make_disk(config, runner.host_copier, short)
        self.adapters = adapters_of(runner.adapters, followers)
        self.engine = Engine(
            join_ranks(runner, followers, config.pipeline_parallel_size),
            limits,
            generations,
            fingerprint=short,
            eos_token_ids=runner.eos_token_ids,
            enable_prefix_caching=config.enable_prefix_caching,
            cache_observer=cache_observer,
            grammars=grammars,
            host_copier=self._host_copier,
            disk=self._disk,
            adapters=room_for(self.adapters, config.max_loras, config.num_host_adapters),
            proposer=make_proposer(config.speculation, drafter_of(runner, followers)),
        )
        self.engine.promise.tbt_target_s = config.tbt_target_s

    def begin(self) -> None:
        """Let there be host memory and a disk; steps take longer beside it."""
        if self._host_copier is not None:
            self._host_copier.begin()
        if self._disk is not None:
            self._disk.begin()

    def close(self) -> None:
        """No step may be in flight."""
        if self._disk is not None:
            self._disk.close()


class LocalEngine(Assembly):
    """Without a node: no roles, nobody who pulls; its other ranks are this process's children."""

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, ranks: Ranks | None = None
    ) -> None:
        """`runner` is rank 0's, and the only one without `ranks`."""
        self.runner = runner
        self.model_dir: Path = runner.model_dir
        self.ranks = ranks
        followers = None if ranks is None else ranks.followers
        limits, generations = limits_of(config, runner), LocalGenerations(runner.kv.num_blocks)
        super().__init__(config, runner, followers, limits, generations, grammars_of(runner))
        self.begin()

    @classmethod
    def load(cls, config: EngineConfig, report: Callable[[str], None]) -> LocalEngine:
        """Load the model on all ranks; raises StartupFailed."""

        def lost(error: BatonError) -> None:
            report(f"engine lost: {error.message}")  # the next step raises it

        ranks = start_ranks(config, _FOLLOWER_MODULE, lost, report)
        try:
            runner = ModelRunner(ranks.config, None, ranks.communicator)
        except BaseException:  # a Ctrl-C too: the ranks are our children
            ranks.close()
            if ranks.followers is not None:
                ranks.followers.check()  # the cause of it, if a rank was lost
            raise
        tokens = runner.kv.num_blocks * config.block_size
        report(f"{runner.model_dir.name}: {runner.kv.num_blocks} KV blocks = {tokens} tokens")
        return cls(config, runner, ranks)

    def load_adapter(self, name: str, path: str) -> Adapter:
        """Read a LoRA adapter for requests to name. Raises AdapterRefused, or InvalidRequest where
        none are served."""
        if self.adapters is None or self.engine.adapters is None:
            raise refuse_adapter()
        found = self.adapters.read(path)
        self.engine.adapters.keep(found)
        return Adapter(name, found.digest, path)

    def close(self) -> None:
        """End the other ranks and give all memory back; no step may be in flight."""
        if self.ranks is not None:
            self.ranks.close()  # first: they write to this one's memory
        super().close()
        self.runner.close()

    def generating(
        self, requests: Sequence[Request], outputs: dict[str, list[int]]
    ) -> Iterator[None]:
        """Run them to their ends, step by step: `outputs` grow, token ids by request key, with
        stop tokens. Raises a request's error."""
        for request in requests:
            outputs |= {sample.key: [] for sample in (request, *request.forks)}
            self.engine.add(request)
        while self.engine.has_work:
            step = self.engine.step()
            for token in step.tokens:
                outputs[token.key].append(token.token_id)
            for beam in step.beams:
                outputs[beam.key] += beam.token_ids
            for _, error in step.failed:
                raise error
            yield
