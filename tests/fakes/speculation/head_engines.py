"""Engines over a model with a draft head, with all drafts recorded; their clock stands still, so
that all drafts pay off.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engines.integrity import check_integrity
from fakes.clock import FakeClock

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.scheduling.admission import OutputLengthEstimator
from baton.engine.speculation.draft_model import DraftModelProposer
from baton.engine.speculation.proposer import Context

from .eagle3_heads import VOCAB, head_tensors, make_head, write_head, write_target
from .mtp_heads import write_model_with_head


def eagle3(folder: Path) -> dict[str, Any]:
    """Write a model with an EAGLE-3 head; returns its --speculative-config."""
    write_target(folder)
    write_head(folder / "head", head_tensors(make_head()))
    return {"method": "eagle3", "model": str(folder / "head")}


def mtp(folder: Path) -> dict[str, Any]:
    """The same with a head for multi-token prediction."""
    write_model_with_head(folder)
    return {"method": "mtp"}


class Recorder(DraftModelProposer):
    """Records the drafts after each context."""

    def __init__(self, runner: ModelRunner, most: int) -> None:
        super().__init__(runner, most, is_head=True)
        self.found: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        proposed = super().propose(contexts)
        for context, drafts in zip(contexts, proposed, strict=True):
            self.found[context.sequence.key, tuple(context.token_ids)] = [*drafts]
        return proposed

    def share_of(self, other: Recorder) -> float:
        """The share of equal drafts, over the contexts that both have in common."""
        keys = [key for key in self.found.keys() & other.found.keys() if self.found[key]]
        assert keys
        return sum(self.found[key] == other.found[key] for key in keys) / len(keys)


class Optimist(OutputLengthEstimator):
    """Expects no growth: memory runs out, and preemption must repair it."""

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        return 1


def requests(num: int, max_tokens: int) -> list[Request]:
    """Greedy, sampled and top-p requests, with prompts of 5 to 40 tokens."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for index in range(num):
        length = int(torch.randint(5, 41, (), generator=draw))
        prompt = torch.randint(3, VOCAB, (length,), generator=draw).tolist()
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=(0.0, 0.0, 0.7)[index % 3],
            top_p=(1.0, 0.8)[index % 2],
            seed=index,
            logprobs=4,
        )
        found.append(Request(f"r{index}", 0, tuple(prompt), sampling))
    return found


class HeadEngine:
    """`fields`: its limits. Without `recorder` it drafts nothing."""

    def __init__(
        self, runner: ModelRunner, recorder: Recorder | None, num_blocks: int, **fields: int
    ) -> None:
        limits: dict[str, int] = {"max_model_len": 200, "max_num_batched_tokens": 32} | fields
        self.engine = Engine(
            EngineParts(
                runner,
                EngineLimits(num_blocks, 16, **limits),
                Generations(num_blocks),
                fingerprint="test",
                eos_token_ids=(),
                proposer=recorder,
                clock=FakeClock(),
                estimator=Optimist(),
            )
        )

    def run(self, requested: Sequence[Request]) -> dict[str, list[Any]]:
        """All outputs, by request."""
        found: dict[str, list[Any]] = {}
        for one in requested:
            self.engine.add(one)
        while self.engine.has_work:
            step = self.engine.step()
            assert not step.failed
            for token in step.tokens:
                found.setdefault(token.key, []).append(token)
        check_integrity(self.engine)
        return found

    @property
    def acceptance(self) -> float:
        counts = self.engine.stats.totals().speculation
        return sum(counts.accepted) / counts.num_draft_tokens
