"""The bundled draft model with the bundled model: its drafts, the contents of blocks, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from engines.generation import outputs_of
from engines.integrity import check_integrity
from fakes.clock import FakeClock
from tokenizers import Tokenizer

from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.generations import Generations
from baton.engine.local import LocalEngine
from baton.engine.speculation.draft_model import DraftModelProposer
from baton.engine.speculation.proposer import Context

MODELS = Path(__file__).resolve().parents[4] / "models"
TEXTS = ("def area(self):\n    return self.width * self.", "import os\nimport sys\n\n\nclass A")


def config(model: str = "demo", draft: str | None = "demo-draft", **fields: Any) -> EngineConfig:
    if draft is not None:
        drafting = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
        fields |= {"speculative_config": json.dumps(drafting)}
    return EngineConfig(model=model, device="cpu", num_kv_blocks=160, **fields)


class Recorder(DraftModelProposer):
    """Records the tokens of each sequence and the drafts behind them."""

    found: list[tuple[str, list[int], list[int]]]

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        proposed = super().propose(contexts)
        for context, drafts in zip(contexts, proposed, strict=True):
            self.found.append((context.sequence.key, list(context.token_ids), list(drafts)))
        return proposed


def engine_of(local: LocalEngine) -> tuple[Engine, Recorder]:
    recorder = Recorder(local.runner, 4)
    recorder.found = []
    engine = Engine(
        EngineParts(
            local.runner,
            local.engine.limits,
            Generations(160),
            fingerprint="test",
            eos_token_ids=(),
            proposer=recorder,
            clock=FakeClock(),
        )
    )
    return engine, recorder


@pytest.fixture(scope="module")
def demo() -> Iterator[LocalEngine]:
    local = LocalEngine.load(config(), lambda line: None)
    yield local
    local.close()


def requests(temperatures: Sequence[float] = (0.0, 0.8)) -> list[Request]:
    tokenizer = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json"))
    return [
        Request(
            f"r{index}",
            0,
            tuple(tokenizer.encode(TEXTS[index % 2]).ids),
            SamplingParams(max_tokens=40, temperature=temperature, top_k=50, seed=index),
        )
        for index, temperature in enumerate(temperatures)
    ]


def run(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        step = engine.step()
        assert not step.failed
        for one in step.tokens:
            tokens.setdefault(one.key, []).append(one.token_id)
    check_integrity(engine)
    return tokens


def test_drafts_are_what_the_draft_model_says_alone(demo: LocalEngine) -> None:
    """Drafts equal the draft model's own output: its KV is that of the sequence's tokens, whatever
    was accepted before."""
    engine, recorder = engine_of(demo)
    requested = {one.key: one for one in requests((0.0, 0.8, 0.0, 0.8))}
    for one in requested.values():
        engine.add(one)
    run(engine)
    accepted = engine.stats.totals().speculation.accepted
    assert accepted[-1] and accepted[0] < engine.stats.totals().speculation.num_drafts
    alone = LocalEngine.load(config("demo-draft", None), lambda line: None)
    num_different = 0
    for index, (key, tokens, drafts) in enumerate(recorder.found):
        sampling = SamplingParams(
            max_tokens=len(drafts),
            temperature=requested[key].sampling.temperature,
            top_k=50,
            seed=requested[key].sampling.seed,
            ignore_eos=True,
        )
        request = Request(f"d{index}", 0, tuple(tokens), sampling)
        num_different += outputs_of(alone, [request])[request.key] != drafts
    alone.close()
    assert len(recorder.found) > 30
    assert num_different <= 1, "but where two tokens are nearly equal"


def test_blocks_hold_the_kv_of_both_and_carry_it_over(demo: LocalEngine) -> None:
    """Blocks carry the draft model's KV: from its first step, a puller drafts as one engine."""
    engine, recorder = engine_of(demo)
    for one in requests():
        engine.add(one)
    expected = run(engine)
    source, puller = demo, LocalEngine.load(config(), lambda line: None)
    plain = ModelRunner(config(draft=None))
    layers = demo.runner.kv.layout.num_layers
    assert layers == plain.kv.layout.num_layers + demo_draft_layers()
    assert demo.runner.fingerprint.keys() - plain.fingerprint.keys() == {"draft_model"}
    plain.close()
    held, _ = engine_of(source)
    decoding, behind = engine_of(puller)
    for one in requests():
        held.add(one, hold=True)
    tokens = run(held)
    for one in requests():
        decoding.reserve(one)
        reservation = decoding.next_reservation()
        assert reservation is not None
        first, last = reservation.num_cached_blocks, reservation.num_known_blocks
        theirs = held.block_refs(one.key, first, last).block_ids.tolist()
        ours = [*reservation.block_ids[first:last]]
        puller.runner.kv.tensor[ours] = source.runner.kv.tensor[theirs]
        decoding.start(reservation, tokens[one.key][0])
        held.abort(one.key)
    for key, rest in run(decoding).items():
        tokens[key] += rest
    puller.close()
    assert tokens == expected
    drafts = {(key, tuple(known)): drafts for key, known, drafts in recorder.found}
    same = [
        drafts[key, tuple(known)][: len(found)] == found[: len(drafts[key, tuple(known)])]
        for key, known, found in behind.found
        if (key, tuple(known)) in drafts
    ]
    assert len(same) > 10 and sum(same) >= len(same) - 1


def second_turn(demo: LocalEngine, *, is_first_drafted: bool) -> tuple[list[int], float]:
    """The tokens of a second turn whose first turn is cached, and its share of accepted drafts."""
    demo.runner.kv.tensor.normal_(generator=torch.Generator().manual_seed(3))  # random KV
    engine, _ = engine_of(demo)
    first, other = requests((0.0, 0.0))
    sampling = replace(first.sampling, max_tokens=90, speculative=is_first_drafted)
    engine.add(replace(first, sampling=sampling))
    (answer,) = run(engine).values()
    before = engine.stats.totals().speculation
    assert bool(before.num_drafts) == is_first_drafted
    prompt = (*first.prompt_token_ids, *answer, *other.prompt_token_ids)
    engine.add(Request("second", 0, prompt, replace(sampling, max_tokens=60, speculative=True)))
    (tokens,) = run(engine).values()
    totals = engine.stats.totals()
    assert totals.prefix_hit_tokens > 80
    num_drafts = totals.speculation.num_draft_tokens - before.num_draft_tokens
    return tokens, (sum(totals.speculation.accepted) - sum(before.accepted)) / num_drafts


def test_a_second_turn_is_drafted_as_if_the_first_had_been(demo: LocalEngine) -> None:
    """A turn decoded without drafts is cached without the draft model's KV; that KV is computed
    later, and the next turn's acceptance is the same."""
    tokens, share = second_turn(demo, is_first_drafted=True)
    others, other_share = second_turn(demo, is_first_drafted=False)
    assert others == tokens
    assert other_share == pytest.approx(share, abs=0.05) and share > 0.4


def demo_draft_layers() -> int:
    found = json.loads((MODELS / "demo-draft" / "config.json").read_text())
    return int(found["num_hidden_layers"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 300}, "vocab_size of 300, the model one of 4096"),
        ({"vocab_size": 4096, "head_dim": 32}, "head_dim of 32, the model one of 64"),
        ({"vocab_size": 4096, "head_dim": 64, "num_key_value_heads": 4}, "num_key_value_heads"),
    ],
)
def test_unfit_draft_models_are_refused(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    write_checkpoint(tmp_path, **changes)
    with pytest.raises(StartupFailed, match=reason):
        ModelRunner(config(draft=str(tmp_path)))


def test_another_vocabulary_of_the_same_size_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(MODELS / "demo-draft", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["self"], tokenizer["model"]["vocab"]["return"] = 1, 2
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(StartupFailed, match="another vocabulary"):
        ModelRunner(config(draft=str(folder)))


def test_a_draft_model_with_fewer_kv_heads_computes_what_it_does_alone(tmp_path: Path) -> None:
    """Draft KV heads are repeated in the blocks to match the target's; both have random weights."""
    sizes = {"vocab_size": 97, "head_dim": 16, "hidden_size": 64}
    write_checkpoint(tmp_path / "target", num_attention_heads=8, num_key_value_heads=4, **sizes)
    write_checkpoint(tmp_path / "draft", num_attention_heads=4, num_key_value_heads=1, **sizes)
    drafting = ModelRunner(config(str(tmp_path / "target"), str(tmp_path / "draft")))
    alone = ModelRunner(config(str(tmp_path / "draft"), None))
    assert alone.kv.layout.num_kv_heads == 1 and drafting.kv.layout.num_kv_heads == 4
    proposer = DraftModelProposer(drafting, 4)
    engine = Engine(
        EngineParts(
            drafting,
            LocalEngine(config(str(tmp_path / "draft"), None), alone).engine.limits,
            Generations(160),
            fingerprint="test",
            eos_token_ids=(),
            proposer=proposer,
        )
    )
    prompt, sampling = tuple(range(5, 45)), SamplingParams(max_tokens=9, temperature=0.0)
    engine.add(Request("a", 0, prompt, sampling))
    engine.step()
    sequence = engine.by_key["a/0"]
    assert engine._scheduler.preemption.make_room_for_drafts(sequence, 4)
    (drafts,) = proposer.propose([Context(sequence, 4)])
    other = LocalEngine(config(str(tmp_path / "draft"), None), alone)
    tokens = tuple(sequence.token_ids)
    request = Request("b", 0, tokens, SamplingParams(max_tokens=4, temperature=0.0))
    assert outputs_of(other, [request])["b/0"] == list(drafts)
    engine.abort("a/0")
    for runner in (drafting, alone):
        runner.close()
