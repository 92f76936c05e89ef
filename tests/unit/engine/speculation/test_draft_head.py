"""An EAGLE-3 head beside a small model: its drafts against the formula, its KV through a hand-off,
outputs as without it, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_heads import (
    ReferenceHead,
    head_config,
    head_tensors,
    trained_head,
    write_head,
    write_target,
)
from transformers import PreTrainedModel

from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.core.request.request import Request, SamplingParams
from baton.engine.engine import Engine
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.generations import LocalGenerations
from baton.engine.kv.limits import EngineLimits
from baton.engine.speculation.draft_model import DraftModelProposer
from baton.engine.speculation.proposer import Context

BLOCKS, MOST = 120, 4


@dataclass
class Files:
    model: PreTrainedModel
    head: ReferenceHead
    target_dir: Path
    head_dir: Path

    def runner(self, head_dir: Path | None = None, *, has_head: bool = True) -> ModelRunner:
        fields: dict[str, Any] = {}
        if has_head:
            folder = str(head_dir or self.head_dir)
            drafting = {"method": "eagle3", "model": folder, "num_speculative_tokens": MOST}
            fields = {"speculative_config": json.dumps(drafting)}
        model = str(self.target_dir)
        return ModelRunner(EngineConfig(model=model, device="cpu", num_kv_blocks=BLOCKS, **fields))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("eagle3")
    model = write_target(folder / "target")
    head = trained_head(model)
    write_head(folder / "head", head_tensors(head))
    return Files(model, head, folder / "target", folder / "head")


@pytest.fixture(scope="module")
def runner(files: Files) -> Iterator[ModelRunner]:
    made = files.runner()
    yield made
    made.close()


class Recorder(DraftModelProposer):
    """Keeps what was drafted behind which tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner, MOST)
        self.found: list[tuple[str, list[int], list[int]]] = []

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        proposed = super().propose(contexts)
        for context, drafts in zip(contexts, proposed, strict=True):
            self.found.append((context.key, list(context.token_ids), list(drafts)))
        return proposed


def engine_of(
    runner: ModelRunner, proposer: Recorder | None, num_blocks: int = BLOCKS, **fields: Any
) -> Engine:
    limits: dict[str, int] = {"max_num_batched_tokens": 24, "max_model_len": 400}
    return Engine(
        runner,
        EngineLimits(num_blocks, 16, **(limits | fields.pop("limits", {}))),
        LocalGenerations(num_blocks),
        fingerprint="test",
        eos_token_ids=(),
        proposer=proposer,
        **fields,
    )


def requests(temperature: float = 0.0, num: int = 6, max_tokens: int = 40) -> list[Request]:
    draw = torch.Generator().manual_seed(5)
    sampling = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=index)
        for index in range(num)
    ]
    return [
        Request(f"r{i}", 0, tuple(torch.randint(3, 64, (9 + 7 * i,), generator=draw).tolist()), one)
        for i, one in enumerate(sampling)
    ]


def run(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        step = engine.step()
        assert not step.failed
        for one in step.tokens:
            tokens.setdefault(one.key, []).append(one.token_id)
    engine.check_integrity()
    return tokens


def outputs(engine: Engine, asked: Sequence[Request]) -> dict[str, list[int]]:
    for one in asked:
        engine.add(one)
    return run(engine)


def acceptance(engine: Engine) -> float:
    counts = engine.totals().speculation
    return sum(counts.accepted) / counts.num_draft_tokens


def test_drafts_are_those_of_the_formula(files: Files, runner: ModelRunner) -> None:
    """Prompts in chunks, several sequences in a step, whatever was accepted before."""
    recorder = Recorder(runner)
    engine = engine_of(runner, recorder, enable_prefix_caching=False)
    outputs(engine, requests())
    num_different = 0
    for _, tokens, drafts in recorder.found:
        num_different += files.head.drafts(files.model, tokens, len(drafts)) != drafts
    assert len(recorder.found) > 40 and sum(len(found) for *_, found in recorder.found) > 100
    assert num_different <= 1, "but where two tokens are nearly equal"
    assert 0.2 < acceptance(engine) < 1.0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("num_blocks", [BLOCKS, 18])
def test_outputs_are_those_without_a_head(
    files: Files, runner: ModelRunner, temperature: float, num_blocks: int
) -> None:
    """With memory for all, and with preemptions; the second time out of the prefix cache."""
    asked = requests(temperature)
    plain_runner = files.runner(has_head=False)
    plain = outputs(engine_of(plain_runner, None), asked)
    plain_runner.close()
    engine = engine_of(runner, Recorder(runner), num_blocks)
    assert outputs(engine, asked) == plain
    assert sum(engine.totals().speculation.accepted) > 20
    assert engine.totals().num_preemptions or num_blocks == BLOCKS
    assert outputs(engine, asked) == plain


def test_acceptance_behind_a_hand_off_is_that_of_one_engine(
    files: Files, runner: ModelRunner
) -> None:
    """The head's KV is a layer of the blocks; but for the first step the drafts are the same."""
    asked = requests(num=8, max_tokens=60)
    recorder = Recorder(runner)
    engine = engine_of(runner, recorder, enable_prefix_caching=False)
    expected = outputs(engine, asked)
    other = files.runner()
    layers = other.kv.layout.num_layers
    assert layers == other.model_config.num_layers + 1 and "draft_model" in other.fingerprint
    held, behind = engine_of(runner, None, enable_prefix_caching=False), Recorder(other)
    decoding = engine_of(other, behind, enable_prefix_caching=False)
    for one in asked:
        held.add(one, hold=True)
    tokens = run(held)
    for one in asked:
        reservation = decoding.reserve(one)
        assert reservation is not None
        first, last = reservation.num_cached_blocks, reservation.num_known_blocks
        for ref in held.block_refs(one.key, first, last):
            block = runner.kv.tensor[ref.block_id]
            other.kv.tensor[reservation.block_ids[ref.index]] = block
        decoding.start(reservation, tokens[one.key][0])
        held.abort(one.key)
    for key, rest in run(decoding).items():
        tokens[key] += rest
    assert tokens == expected
    drafts = {(key, tuple(known)): found for key, known, found in recorder.found}
    same = [
        drafts[key, tuple(known)][: len(found)] == found[: len(drafts[key, tuple(known)])]
        for key, known, found in behind.found
        if found and drafts.get((key, tuple(known)))
    ]
    assert len(same) > 20 and sum(same) >= len(same) - 1
    one, handed_over = acceptance(engine), acceptance(decoding)
    other.close()
    print(f"acceptance {one:.3f}, behind a hand-off {handed_over:.3f}")
    assert handed_over == pytest.approx(one, rel=0.06)
