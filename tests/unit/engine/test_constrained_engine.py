"""Constrained outputs through the engine: they match the constraint, and are the same for any
schedule.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from checkpoints import write_byte_tokenizer, write_checkpoint
from effort import examples
from engines.generation import outputs_of
from engines.integrity import check_integrity
from fakes.gateway.byte_model import EOS_ID, VOCAB_SIZE, write_byte_model
from fakes.proposer import FakeProposer
from fakes.runner import FakeRunner
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.constraints.grammars import Grammars
from baton.core.engine_config import EngineConfig
from baton.core.errors import BatonError, InvalidRequest
from baton.core.request.constraint import Constraint, ConstraintKind
from baton.core.request.request import FinishReason, Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.local import LocalEngine
from baton.engine.speculation.proposer import Context, Proposer

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
REGEX = Constraint(ConstraintKind.REGEX, "[0-9]{3}-[a-f]{2,9}")
CHOICE = Constraint.choice(["yes", "no", "perhaps"])
GRAMMAR = Constraint(ConstraintKind.GRAMMAR, 'start: "(" start ")" | /[a-z]{1,3}/')
AMBIGUOUS = Constraint(  # a matcher can follow this grammar for a few tokens only
    ConstraintKind.GRAMMAR,
    "start: a0\n"
    + "\n".join(f'a{i}: "x" | "y" | a{i} a{(i + 1) % 12} | a{i} a{i} a{i}' for i in range(12)),
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def of_schema(schema: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def ask(
    prompt: Sequence[int], constraint: Constraint | None, number: int = 0, **params: Any
) -> Request:
    sampling = SamplingParams(**{"max_tokens": 60, "constraint": constraint, **params})
    return Request(f"{number:032x}", 0, tuple(prompt), sampling)


# --- a trained model ----------------------------------------------------------------------------


@dataclasses.dataclass
class Demo:
    """The bundled model on two engines, a source and a puller."""

    source: LocalEngine
    puller: LocalEngine
    tokenizer: Tokenizer

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text).ids)

    def run(self, *requests: Request) -> list[list[int]]:
        found = outputs_of(self.source, requests)
        return [found[request.key] for request in requests]

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids)))


@pytest.fixture(scope="module")
def demo() -> Demo:
    config = EngineConfig(model=str(DEMO), device="cpu", cpu_kv_bytes=32 << 20)
    engines = [LocalEngine(config, ModelRunner(config)) for _ in range(2)]
    return Demo(*engines, Tokenizer.from_file(str(DEMO / "tokenizer.json")))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_trained_models_json_matches_its_schema(demo: Demo, temperature: float) -> None:
    prompt = demo.ids("# a person as JSON\n")
    requests = [
        ask(prompt, of_schema(PERSON), seed, temperature=temperature, seed=seed, max_tokens=120)
        for seed in range(4)
    ]
    for tokens in demo.run(*requests):
        assert tokens[-1] == 0, "its EOS"
        jsonschema.validate(json.loads(demo.text(tokens)), PERSON)


def everything(demo: Demo) -> list[Request]:
    """One request of each kind of constraint and one without, with all sampling parameters set."""
    params: dict[str, Any] = {
        "temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.001, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.1, "logit_bias": ((300, 2.0),),
        "logprobs": 3,
    }  # fmt: skip
    constraints = [REGEX, CHOICE, GRAMMAR, of_schema(PERSON), None]
    return [
        ask(demo.ids(f"def f{i}(x):\n    return"), constraint, i, seed=i, **params)
        for i, constraint in enumerate(constraints)
    ]


def test_alone_in_a_batch_and_handed_over_the_tokens_are_the_same(demo: Demo) -> None:
    requests = everything(demo)
    alone = [demo.run(request)[0] for request in requests]
    assert demo.run(*requests) == alone
    assert [handed_over(demo, request) for request in requests] == alone
    texts = [demo.text(tokens) for tokens in alone]
    assert re.fullmatch(REGEX.source, texts[0])
    assert texts[1] in ("yes", "no", "perhaps")
    assert re.fullmatch(r"\(*[a-z]{1,3}\)*", texts[2])
    jsonschema.validate(json.loads(texts[3]), PERSON)


def handed_over(demo: Demo, request: Request) -> list[int]:
    """The tokens of a request prefilled on one engine and decoded on the other, with only KV blocks
    and the first token handed over."""
    source, puller = demo.source, demo.puller
    source.engine.add(request, hold=True)
    tokens: list[int] = []
    while not tokens:
        tokens = [token.token_id for token in source.engine.step().tokens]
    puller.engine.reserve(request)
    reservation = puller.engine.next_reservation()
    assert reservation is not None
    known = list(reservation.block_ids[: reservation.num_known_blocks])
    refs = source.engine.block_refs(request.key, 0, len(known))
    puller.runner.kv.tensor[known] = source.runner.kv.tensor[refs.block_ids.tolist()]
    source.engine.abort(request.key)
    puller.engine.start(reservation, tokens[0])
    while puller.engine.has_work:
        tokens += [token.token_id for token in puller.engine.step().tokens]
    return tokens


def test_a_retry_goes_on_where_the_last_attempt_was_lost(demo: Demo) -> None:
    """A retry after any number of tokens continues with the same ones; all run in one batch."""
    requests = everything(demo)
    wholes = demo.run(*requests)
    streamed = [
        (request, attempt, whole[:count], whole)
        for request, whole in zip(requests, wholes, strict=True)
        for attempt, count in enumerate((1, len(whole) // 2, len(whole) - 1), 1)
    ]
    again = demo.run(
        *(
            dataclasses.replace(request, attempt=attempt, output_token_ids=tuple(tokens))
            for request, attempt, tokens, _ in streamed
        )
    )
    for (_, _, tokens, whole), more in zip(streamed, again, strict=True):
        assert tokens + more == whole


def test_samples_of_one_prompt_each_keep_to_it(demo: Demo) -> None:
    request = ask(demo.ids("# a person\n"), of_schema(PERSON), 50, seed=3, max_tokens=120)
    request = dataclasses.replace(request, fork_ids=("f" * 32, "e" * 32))
    found = outputs_of(demo.source, [request])
    texts = [demo.text(found[sample.key]) for sample in (request, *request.forks)]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1
    for fork in request.forks:
        alone = dataclasses.replace(fork, request_id="d" * 32)
        assert demo.run(alone) == [found[fork.key]]


# --- a random model: matching must not depend on what the model prefers --------------------------


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    """A model of random weights with a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, seed=4, vocab_size=259)
    write_byte_tokenizer(folder)
    config = EngineConfig(model=str(folder), device="cpu", num_kv_blocks=200)
    return LocalEngine(config, ModelRunner(config))


names = st.text("ab_", min_size=1, max_size=3)
leaves = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": 7}, {"const": "x y"}]),
    st.builds(
        lambda least, more: {"type": "integer", "minimum": least, "maximum": least + more},
        st.integers(-99, 99),
        st.integers(0, 99),
    ),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 3)),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}$"}),
    st.lists(st.integers(-5, 5) | names, min_size=1, max_size=3).map(lambda e: {"enum": e}),
)


def _object(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
    required = list(properties)[:num_required]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(names, inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda s: {"type": "array", "items": s, "maxItems": 2}, inner),
        st.lists(inner, min_size=1, max_size=2).map(lambda s: {"anyOf": s}),
    ),
    max_leaves=4,
)


@examples(6, 12)
@given(st.lists(schemas, min_size=3, max_size=3), st.integers(0, 99))
def test_whatever_the_schema_the_output_matches(
    random_model: LocalEngine, found: list[Any], seed: int
) -> None:
    requests = [
        ask([5, 6, 7], of_schema(schema), i, seed=seed, max_tokens=250, temperature=1.0)
        for i, schema in enumerate(found)
    ]
    outputs = outputs_of(random_model, requests)
    tokenizer = Tokenizer.from_file(str(random_model.model_dir / "tokenizer.json"))
    for request, schema in zip(requests, found, strict=True):
        tokens = outputs[request.key]
        if len(tokens) < 250:  # longer outputs ended at max_tokens, within a string or whitespace
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)


# --- all ways to compose steps --------------------------------------------------------------------


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    return Grammars(folder, VOCAB_SIZE, [EOS_ID])


@dataclasses.dataclass
class Outcome:
    """The outputs of an engine by request key."""

    tokens: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    reasons: dict[str, FinishReason | None] = dataclasses.field(default_factory=dict)
    errors: dict[str, BatonError] = dataclasses.field(default_factory=dict)
    num_preemptions: int = 0
    batches: list[list[int]] = dataclasses.field(default_factory=list)


def run(
    grammars: Grammars,
    requests: Sequence[Request],
    *,
    runs_ahead: bool = False,
    num_blocks: int = 400,
    max_num_batched_tokens: int = 512,
    proposer: Proposer | None = None,
) -> Outcome:
    runner = FakeRunner(num_blocks, 4, vocab_size=VOCAB_SIZE, runs_ahead=runs_ahead)
    limits = EngineLimits(num_blocks, 4, 256, max_num_batched_tokens=max_num_batched_tokens)
    engine = Engine(
        EngineParts(
            runner,
            limits,
            Generations(num_blocks),
            fingerprint="toy",
            eos_token_ids=(EOS_ID,),
            grammars=grammars,
            proposer=proposer,
        )
    )
    outcome = Outcome()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        output = engine.step()
        for token in output.tokens:
            outcome.tokens.setdefault(token.key, []).append(token.token_id)
            outcome.reasons[token.key] = token.finish_reason
        outcome.errors |= dict(output.failed)
        check_integrity(engine)
    assert not engine.stats.ledger()["requests"]
    outcome.num_preemptions = engine.stats.totals().num_preemptions
    outcome.batches = runner.batch_sizes
    return outcome


def mixture(seed: int, count: int) -> list[Request]:
    """Requests with all kinds of constraints and without one, some with further samples."""
    rng = random.Random(seed)
    constraints = [None, REGEX, CHOICE, GRAMMAR, of_schema(PERSON)]
    requests = []
    for number in range(count):
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
        request = ask(
            prompt, rng.choice(constraints), number, temperature=rng.choice([0.0, 1.0]),
            seed=number, max_tokens=rng.randrange(1, 80),
        )  # fmt: skip
        forks = tuple(f"{number:031x}{letter}" for letter in "ab"[: rng.randrange(3)])
        requests.append(dataclasses.replace(request, request_id=f"{number:031x}f", fork_ids=forks))
    return requests


@examples(5, 15)
@given(seed=st.integers(0, 999), chunk=st.sampled_from([7, 512]))
def test_overlap_chunks_and_preemption_change_no_token(
    grammars: Grammars, seed: int, chunk: int
) -> None:
    requests = mixture(seed, 6)
    plain = run(grammars, requests)
    for runs_ahead in (False, True):
        for num_blocks in (400, 40):
            other = run(
                grammars,
                requests,
                runs_ahead=runs_ahead,
                num_blocks=num_blocks,
                max_num_batched_tokens=chunk,
            )
            assert (other.tokens, other.reasons) == (plain.tokens, plain.reasons)


def test_small_pools_do_preempt(grammars: Grammars) -> None:
    """The small pools of the previous test do cause preemptions."""
    assert any(run(grammars, mixture(s, 6), num_blocks=40).num_preemptions for s in range(5))


def test_others_keep_the_device_busy(grammars: Grammars) -> None:
    """While unconstrained sequences run ahead, a constrained one is in every second step."""
    free = ask([1, 2], None, 1, max_tokens=40)
    long = Constraint(ConstraintKind.REGEX, "[a-z]{100}")
    bound = ask([3, 4], long, 2, max_tokens=20)
    outcome = run(grammars, [free, bound], runs_ahead=True)
    assert len(outcome.batches) < 45
    sizes = [len(batch) for batch in outcome.batches[1:39]]
    assert sizes == [1, 2] * 19


def test_it_ends_where_the_grammar_does_and_by_length_inside_it(grammars: Grammars) -> None:
    short, long = ask([1], REGEX, 1, max_tokens=5), ask([1], REGEX, 2, max_tokens=60)
    outcome = run(grammars, [short, long])
    assert outcome.reasons == {short.key: FinishReason.LENGTH, long.key: FinishReason.STOP}
    assert outcome.tokens[long.key][-1] == EOS_ID
    assert len(outcome.tokens[short.key]) == 5
    assert re.fullmatch(REGEX.source, bytes(outcome.tokens[long.key][:-1]).decode())


def test_min_tokens_waits_where_the_grammar_lets_it(grammars: Grammars) -> None:
    """EOS is masked until `min_tokens` while the grammar allows other tokens; a completed grammar
    ends the output earlier."""
    for number in range(8):
        request = ask([number], REGEX, number, seed=number, min_tokens=10, max_tokens=60)
        tokens = run(grammars, [request]).tokens[request.key]
        assert 11 <= len(tokens) <= 14
    request = ask([1], CHOICE, 1, min_tokens=30, max_tokens=60)
    tokens = run(grammars, [request]).tokens[request.key]
    assert bytes(tokens[:-1]).decode() in ("yes", "no", "perhaps") and tokens[-1] == EOS_ID


def test_allowed_tokens_within_a_form(grammars: Grammars) -> None:
    """Grammar and `allowed_token_ids` both hold, with drafts too; where no token satisfies both,
    only that request fails."""
    few = (*b"0137-abf", EOS_ID)
    request = ask([1], REGEX, 1, allowed_token_ids=few, max_tokens=60)
    alone = run(grammars, [request])
    assert re.fullmatch("[0137]{3}-[abf]{2,9}", bytes(alone.tokens[request.key][:-1]).decode())
    stuck = ask([1], REGEX, 2, allowed_token_ids=tuple(b"01-xyz"), max_tokens=60)

    def oracle(context: Context) -> list[int]:
        return [*alone.tokens[request.key][context.sequence.num_outputs :], *b"012"]

    for proposer in (None, FakeProposer(oracle, rate=0.9, seed=1)):
        outcome = run(grammars, [request, stuck], proposer=proposer)
        assert outcome.tokens[request.key] == alone.tokens[request.key]
        assert re.fullmatch("[01]{3}-", bytes(outcome.tokens[stuck.key]).decode())
        (error,) = outcome.errors.values()
        assert isinstance(error, InvalidRequest) and error.param == "allowed_token_ids"


def test_a_stop_id_ends_it_early(grammars: Grammars) -> None:
    request = ask([1], REGEX, 1, stop_token_ids=(ord("-"),), max_tokens=60)
    outcome = run(grammars, [request])
    assert outcome.tokens[request.key][-1] == ord("-") and len(outcome.tokens[request.key]) == 4
    assert outcome.reasons[request.key] is FinishReason.STOP


def test_what_cannot_go_on_fails_alone(grammars: Grammars) -> None:
    """A request fails alone if the grammar rejects its earlier attempt's tokens."""
    lost = dataclasses.replace(ask([1, 2, 3], REGEX, 1), output_token_ids=(ord("x"),))
    lost = dataclasses.replace(lost, fork_ids=("e" * 32,))
    others = mixture(3, 3)
    for runs_ahead in (False, True):
        outcome = run(grammars, [lost, *others], runs_ahead=runs_ahead)
        assert set(outcome.errors) == {lost.key, lost.forks[0].key}
        assert {error.code for error in outcome.errors.values()} == {"invalid_schema"}
        expected = run(grammars, others)
        assert outcome.tokens == expected.tokens


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_drafts_behind_which_a_grammar_gives_up(grammars: Grammars, runs_ahead: bool) -> None:
    """A request whose grammar the matcher gives up on fails at the same token with and without
    drafts, and no other request fails."""
    requests = [ask([1], AMBIGUOUS, 1, min_tokens=60), ask([1, 2], None, 2)]
    plain = run(grammars, requests)
    (error,) = plain.errors.values()
    assert isinstance(error, InvalidRequest) and len(plain.tokens) == 2

    def oracle(context: Context) -> list[int]:
        known = plain.tokens[context.sequence.key]
        return [*known[context.sequence.num_outputs :], *b"xxxx"]

    for seed in range(3):
        proposer = FakeProposer(oracle, rate=0.9, seed=seed)
        found = run(grammars, requests, runs_ahead=runs_ahead, proposer=proposer)
        assert (found.tokens, found.reasons) == (plain.tokens, plain.reasons)
        assert [*map(str, found.errors.values())] == [str(error)]


def test_what_cannot_be_compiled_is_refused_at_the_door(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="unclosed"):
        run(grammars, [ask([1], Constraint(ConstraintKind.REGEX, "a("))])


def test_an_engine_without_grammars_takes_none() -> None:
    engine = Engine(
        EngineParts(
            FakeRunner(40, 4),
            EngineLimits(40, 4, 64),
            Generations(40),
            fingerprint="toy",
            eos_token_ids=(EOS_ID,),
        )
    )
    with pytest.raises(InvalidRequest) as refused:
        engine.add(ask([1], REGEX))
    assert refused.value.code == "unsupported_parameter"
    assert not engine.has_work
