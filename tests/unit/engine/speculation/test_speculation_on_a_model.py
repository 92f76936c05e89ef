"""Speculation on the bundled model on a CPU: the same tokens as without it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from effort import number
from engines.integrity import check_integrity
from fakes.proposer import FakeProposer
from tokenizers import Tokenizer

from baton.constraints.grammars import Grammars
from baton.core.engine_config import EngineConfig
from baton.core.request.constraint import Constraint, ConstraintKind
from baton.core.request.request import Request, token_key
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.kv.generations import Generations
from baton.engine.local import LocalEngine
from baton.engine.scheduling.outputs import TokenOutput
from baton.engine.speculation.draft_model import DraftModelProposer
from baton.engine.speculation.ngram import NgramProposer
from baton.engine.speculation.proposer import Context, Proposer
from baton.kernels.sampling.sample_spec import SampleSpec
from baton.kernels.sampling.sampling import sample

DEMO = Path(__file__).resolve().parents[4] / "models" / "demo"
CODE = "def area(self):\n    return self.width * self.height\n\ndef side(self):\n    return self."


class Demo:
    """An engine over the bundled model, with any proposer."""

    def __init__(self) -> None:
        config = EngineConfig(
            model=str(DEMO),
            device="cpu",
            num_kv_blocks=200,
            max_num_batched_tokens=64,
            speculative_config=json.dumps(
                {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 4}
            ),
        )
        self.local = LocalEngine.load(config, lambda line: None)
        self.tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))

    def run(
        self, requests: Sequence[Request], proposer: Proposer | None
    ) -> tuple[dict[str, list[TokenOutput]], Engine]:
        runner = self.local.runner
        vocab_size, eos = runner.model_config.vocab_size, runner.eos_token_ids
        engine = Engine(
            EngineParts(
                runner,
                self.local.engine.limits,
                Generations(200),
                fingerprint="test",
                eos_token_ids=eos,
                grammars=Grammars(DEMO, vocab_size, eos),
                proposer=proposer,
            )
        )
        outputs: dict[str, list[TokenOutput]] = {}
        for request in requests:
            engine.add(request)
        while engine.has_work:
            step = engine.step()
            assert not step.failed
            for token in step.tokens:
                outputs.setdefault(token.key, []).append(token)
        check_integrity(engine)
        return outputs, engine


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo()


def requests_of_every_kind(demo: Demo, seed: int) -> list[Request]:
    draw = random.Random(seed)
    eos = sorted(demo.local.runner.eos_token_ids)
    regex = Constraint(ConstraintKind.REGEX, "[0-9]{3}-[a-f]{2,9}( and [a-z]{1,20})*")
    schema = Constraint(
        ConstraintKind.JSON_SCHEMA,
        '{"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}, '
        '"b": {"enum": ["yes", "no"]}}, "required": ["a", "b"], "additionalProperties": false}',
    )
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.02},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"logit_bias": ((eos[0], 4.0), (40, 2.0)), "min_tokens": 12},
        {"logprobs": 3},
        {"constraint": regex},
        {"constraint": schema, "temperature": 0.5},
        {"stop_token_ids": (50, 60, 70), "min_tokens": 5, "logprobs": 0},
        {"prompt_logprobs": 2, "temperature": 0.0},
        {"allowed_token_ids": (*range(40, 120, 3), 700), "temperature": 0.3},
        {"allowed_token_ids": (*range(200), eos[0]), "constraint": regex},
    ]
    found = []
    for index, kind in enumerate(kinds):
        sampling = SamplingParams(**({"max_tokens": number(24, 40), "seed": seed} | kind))  # type: ignore[arg-type]
        text = CODE if draw.random() < 0.7 else f"Once upon a time {seed}"
        prompt = tuple(demo.tokenizer.encode(text).ids)
        forks = (f"f{index}",) if draw.random() < 0.3 else ()
        found.append(Request(f"r{index}", 0, prompt, sampling, fork_ids=forks))
    draw.shuffle(found)
    return found


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_kind_of_request(demo: Demo, seed: int) -> None:
    requests = requests_of_every_kind(demo, seed)
    plain, _ = demo.run(requests, None)

    def oracle(context: Context) -> list[int]:
        known = next(one for one in requests if context.sequence.key in (one.key, *forks_of(one)))
        num_outputs = len(context.token_ids) - len(known.prompt_token_ids)
        return [token.token_id for token in plain[context.sequence.key]][num_outputs:]

    num_accepted = 0
    proposers: list[Proposer] = [
        FakeProposer(oracle, rate=rate, max_drafts=5, seed=seed) for rate in (0.5, 0.95)
    ]
    proposers += [NgramProposer(4, 3, 1), DraftModelProposer(demo.local.runner, 4)]
    for proposer in proposers:
        drafted, engine = demo.run(requests, proposer)
        assert drafted.keys() == plain.keys()
        for key, tokens in drafted.items():
            assert reported(tokens) == reported(plain[key])
            difference = [a.logprob - b.logprob for a, b in zip(tokens, plain[key], strict=True)]
            assert max(map(abs, difference)) < 1e-4, "up to what products of other sizes round"
        num_accepted += sum(engine.stats.totals().speculation.accepted)
    assert num_accepted > 200


def reported(tokens: list[TokenOutput]) -> list[tuple[object, ...]]:
    return [(t.index, t.token_id, t.finish_reason, [one for one, _ in t.top]) for t in tokens]


def forks_of(request: Request) -> list[str]:
    return [fork.key for fork in request.forks]


def test_acceptance_by_a_shared_key_and_what_it_costs() -> None:
    """A draft drawn with its position's key equals the target's token as often as two Gumbel maxima
    over the same noise, slightly less often than rejection sampling would accept, and the output
    has the target's distribution, whatever is drafted."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(12, generator=generator) * 1.5
    draft = target + torch.randn(12, generator=generator) * 0.7
    num_draws = 20_000
    specs = [SampleSpec(SamplingParams(), token_key(seed, 0, 9)) for seed in range(num_draws)]
    wanted, _ = sample(target.expand(num_draws, -1), specs)
    drafts, _ = sample(draft.expand(num_draws, -1), specs)
    p, q = target.softmax(-1).double(), draft.softmax(-1).double()
    expected = p * num_draws
    chi_square = float(((wanted.bincount(minlength=12) - expected) ** 2 / expected).sum())
    assert chi_square < 11 + 5 * (2 * 11) ** 0.5
    shared = (1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(-1)).sum()
    measured = (wanted == drafts).double().mean()
    assert measured == pytest.approx(float(shared), abs=4 * (0.25 / num_draws) ** 0.5)
    rejection = float(torch.minimum(p, q).sum())
    assert rejection - 0.1 < shared < rejection
