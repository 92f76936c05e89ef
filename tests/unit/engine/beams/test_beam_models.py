"""Beams of a model against transformers' `generate(num_beams=...)` in float32: the same sequences,
scores and order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VARIANTS, write_checkpoint
from effort import half
from transformers import PreTrainedModel

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine
from baton.engine.scheduling.outputs import FinishedBeam

PROMPT = [3, 14, 15, 92, 65, 35]
NUM_TOKENS = 12
PAD = 1
EOS = (5, 17, 40, 41, 42, 43)  # enough stop tokens for some beams to end


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalEngine, PreTrainedModel]]:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    theirs = write_checkpoint(folder, seed=1, has_varied_vectors=True, **VARIANTS["llama, gqa 4:2"])
    config = EngineConfig(model=str(folder), device="cpu", block_size=16, num_kv_blocks=200)
    local = LocalEngine.load(config, print)
    yield local, theirs
    local.close()


def ours(local: LocalEngine, n: int, **sampling: Any) -> list[FinishedBeam]:
    params = SamplingParams(
        use_beam_search=True,
        temperature=0.0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=2,
        **sampling,
    )
    forks = tuple(f"r-{index}" for index in range(1, n))
    request = Request("r", 0, tuple(PROMPT), params, fork_ids=forks)
    local.engine.add(request)
    found: dict[str, FinishedBeam] = {}
    while local.engine.has_work:
        output = local.engine.step()
        assert not output.failed
        found |= {beam.key: beam for beam in output.beams}
    return [found[key] for key in (request.key, *(fork.key for fork in request.forks))]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "beams"),
    half([True, False, "never"], [-1.0, 0.0, 1.0, 2.0], [(2, 1), (4, 4), (6, 3)]),
)
def test_beams_are_those_of_transformers(
    pair: tuple[LocalEngine, PreTrainedModel],
    early_stopping: bool | str,
    length_penalty: float,
    beams: tuple[int, int],
) -> None:
    """`beams` is (beam width, number of sequences to return)."""
    (local, theirs), (width, n) = pair, beams
    found = ours(
        local,
        n,
        best_of=width,
        length_penalty=length_penalty,
        early_stopping=str(early_stopping).lower(),
        stop_token_ids=EOS,
    )
    with torch.inference_mode():
        wanted: Any = theirs.generate(  # type: ignore[operator]
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
            do_sample=False,
            num_beams=width,
            num_return_sequences=n,
            max_new_tokens=NUM_TOKENS,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=list(EOS),
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_scores=True,
        )
    for beam, tokens, score in zip(found, wanted.sequences, wanted.sequences_scores, strict=True):
        length = len(beam.token_ids)
        assert list(beam.token_ids) == tokens[len(PROMPT) : len(PROMPT) + length].tolist()
        assert set(tokens[len(PROMPT) + length :].tolist()) <= {PAD}, "theirs goes on"
        total = sum(one.logprob for one in beam.logprobs)
        assert total / length**length_penalty == pytest.approx(score.item(), rel=1e-5, abs=1e-4)


def test_the_test_has_beams_that_end(pair: tuple[LocalEngine, PreTrainedModel]) -> None:
    beams = ours(pair[0], 6, best_of=6, stop_token_ids=EOS)
    assert {beam.finish_reason.value for beam in beams} == {"stop", "length"}


def test_penalties_count_and_logprobs_are_the_model_s_own(
    pair: tuple[LocalEngine, PreTrainedModel],
) -> None:
    local, theirs = pair
    beams = ours(
        local, 3, best_of=3, frequency_penalty=1.5, repetition_penalty=1.3, logit_bias=((9, 2.0),)
    )
    plain = ours(local, 3, best_of=3)
    assert beams[0].token_ids != plain[0].token_ids
    for beam in beams:
        with torch.inference_mode():
            rows = theirs(torch.tensor([[*PROMPT, *beam.token_ids]])).logits[0]
        rows = rows[len(PROMPT) - 1 : -1].float().log_softmax(-1)
        own = rows.gather(1, torch.tensor(beam.token_ids)[:, None])[:, 0].tolist()
        assert [one.logprob for one in beam.logprobs] == pytest.approx(own, abs=1e-4)
        tops = [[logprob for _, logprob in one.top] for one in beam.logprobs]
        for mine, row in zip(tops, rows, strict=True):
            assert mine == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


def test_min_tokens_forbids_the_end(pair: tuple[LocalEngine, PreTrainedModel]) -> None:
    for beam in ours(pair[0], 4, best_of=4, stop_token_ids=EOS, min_tokens=7):
        assert not set(beam.token_ids[:7]) & set(EOS)
