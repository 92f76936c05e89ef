"""An engine alone in its process: no node, no roles, the KV in this process's own memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..core.config import EngineConfig
from ..core.request import Request
from . import fingerprint
from .engine import Engine
from .generations import LocalGenerations
from .limits import EngineLimits
from .runner import ModelRunner


class LocalEngine:
    """`generate` runs a batch of requests to their ends."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self.runner = runner
        self.model_dir: Path = runner.model_dir
        self.engine = Engine(
            runner,
            EngineLimits(
                num_blocks=runner.kv.num_blocks,
                block_size=config.block_size,
                max_model_len=runner.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
            ),
            LocalGenerations(runner.kv.num_blocks),
            fingerprint=fingerprint.short(runner.fingerprint),
            eos_token_ids=runner.eos_token_ids,
            enable_prefix_caching=config.enable_prefix_caching,
        )

    @classmethod
    def load(cls, config: EngineConfig, report: Callable[[str], None]) -> LocalEngine:
        """Load the model; raises StartupFailed."""
        runner = ModelRunner(config)
        tokens = runner.kv.num_blocks * config.block_size
        report(f"{runner.model_dir.name}: {runner.kv.num_blocks} KV blocks = {tokens} tokens")
        return cls(config, runner)

    def generate(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """Output token ids by request key, stop tokens included. Raises a request's error."""
        outputs: dict[str, list[int]] = {
            sample.key: [] for request in requests for sample in (request, *request.forks)
        }
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            step = self.engine.step()
            for token in step.tokens:
                outputs[token.key].append(token.token_id)
            for _, error in step.failed:
                raise error
        return outputs
