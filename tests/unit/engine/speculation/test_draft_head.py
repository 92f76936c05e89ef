"""Draft heads of small models, of EAGLE-3 and for multi-token prediction: drafts equal the
formula's, KV is handed over, outputs equal those without a head, bad heads are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import half, number
from engines.integrity import check_integrity
from fakes.clock import FakeClock
from fakes.speculation.eagle3_heads import (
    head_config,
    head_tensors,
    make_head,
    write_head,
    write_target,
)
from fakes.speculation.mtp_heads import PREFIX, add_tensors, write_model_with_head

from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
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

BLOCKS, MOST = 120, 4


@dataclass
class Files:
    """A model and its head; `drafts(tokens, n)` computes n drafts behind tokens by the formula."""

    drafts: Callable[[Sequence[int], int], list[int]]
    method: str
    target_dir: Path
    head_dir: Path | None = None

    def runner(self, head_dir: Path | None = None, *, has_head: bool = True) -> ModelRunner:
        fields: dict[str, Any] = {}
        if has_head:
            drafting = {"method": self.method, "num_speculative_tokens": MOST}
            if folder := head_dir or self.head_dir:
                drafting["model"] = str(folder)
            fields = {"speculative_config": json.dumps(drafting)}
        model = str(self.target_dir)
        return ModelRunner(EngineConfig(model=model, device="cpu", num_kv_blocks=BLOCKS, **fields))


def eagle3_files(folder: Path) -> Files:
    model = write_target(folder / "target")
    write_head(folder / "head", head_tensors(make_head()))
    drafts = partial(make_head().drafts, model)
    return Files(drafts, "eagle3", folder / "target", folder / "head")


def mtp_files(folder: Path) -> Files:
    return Files(write_model_with_head(folder).drafts, "mtp", folder)


@pytest.fixture(scope="module", params=[eagle3_files, mtp_files])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    made: Files = request.param(tmp_path_factory.mktemp("head"))
    return made


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return eagle3_files(tmp_path_factory.mktemp("eagle3"))


@pytest.fixture(scope="module")
def runner(files: Files) -> Iterator[ModelRunner]:
    made = files.runner()
    yield made
    made.close()


class Recorder(DraftModelProposer):
    """Records the tokens of each sequence and the drafts behind them."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner, MOST)
        self.found: list[tuple[str, list[int], list[int]]] = []

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        proposed = super().propose(contexts)
        for context, drafts in zip(contexts, proposed, strict=True):
            self.found.append((context.sequence.key, list(context.token_ids), list(drafts)))
        return proposed


class Optimist(OutputLengthEstimator):
    """Estimates outputs as one token, so that memory runs out and sequences are preempted."""

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        return 1


def engine_of(
    runner: ModelRunner, proposer: Recorder | None, num_blocks: int = BLOCKS, **fields: Any
) -> Engine:
    limits: dict[str, int] = {"max_num_batched_tokens": 24, "max_model_len": 400}
    return Engine(
        EngineParts(
            runner,
            EngineLimits(num_blocks, 16, **(limits | fields.pop("limits", {}))),
            Generations(num_blocks),
            fingerprint="test",
            eos_token_ids=(),
            proposer=proposer,
            **fields,
        )
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
    check_integrity(engine)
    return tokens


def outputs(engine: Engine, requested: Sequence[Request]) -> dict[str, list[int]]:
    for one in requested:
        engine.add(one)
    return run(engine)


def acceptance(engine: Engine) -> float:
    counts = engine.stats.totals().speculation
    return sum(counts.accepted) / counts.num_draft_tokens


def test_drafts_are_those_of_the_formula(files: Files, runner: ModelRunner) -> None:
    """Drafts equal the formula's for chunked prompts, batches, and any drafts accepted before."""
    recorder = Recorder(runner)
    engine = engine_of(runner, recorder, enable_prefix_caching=False)
    outputs(engine, requests())
    num_different = 0
    for _, tokens, drafts in recorder.found:
        num_different += files.drafts(tokens, len(drafts)) != drafts
    assert len(recorder.found) > 40 and sum(len(found) for *_, found in recorder.found) > 100
    assert num_different <= 1, "but where two tokens are nearly equal"
    assert 0.2 < acceptance(engine) < 1.0


@pytest.mark.parametrize(("temperature", "num_blocks"), half([0.0, 0.7], [14, BLOCKS]))
def test_outputs_are_those_without_a_head(
    files: Files, runner: ModelRunner, temperature: float, num_blocks: int
) -> None:
    """Outputs equal those without a head: with and without preemptions, and from the
    prefix cache."""
    requested = requests(temperature)
    plain_runner = files.runner(has_head=False)
    plain = outputs(engine_of(plain_runner, None), requested)
    plain_runner.close()
    engine = engine_of(runner, Recorder(runner), num_blocks, estimator=Optimist())
    assert outputs(engine, requested) == plain
    assert sum(engine.stats.totals().speculation.accepted) > 20
    assert engine.stats.totals().num_preemptions or num_blocks == BLOCKS
    assert outputs(engine, requested) == plain


def test_acceptance_behind_a_hand_off_is_that_of_one_engine(
    files: Files, runner: ModelRunner
) -> None:
    """The head's KV is a layer of the handed-over blocks, so drafts are the same except in the
    first step. The clock stands still, so that all drafts pay."""
    requested = requests(num=10, max_tokens=number(60, 120))
    recorder = Recorder(runner)
    same: dict[str, Any] = {
        "enable_prefix_caching": False,
        "clock": FakeClock(),
        "limits": {"max_num_batched_tokens": 200},
    }
    engine = engine_of(runner, recorder, **same)
    expected = outputs(engine, requested)
    other = files.runner()
    layers = other.kv.layout.num_layers
    assert layers == other.model_config.num_layers + 1 and "draft_model" in other.fingerprint
    held, behind = engine_of(runner, None, enable_prefix_caching=False), Recorder(other)
    decoding = engine_of(other, behind, **same)
    for one in requested:
        held.add(one, hold=True)
    tokens = run(held)
    for one in requested:
        decoding.reserve(one)
        reservation = decoding.next_reservation()
        assert reservation is not None
        first, last = reservation.num_cached_blocks, reservation.num_known_blocks
        theirs = held.block_refs(one.key, first, last).block_ids.tolist()
        other.kv.tensor[[*reservation.block_ids[first:last]]] = runner.kv.tensor[theirs]
        decoding.start(reservation, tokens[one.key][0])
        held.abort(one.key)
    for key, rest in run(decoding).items():
        tokens[key] += rest
    assert tokens == expected
    drafts = {(key, tuple(known)): found for key, known, found in recorder.found}
    equal = [
        drafts[key, tuple(known)][: len(found)] == found[: len(drafts[key, tuple(known)])]
        for key, known, found in behind.found
        if found and drafts.get((key, tuple(known)))
    ]
    assert len(equal) > 20 and sum(equal) >= len(equal) - 1
    one, handed_over = acceptance(engine), acceptance(decoding)
    other.close()
    assert handed_over == pytest.approx(one, rel=0.02)


CONFIG_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 65}, "vocab_size of 65, the model one of 64"),
    ({"hidden_size": 64}, "config.json.*hidden_size is 64, the model's hidden_size 48"),
    ({"target_hidden_size": 64}, "target_hidden_size is 64, the model's hidden_size 48"),
    ({"head_dim": 32}, "head_dim of 32, the model one of 16"),
    ({"num_key_value_heads": 4}, "num_key_value_heads of 4"),
    ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    ({"draft_vocab_size": 65}, "draft_vocab_size is above the model's 64"),
    ({"draft_vocab_size": 64}, "lm_head.weight in .* has shape"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"eagle_config": None}, r"eagle_aux_hidden_state_layer_ids is \[1, 1, 0\]"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, r"is \[0, 1, 3\], not 3"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
    ({"architectures": ["LlamaForCausalLM"]}, "is not supported"),
]


@pytest.mark.parametrize(("changes", "reason"), CONFIG_FAULTS)
def test_what_does_not_fit_the_model_is_refused(
    eagle3: Files, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    write_head(tmp_path, head_tensors(make_head()), head_config() | changes)
    with pytest.raises(StartupFailed, match=reason):
        eagle3.runner(tmp_path)


TENSOR_FAULTS: list[tuple[str, torch.Tensor | None, str]] = [
    ("fc.weight", None, "lacks the tensor fc.weight"),
    ("midlayer.hidden_norm.weight", None, "lacks the tensor midlayer.hidden_norm.weight"),
    ("lm_head.weight", None, "lacks the tensor lm_head.weight"),
    ("d2t", None, "lacks the tensor d2t"),
    ("fc.weight", torch.zeros(48, 96), r"fc.weight in .*shape \[48, 96\].*\[48, 144\]"),
    ("fc.bias", torch.zeros(48), "has the tensor fc.bias"),
    ("d2t", torch.zeros(59, dtype=torch.int64), r"d2t in .*shape \[59\], not of 60 integers"),
    ("d2t", torch.zeros(60), "d2t in .* is of type torch.float32"),
    ("d2t", torch.full((60,), 64), "d2t in .* has numbers of 64"),
    ("d2t", torch.full((60,), 5), "d2t has invalid"),
    ("d2t", torch.eye(60, dtype=torch.int64)[0], "d2t has invalid or duplicate ids"),
]


@pytest.mark.parametrize(("name", "tensor", "reason"), TENSOR_FAULTS)
def test_a_checkpoint_that_is_no_head_is_refused(
    eagle3: Files, tmp_path: Path, name: str, tensor: torch.Tensor | None, reason: str
) -> None:
    tensors = head_tensors(make_head())
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    write_head(tmp_path, tensors)
    with pytest.raises(StartupFailed, match=reason):
        eagle3.runner(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "without", "reason"),
    [
        ({}, f"{PREFIX}.input_proj.weight", "lacks the tensor .*input_proj.weight"),
        ({}, f"{PREFIX}.mlp.up_proj.weight", "lacks the tensor .*mlp.up_proj.weight"),
        ({f"{PREFIX}.input_proj.weight": torch.zeros(48, 48)}, None, r"shape \[48, 48\]"),
        ({f"{PREFIX}.more": torch.zeros(2)}, None, "has the tensor .*more"),
    ],
)
def test_a_model_whose_head_is_none_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], without: str | None, reason: str
) -> None:
    files = mtp_files(tmp_path)
    add_tensors(tmp_path, tensors, without)
    with pytest.raises(StartupFailed, match=reason):
        files.runner()


def test_a_model_without_a_head_of_its_own_is_refused(eagle3: Files) -> None:
    files = Files(eagle3.drafts, "mtp", eagle3.target_dir)
    with pytest.raises(StartupFailed, match='LlamaForCausalLM has no head for "method": "mtp"'):
        files.runner()
