"""The gain of speculative decoding: n-grams and a draft model on a CPU; on a GPU random acceptance.

python -m baton.bench.decoding.speculation [--gpu] [--shape NAME] [--drafts K] [--only NAME...]
                                           [--out FILE]

On a CPU the bundled model completes code: without drafts, with n-grams and with the bundled draft
model, each request alone. GPU hosts have no trained checkpoints: there a seeded random generator
decides which drafts the target accepts, and for each draft a head is computed, one layer of the
shape and a vocabulary of 32k, so that its cost is in the figure. All else is the engine's own:
verification, choice of draft lengths, waits.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.execution.batch import SampledToken, SequenceSlice
from baton.engine.execution.runner_protocols import LaunchedStep, Runner
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS
from baton.engine.kv.generations import Generations
from baton.engine.local import LocalEngine
from baton.engine.speculation.draft_model import DraftModelProposer
from baton.engine.speculation.ngram import NgramProposer
from baton.engine.speculation.proposer import Context, Proposer
from baton.kernels.sampling.sample_spec import SampleSpec

from ..floors.figures import ROOT, Figure, command_line, commit, machine, table
from ..floors.gpu_shapes import SHAPES, Shape

_NUM_TOKENS, _REPEATS, _TIMED_STEPS = 200, 3, 100
_HEAD_VOCAB = 32_000
_GPU_SECONDS, _WARMUP_SECONDS = 1.2, 0.5
_ROOM_TOKENS = 130_000  # for the outputs of all requests
# The acceptance probability of each of 3 drafts, given that those before it are accepted, for a
# mean of 2.6, 1.5 and 1 tokens per step.
_RATES = {"2.6": 0.7162, "1.5": 0.3737, "1.0": 0.0}
_CASES = [(1, 1024), (64, 4096), (256, 1024), (512, 512)]
_TARGETS = {"1 x 1024, acceptance 2.6": 1.9, "64 x 4096, acceptance 2.6": 1.8}
_PROMPTS = (  # the beginnings of repetitive files, as code often is
    """class Shape:
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def get_width(self):
        return self.width

    def get_height(self):
        return self.height

    def set_width(self, width):
""",
    """import unittest

class TestParser(unittest.TestCase):
    def test_empty(self):
        self.assertEqual(parse(""), [])

    def test_one(self):
        self.assertEqual(parse("a"), ["a"])

    def test_two(self):
""",
    """def encode(value):
    if isinstance(value, int):
        return encode_int(value)
    if isinstance(value, str):
        return encode_str(value)
    if isinstance(value, bytes):
""",
    """parser = argparse.ArgumentParser()
parser.add_argument("--input", default=None, help="input file")
parser.add_argument("--output", default=None, help="output file")
parser.add_argument("--verbose", action="store_true", help="be verbose")
parser.add_argument(""",
)


def engine_of(local: LocalEngine, runner: Runner, proposer: Proposer | None) -> Engine:
    """Another engine over the same model and pool."""
    limits = local.engine.limits
    return Engine(
        EngineParts(
            runner,
            limits,
            Generations(limits.num_blocks),
            fingerprint="bench",
            eos_token_ids=local.runner.eos_token_ids,
            enable_prefix_caching=False,
            proposer=proposer,
        )
    )


# -- n-grams and a draft model on a CPU ---------------------------------------------------------


def code_completion(num_drafts: int) -> list[Figure]:
    """Tokens per second of sequential requests, greedy and at temperature 0.8."""
    drafting = {
        "method": "draft_model",
        "model": "demo-draft",
        "num_speculative_tokens": num_drafts,
    }
    config = EngineConfig(device="cpu", num_kv_blocks=400, speculative_config=json.dumps(drafting))
    local = LocalEngine.load(config, print)
    tokenizer = Tokenizer.from_file(str(local.model_dir / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(text).ids) for text in _PROMPTS]
    proposers: dict[str, Proposer | None] = {
        "without": None,
        "n-grams": NgramProposer(num_drafts, 5, 2),
        "draft model": DraftModelProposer(local.runner, num_drafts),
    }
    figures = [*_step_times(local)]
    for temperature in (0.0, 0.8):
        engines = {
            kind: engine_of(local, local.engine._runner, one) for kind, one in proposers.items()
        }
        speeds: dict[str, list[float]] = {kind: [] for kind in engines}
        outputs: dict[str, list[list[int]]] = {}
        for repeat in range(_REPEATS + 1):
            for kind, engine in engines.items():
                outputs[kind], speed = _complete(engine, prompts, temperature)
                if repeat:  # the first pass warms up
                    speeds[kind].append(speed)
        name = f"code completion, temperature {temperature}"
        plain = statistics.median(speeds["without"])
        figures.append(Figure(f"{name}: without", "tokens/s", tuple(speeds["without"])))
        for kind, target in (("n-grams", 1.3), ("draft model", 1.2)):
            assert outputs[kind] == outputs["without"], "speculation has changed a token"
            counts = engines[kind].stats.totals().speculation
            length = 1 + sum(counts.accepted) / max(1, counts.num_drafts)
            gains = tuple(speed / plain for speed in speeds[kind])
            figures += [
                Figure(f"{name}: {kind}", "tokens/s", tuple(speeds[kind]), target=target * plain),
                Figure(f"{name}: {kind}, gain", "x", gains),
                Figure(f"{name}: {kind}, tokens a step with drafts", "", (length,)),
            ]
    local.close()
    return figures


def _step_times(local: LocalEngine) -> Iterator[Figure]:
    """Time of a draft step beside a decode step, for one sequence of 200 tokens."""
    greedy = SampleSpec(SamplingParams(temperature=0.0), key=0)
    table = range(NUM_RESERVED_BLOCKS, NUM_RESERVED_BLOCKS + 16)
    decode = SequenceSlice((7,), 200, table, greedy)
    drafting = SequenceSlice((7,), 200, table, None, draft_samples=(greedy,))
    runner = local.runner
    for name, step in (
        ("a step of the model", lambda: runner.launch([decode]).collect()),
        ("a step of the draft model", lambda: runner.draft([drafting])),
    ):
        times = []
        for _ in range(_TIMED_STEPS):
            begin_s = time.perf_counter()
            step()
            times.append((time.perf_counter() - begin_s) * 1e3)
        yield Figure(name, "ms", (statistics.median(times),))


def _complete(
    engine: Engine, prompts: Sequence[Sequence[int]], temperature: float
) -> tuple[list[list[int]], float]:
    outputs, took_s = [], 0.0
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(
            max_tokens=_NUM_TOKENS, temperature=temperature, seed=index, ignore_eos=True
        )
        engine.add(Request(f"{index:032x}", 0, prompt, sampling))
        tokens: list[int] = []
        engine.step()  # prefill
        begin_s = time.perf_counter()
        while engine.has_work:
            tokens += [token.token_id for token in engine.step().tokens]
        took_s += time.perf_counter() - begin_s
        outputs.append(tokens)
    return outputs, sum(map(len, outputs)) / took_s


# -- random acceptance on a GPU -----------------------------------------------------------------


class _CoinStep:
    """A step whose drafts are accepted at random."""

    def __init__(self, step: LaunchedStep, batch: Sequence[SequenceSlice], coin: CoinRunner):
        self._step, self._batch, self._coin = step, batch, coin
        self.number = step.number
        self.has_completed, self.prompt_logprobs = step.has_completed, step.prompt_logprobs

    def collect(self) -> list[SampledToken | None]:
        found = zip(self._batch, self._step.collect(), strict=True)
        return [self._coin.toss(piece, sampled) for piece, sampled in found]


class CoinRunner:
    """A runner whose target accepts each draft with probability `rate`, given that it accepted
    those before. Before each step it computes a head of `shape` per draft, from a CUDA graph as an
    engine does."""

    runs_ahead = True

    def __init__(self, runner: Runner, shape: Shape, device: torch.device, rate: float) -> None:
        self._runner, self._rate = runner, rate
        self._random = random.Random(1)
        self.copy_blocks = runner.copy_blocks
        hidden, inner = shape.hidden, shape.inner
        kv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        sizes = [(kv, hidden), (hidden, shape.heads * shape.head_dim)]
        sizes += [(2 * inner, hidden), (hidden, inner), (_HEAD_VOCAB, hidden)]
        self._weights = [
            torch.randn(size, dtype=torch.bfloat16, device=device) * 0.02 for size in sizes
        ]
        self._heads: dict[int, torch.cuda.CUDAGraph] = {}  # by number of rows

    def launch(self, batch: Sequence[SequenceSlice]) -> LaunchedStep:
        counts = [len(piece.draft_samples) for piece in batch]
        for place in range(max(counts)):
            rows = sum(count > place for count in counts)
            rows = -(-rows // 8) * 8 if rows > 8 else rows  # as graphs are padded
            if rows not in self._heads:
                self._heads[rows] = self._capture(rows)
            self._heads[rows].replay()
        return _CoinStep(self._runner.launch(batch), batch, self)  # type: ignore[return-value]

    @torch.inference_mode()
    def _capture(self, num_rows: int) -> torch.cuda.CUDAGraph:
        self._head(num_rows)  # compile and tune before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._head(num_rows)
        return graph

    def _head(self, num_rows: int) -> None:
        for weight in self._weights:
            x = weight.new_zeros(num_rows, weight.shape[1])
            y = torch.nn.functional.linear(x, weight)
        y.argmax(-1)

    def toss(self, piece: SequenceSlice, sampled: SampledToken | None) -> SampledToken | None:
        if sampled is None or not piece.draft_samples:
            return sampled
        tokens = []
        for draft, token in zip(list(piece.token_ids)[1:], sampled.at_drafts, strict=True):
            is_right = self._random.random() < self._rate
            tokens.append(token._replace(token_id=draft if is_right else draft + 1))
        return sampled._replace(at_drafts=tuple(tokens))


class _AnyTokens:
    """A Proposer of arbitrary tokens."""

    takes_steps = False

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        return [range(7, 7 + context.max_drafts) for context in contexts]


def by_coin(shape: Shape, num_drafts: int, only: Sequence[str]) -> list[Figure]:
    """Tokens per second by batch, context and mean acceptance length."""
    folder = shape.write_config(Path(tempfile.mkdtemp(prefix="baton-shape-")))
    drafting = {"method": "ngram", "num_speculative_tokens": num_drafts}
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        load_format="dummy",
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        max_num_seqs=512,
        swap_space=0.0,
        speculative_config=json.dumps(drafting),
    )
    local = LocalEngine.load(config, print)
    print("\n".join(local.runner.startup_notes), flush=True)
    gc.collect()
    gc.freeze()  # as in an engine's process: loaded objects are excluded from collections
    figures: list[Figure] = []
    for batch, context in _CASES:
        if only and f"{batch} x {context}" not in only:
            continue
        plain, _ = _speed(engine_of(local, local.engine._runner, None), batch, context, shape.vocab)
        figures.append(Figure(f"{batch} x {context}: without", "tokens/s", plain))
        for share, rate in _RATES.items():
            name = f"{batch} x {context}, acceptance {share}"
            device = local.runner.model.device
            coin = CoinRunner(local.engine._runner, shape, device, rate)
            engine = engine_of(local, coin, _AnyTokens(num_drafts))
            speeds, mean = _speed(engine, batch, context, shape.vocab)
            target = _TARGETS.get(name, 0.98) * statistics.median(plain)
            gain = statistics.median(speeds) / statistics.median(plain)
            figures += [
                Figure(name, "tokens/s", speeds, target=target),
                Figure(f"{name}: gain", "x", (gain,)),
                Figure(f"{name}: drafts a sequence and step", "", (mean,)),
            ]
            print(f"{name}: {gain:.3f} x, {mean:.2f} drafts", flush=True)
    local.close()
    return figures


def _speed(
    engine: Engine, batch: int, context: int, vocab_size: int
) -> tuple[tuple[float, ...], float]:
    """Tokens per second in steady state, and drafts per sequence and step."""
    draw = random.Random(0)
    engine.measure_first_steps(1.5)
    # Contexts grow: those of the measurement lie around `context`.
    most = min(2500, _ROOM_TOKENS // batch)
    sampling = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
    requests = []
    for index in range(batch):
        prompt = tuple(draw.randrange(vocab_size) for _ in range(context))
        request = Request(f"{index:032x}", 0, prompt, sampling)
        engine.reserve(request)
        reservation = engine.next_reservation()
        assert reservation is not None, "the pool is too small for this"
        engine.start(reservation, token_id=draw.randrange(vocab_size))
        requests.append(request)
    _tokens_in(engine, _WARMUP_SECONDS)
    before = engine.stats.totals().speculation.num_draft_tokens
    counts, speeds = 0, []
    for _ in range(_REPEATS):
        num_steps, speed = _tokens_in(engine, _GPU_SECONDS / _REPEATS)
        counts += num_steps
        speeds.append(speed)
    drafted = engine.stats.totals().speculation.num_draft_tokens - before
    for request in requests:
        engine.abort(request.key)
    while engine.has_work:
        engine.step()
    return tuple(speeds), drafted / max(1, counts * batch)


def _tokens_in(engine: Engine, seconds: float) -> tuple[int, float]:
    """(steps, tokens per second)."""
    begin_s, num_tokens, num_steps = time.perf_counter(), 0, 0
    while (passed_s := time.perf_counter() - begin_s) < seconds:
        num_tokens += len(engine.step().tokens)
        num_steps += 1
    return num_steps, num_tokens / passed_s


def main(argv: list[str]) -> int:
    """Measure, print the figures and write them."""
    parser = argparse.ArgumentParser(
        prog="python -m baton.bench.decoding.speculation", description=__doc__
    )
    parser.add_argument("--gpu", action="store_true", help="drafts that a coin accepts")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--drafts", type=int, default=None, help="default: 4 on a CPU, 3 on a GPU")
    parser.add_argument("--only", nargs="*", default=[], help="cases, as '64 x 4096'")
    parser.add_argument("--commit", default=None, help="what is measured, where git does not know")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args(argv)
    if arguments.gpu:
        shape = SHAPES[arguments.shape]
        figures = by_coin(shape, arguments.drafts or 3, arguments.only)
    else:
        figures = code_completion(arguments.drafts or 4)
    print(table(figures))
    result = {
        "gpu": torch.cuda.get_device_name() if arguments.gpu else None,
        "commit": arguments.commit or commit(),
        "command": command_line("decoding.speculation", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "figures": [figure.as_dict() for figure in figures],
    }
    name = "speculation_gpu.json" if arguments.gpu else "speculation.json"
    path = arguments.out or ROOT / "bench" / "results" / name
    path.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
