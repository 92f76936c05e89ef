"""All features at once: for any combination of features in engine and requests, each request gets
the tokens and log-probabilities that it gets alone on a plain engine with its adapter merged into
the weights.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from effort import number
from engines.integrity import check_integrity
from fakes.adapters import merge, write_adapter
from fakes.clock import FakeClock, TickingClock
from fakes.combinations.drawn_requests import EOS, LETTERS, drawn_requests
from fakes.combinations.engine_pair import FINGERPRINT, EnginePair, Outcome
from fakes.combinations.late_runner import LateRunner
from fakes.speculation.eagle3_heads import VOCAB
from fakes.speculation.head_engines import Optimist, eagle3
from fakes.tiers.disk import PlayedDisk, memory_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.constraints.grammars import Grammars
from baton.core.engine_config import EngineConfig
from baton.core.errors import PromptTooLarge
from baton.core.request.request import Adapter, Request, TokenLogprobs
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.runner import ModelRunner
from baton.engine.execution.runner_protocols import Runner
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.lora.adapter_files import HostAdapter
from baton.engine.lora.adapter_room import AdapterRoom
from baton.engine.scheduling.admission import OutputLengthEstimator
from baton.engine.scheduling.outputs import FinishedBeam, TokenOutput
from baton.engine.speculation.proposers import make_proposer

BLOCK_SIZE, MAX_LEN, NUM_DISK_SLOTS = 8, 120, 60
ROUNDING = 1e-3  # from merging the weights and from other GEMM shapes
SPECIAL = ["<pad>", "<s>", "</s>"]


@dataclass
class World:
    """Two runners for each kind of speculation, and one plain runner with merged weights for each
    adapter. `files` are the adapters as read from disk."""

    runners: dict[str, list[ModelRunner]]
    plain: dict[str, ModelRunner]
    adapters: dict[str, Adapter]
    files: list[HostAdapter]
    grammars: Grammars


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("combinations")
    base, opened = folder / "base", list[ModelRunner]()
    methods: dict[str, dict[str, Any] | None] = {
        "none": None,
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        "draft_model": {"method": "draft_model", "model": str(base)},
        "eagle3": eagle3(base),
    }
    write_tokenizer(base)
    fields = {"block_size": BLOCK_SIZE, "max_model_len": MAX_LEN, "num_kv_blocks": 300}
    served = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "swap_space": 0.0004}

    def runner(path: Path, speculation: dict[str, Any] | None = None, **more: Any) -> ModelRunner:
        if speculation is not None:
            more["speculative_config"] = json.dumps(speculation | {"num_speculative_tokens": 4})
        opened.append(ModelRunner(EngineConfig(str(path), device="cpu", **fields, **more)))
        return opened[-1]

    plain, adapters, files = {"": runner(base)}, dict[str, Adapter](), list[HostAdapter]()
    runners = {
        name: [runner(base, method, **served) for _ in range(2)] for name, method in methods.items()
    }
    for seed, name in enumerate(("one", "two")):
        path = write_adapter(folder / name, base, seed=seed)
        plain[name] = runner(merge(folder / f"{name}-merged", base, path))
        reader = runners["none"][0].adapters
        assert reader is not None
        files.append(reader.read(str(path)))
        adapters[name] = Adapter(name, files[-1].digest, str(path))
    for each in (one for pair in runners.values() for one in pair):
        assert each.host_copier is not None
        each.host_copier.begin()
    yield World(runners, plain, adapters, files, Grammars(base, VOCAB, (EOS,)))
    for each in opened:
        each.close()


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one letter for each token of this small vocabulary."""
    vocabulary = {each: index for index, each in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))


def engine_over(runner: Runner, limits: EngineLimits, world: World, **fields: Any) -> Engine:
    return Engine(
        EngineParts(
            runner,
            limits,
            Generations(limits.num_blocks),
            fingerprint=FINGERPRINT,
            eos_token_ids=(EOS,),
            grammars=world.grammars,
            **fields,
        )
    )


def drawn_engine(world: World, runner: ModelRunner, draw: random.Random) -> Engine:
    num_stages = draw.choice((1, 1, 3)) if runner._config.speculation is None else 1
    late = LateRunner(runner, num_stages + 1)
    host, disk = runner.host_copier if draw.random() < 0.5 else None, None
    if host is not None and draw.random() < 0.5:
        file = memory_disk(NUM_DISK_SLOTS, host.block_bytes)
        jobs = partial(draw.choice, (0, 1, 1000))
        disk = PlayedDisk(file, NUM_DISK_SLOTS, host.block_bytes, host.view, jobs)
    num_slots = draw.choice((1, 2))
    room = AdapterRoom[Any](late, num_slots, draw.randint(num_slots, len(world.files)))
    for file in world.files:
        room.keep(file)
    limits = EngineLimits(
        draw.choice((17, 18, 20, 24, 40, 300)),
        BLOCK_SIZE,
        MAX_LEN,
        draw.choice((4, 7, 64)),
        draw.choice((8, 24, 64, 512)),
        prefill_chunk_tokens=draw.choice((0, 0, 40)),
        max_held_blocks=draw.choice((None, 8)),
        num_stages=num_stages,
    )
    engine = engine_over(
        late if num_stages > 1 or draw.random() < 0.5 else runner,
        limits,
        world,
        enable_prefix_caching=draw.random() < 0.8,
        estimator=draw.choice((Optimist, Optimist, OutputLengthEstimator))(),
        clock=draw.choice((FakeClock, TickingClock))(),
        host_copier=host,
        disk=disk,
        adapters=room,
        proposer=make_proposer(runner._config.speculation, late),
    )
    engine.promise.tbt_target_s = draw.choice((None, 0.003, 0.02))
    return engine


def alone(world: World, request: Request) -> Outcome:
    """The request's samples, run one after the other; a beam search runs as a whole."""
    outcome, samples = Outcome(), [request]
    runner = world.plain["" if request.adapter is None else request.adapter.name]
    if not request.sampling.use_beam_search:
        samples = [replace(request, fork_ids=()), *request.forks]
    for sample in samples:
        engine = engine_over(runner, EngineLimits(300, BLOCK_SIZE, MAX_LEN), world)
        engine.add(replace(sample, adapter=None))
        while engine.has_work:
            outcome.take(engine.step())
    return outcome


def compare(
    name: str, found: Outcome, wanted: Outcome, *, is_search: bool, is_cancelled: bool
) -> None:
    tokens, others = found.tokens.get(name, []), wanted.tokens.get(name, [])
    if is_cancelled:
        assert_same_tokens(tokens, others[: len(tokens)])
        return
    error = found.errors.get(name)
    if is_search and error is not None and error.startswith(PromptTooLarge.__name__):
        return  # this pool is too small for all beams
    assert error == wanted.errors.get(name)
    assert_same_tokens(tokens, others)
    assert_same_beam(found.beams.get(name), wanted.beams.get(name))
    scores, other_scores = found.scores.get(name, {}), wanted.scores.get(name, {})
    assert scores.keys() == other_scores.keys()
    for position, score in scores.items():
        assert_close(score, other_scores[position])


def assert_same_tokens(found: Sequence[TokenOutput], wanted: Sequence[TokenOutput]) -> None:
    reported, others = ([(t.token_id, t.finish_reason) for t in each] for each in (found, wanted))
    assert reported == others
    for one, other in zip(found, wanted, strict=True):
        assert_close(TokenLogprobs(one.logprob, one.top), TokenLogprobs(other.logprob, other.top))


def assert_same_beam(found: FinishedBeam | None, wanted: FinishedBeam | None) -> None:
    if found is None or wanted is None:
        assert found is wanted
        return
    assert (found.token_ids, found.finish_reason) == (wanted.token_ids, wanted.finish_reason)
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert_close(one, other)


def assert_close(one: TokenLogprobs, other: TokenLogprobs) -> None:
    assert one.logprob == pytest.approx(other.logprob, abs=ROUNDING)
    assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
    assert [x for _, x in one.top] == pytest.approx([x for _, x in other.top], abs=ROUNDING)


def check(seed: int, world: World) -> EnginePair:
    draw = random.Random(seed)
    requests = drawn_requests(draw, world.adapters.values())
    runners = world.runners[draw.choice([*world.runners])]
    engines = [drawn_engine(world, runner, draw) for runner in runners]
    pools = [[runner.kv.tensor] for runner in runners]
    pair = EnginePair(engines, pools, draw, world.files)
    found = pair.run(requests)
    for engine in pair.engines:
        check_integrity(engine)
        assert engine.pool.num_available == engine.limits.capacity
        assert engine.adapters is not None and not engine.adapters.running_names
    for request in requests:
        wanted = alone(world, request)
        is_search = request.sampling.use_beam_search
        for name in (request.request_id, *request.fork_ids):
            is_cancelled = name in pair.cancelled
            compare(name, found, wanted, is_search=is_search, is_cancelled=is_cancelled)
    return pair


@pytest.mark.parametrize("seed", range(number(10, 100)))
def test_each_request_gets_what_it_gets_alone(seed: int, world: World) -> None:
    check(seed, world)
