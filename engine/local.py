"""An engine without a node: no roles, no hand-off; its other ranks are child processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..core.engine_config import EngineConfig
from ..core.errors import BatonError
from ..core.request.request import Adapter, Request
from .assembly import Assembly, grammars_of, limits_of
from .execution.runner import ModelRunner
from .kv.block_pool import NUM_RESERVED_BLOCKS
from .kv.generations import Generations
from .lora.adapter_room import refuse_adapter
from .parallel.rank_processes import Ranks, start_ranks

_FOLLOWER_MODULE = "baton.engine.parallel.rank_worker"


class LocalEngine(Assembly):
    """For `LLM`, `baton generate` and tests."""

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, ranks: Ranks | None = None
    ) -> None:
        """`runner` is rank 0's, and the only one without `ranks`."""
        self.runner = runner
        self.model_dir: Path = runner.model_dir
        self.ranks = ranks
        followers = None if ranks is None else ranks.followers
        limits, generations = limits_of(config, runner), Generations(runner.kv.num_blocks)
        super().__init__(config, runner, followers, limits, generations, grammars_of(runner))
        self.begin()

    @classmethod
    def load(cls, config: EngineConfig, report: Callable[[str], None]) -> LocalEngine:
        """Load the model on all ranks; raises StartupFailed."""

        def lost(error: BatonError) -> None:
            report(f"engine lost: {error.message}")  # raised by the next step

        ranks = start_ranks(config, _FOLLOWER_MODULE, lost, report)
        try:
            runner = ModelRunner(ranks.config, None, ranks.communicator)
        except BaseException as error:  # a Ctrl-C too: the ranks are our children
            ranks.explain(error)
            ranks.close()
            if ranks.followers is not None:
                ranks.followers.check()  # the cause of it, if a rank was lost
            raise
        num_blocks = runner.kv.num_blocks - NUM_RESERVED_BLOCKS
        tokens = num_blocks * config.kv_block_size
        report(f"{runner.model_dir.name}: {num_blocks} KV blocks = {tokens} tokens")
        return cls(config, runner, ranks)

    def load_adapter(self, name: str, path: str) -> Adapter:
        """Read a LoRA adapter, for use in requests. Raises AdapterRefused, or InvalidRequest if the
        engine serves none."""
        if self.adapters is None or self.engine.adapters is None:
            raise refuse_adapter()
        found = self.adapters.read(path)
        self.engine.adapters.keep(found)
        return Adapter(name, found.digest, path)

    def close(self) -> None:
        """End the other ranks and release all memory; no step may be in flight. If a rank was lost,
        a GPU may wait for it forever: its memory is released with the process."""
        if self.ranks is not None:
            self.ranks.close()  # first: they write to this one's memory
        super().close()
        if not (self.runner.runs_ahead and self.ranks is not None and self.ranks.is_one_lost):
            self.runner.close()

    def generating(
        self, requests: Sequence[Request], outputs: dict[str, list[int]]
    ) -> Iterator[None]:
        """Run the requests to their ends, yielding after each step. Token ids, stop tokens
        included, are appended to `outputs` by request key. Raises a request's error."""
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
