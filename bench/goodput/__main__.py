"""python -m baton.bench.goodput --shape SHAPE --gpus 0,1 [--cells ...] [--modes ...] [...]

Poisson arrivals over HTTP from several processes, at several rates, for each way to serve them.
Finds the rate at which 90 % of the requests keep TTFT within 1 s and the 99th percentile of their
gaps within Y.

    disaggregated, aggregated, auto   as `baton up --mode`; the last two promise Y, less a margin
    P+D                               disaggregated, with engines on P cards and on D others
    vllm-TOKENS                       a replica of vLLM on each card, with chunks of TOKENS
    NAME                              of --running NAME=URL[,URL]: servers that already run

The expected duration is printed first. The results file is written after each rate; a later call
with --resume continues where an earlier one was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

from tokenizers import Tokenizer, models, pre_tokenizers

from baton.cli.host.gpu_choice import choose_here
from baton.core import flags
from baton.core.config import GatewayConfig, NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.model_dir import read_json, resolve_model_dir
from baton.loadgen.figures import ReportWindow
from baton.loadgen.records import Record

from ..floors.figures import ROOT, command_line, commit
from ..floors.gpu_shapes import SHAPES, Shape
from ..serve import load, systems
from ..serve.clients import clocks
from . import figures
from .cells import (
    AGGREGATED,
    CELLS,
    DISAGGREGATED,
    MODES,
    PROMISING,
    VLLM,
    Run,
    Start,
    Timing,
    cell_named,
    plan,
    rates_by_cell,
    split_of,
)
from .results import Results, key_of

_MODEL = "m"  # the model name that clients use
_VLLM_MODEL_LEN = 40_000  # if no length is given
_WARM_UP_S = 5.0  # duration of the warm-up requests after a start
_HOPELESS_SHARE = 0.5
_MARGIN = 0.04
# A client timestamps the tokens of an engine's step one after the other.
_NUM_CLIENTS = max(6, len(os.sched_getaffinity(0)) // 2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m baton.bench.goodput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cells", nargs="*", default=[*CELLS], help="of these, IN/OUT, or sharegpt"
    )
    parser.add_argument("--modes", nargs="*", default=[*MODES])
    parser.add_argument("--running", nargs="*", default=[], help="NAME=URL[,URL]: more modes")
    parser.add_argument("--y", nargs="*", type=float, default=[15.0, 25.0, 50.0], help="ms")
    parser.add_argument(
        "--rates", nargs="*", default=[], help="requests a second: RATE of any cell, or CELL=RATE"
    )
    parser.add_argument(
        "--factors", nargs="*", type=float, default=[0.85, 1.0, 1.15], help="of predicted rates"
    )
    parser.add_argument("--count-s", type=float, default=60.0, help="requests that count")
    parser.add_argument("--warm-lifetimes", type=float, default=2.0, help="before they count")
    parser.add_argument(
        "--margin", type=float, default=_MARGIN, help="of Y, below which a promise is"
    )
    parser.add_argument(
        "--clients",
        type=int,
        default=_NUM_CLIENTS,
        help="processes that send and read; by default half as many as there are cores",
    )
    parser.add_argument("--shape", choices=SHAPES, help="dummy weights of this shape as --model")
    parser.add_argument("--vllm", default="vllm", help="the command that `serve` follows")
    parser.add_argument(
        "--vllm-flags",
        default="--max-num-seqs 256 --no-enable-prefix-caching",
    )
    parser.add_argument("--start-s", type=float, default=60.0, help="of a start, for the plan")
    parser.add_argument("--vllm-start-s", type=float, default=110.0, help="the same of vLLM")
    parser.add_argument("--plan", action="store_true", help="print what it will take, and end")
    parser.add_argument("--resume", action="store_true", help="leave out what the file has")
    parser.add_argument("--budget-s", type=float, help="begin nothing that would end later")
    parser.add_argument("--commit", help="what is measured, where git does not know")
    default = ROOT / "bench" / "results" / "goodput.json"
    parser.add_argument("--out", type=Path, default=default)
    flags.add_flags(parser, EngineConfig, NodeConfig, GatewayConfig)
    parser.set_defaults(slo_ttft_s=figures.TTFT_S)  # the goal of moving promises
    return parser


class Sweep:
    """All starts, one after the other."""

    def __init__(self, arguments: argparse.Namespace, results: Results) -> None:
        self._arguments = arguments
        self._results = results
        self._running = dict(one.split("=", 1) for one in arguments.running)
        self._engine = flags.parse(EngineConfig, arguments)
        config = read_json(resolve_model_dir(self._engine.model) / "config.json")
        self._vocab_size = int(config["vocab_size"])
        self._began_s = time.monotonic()

    def start_s(self, start: Start) -> float:
        """The expected time for a system to start and warm up."""
        warm_s = _warm_up(start.runs[0]).most_s
        if start.mode in self._running:
            return warm_s
        is_peer = start.mode.startswith(VLLM)
        took_s = self._arguments.vllm_start_s if is_peer else self._arguments.start_s
        return float(took_s) + warm_s

    def measure(self, start: Start) -> None:
        """Measure every run of a start and write each result at once."""
        left_s = self._left_s()
        if self.start_s(start) + start.runs[0].most_s > left_s:
            print(f"{start.name}: not begun, {left_s:.0f} s are left", flush=True)
            return
        began_s = time.monotonic()
        with self._system(start) as target:
            self._send(start, target, _warm_up(start.runs[0]))
            print(f"{start.name}: up in {time.monotonic() - began_s:.0f} s", flush=True)
            hopeless: set[tuple[str, float | None]] = set()
            for run in start.runs:
                kind = (run.cell.name, run.y_ms)
                if kind in hopeless:
                    print(f"{start.name} {_name(run)}: left out, a lower rate fails", flush=True)
                elif run.most_s > self._left_s():
                    print(f"{start.name} {_name(run)}: not begun, no time is left", flush=True)
                elif self._run(start, target, run) < _HOPELESS_SHARE:
                    hopeless.add(kind)

    def _left_s(self) -> float:
        budget_s = self._arguments.budget_s
        took_s = time.monotonic() - self._began_s
        return float("inf") if budget_s is None else budget_s - took_s

    def _run(self, start: Start, target: str, run: Run) -> float:
        """Measure one rate; returns the share of its requests that are good for the run's Y, or the
        largest share over all Ys if it has none."""
        seen: clocks.Clocks = {}
        began_s, before = time.monotonic(), _metrics(target)
        with clocks.recorded(seen):
            records = self._send(start, target, run)
        window = ReportWindow(run.warmup_s, run.warmup_s + run.timing.count_s)
        found = figures.summarise(records, window, self._arguments.y)
        after = _metrics(target)
        found["step_cost_error"] = figures.step_cost_errors(after)
        found["kept_steps"] = figures.kept_steps(before, after)
        found["took_s"] = round(time.monotonic() - began_s, 1)
        found["clocks"] = seen
        self._results.add(key_of(label(start.mode, self._arguments), run), found)
        print(f"{start.name} {_name(run)}: {_line(found)}", flush=True)
        attained: dict[str, float] = found["attained"]
        return max(attained.values()) if run.y_ms is None else attained[f"{run.y_ms:g}"]

    def _send(self, start: Start, target: str, run: Run) -> list[Record]:
        margin, fields = 1 - self._arguments.margin, {}
        if start.mode in PROMISING and run.y_ms is not None:
            fields["tbt_target_ms"] = run.y_ms * margin
        return load.apply(
            run.workload(),
            target,
            vocab_size=self._vocab_size,
            model=_MODEL,
            num_generators=self._arguments.clients,
            drain_s=run.drain_s,
            fields=fields,
        )

    @contextmanager
    def _system(self, start: Start) -> Iterator[str]:
        if start.mode in self._running:
            yield self._running[start.mode]
            return
        if start.mode.startswith(VLLM):
            command = self._vllm_command(int(start.mode.removeprefix(VLLM)))
            with systems.vllm(command, _gpu_groups(self._arguments)) as target:
                yield target
            return
        promise_ms = start.promise_ms and start.promise_ms * (1 - self._arguments.margin)
        engine = replace(self._engine, tbt_target_ms=promise_ms)
        node, gateway = flags.parse_all(self._arguments, NodeConfig, GatewayConfig)
        choice = choose_here(self._deployment(start.mode), engine, node)
        with systems.deployed(choice.engine, choice.up, node, gateway) as target:
            yield target

    def _deployment(self, mode: str) -> UpConfig:
        """The deployment of one of our modes; without GPUs each card is an engine on the CPU."""
        on_cpu, split = self._engine.device == "cpu", split_of(mode)
        if split is None:
            num_decode = num_cards(self._arguments) if on_cpu and mode == AGGREGATED else 1
            return UpConfig(mode=mode, num_decode_nodes=num_decode)
        if on_cpu:
            return UpConfig(
                mode=DISAGGREGATED, num_prefill_nodes=split[0], num_decode_nodes=split[1]
            )
        groups, num_prefill = _gpu_groups(self._arguments), split[0]
        return UpConfig(
            mode=DISAGGREGATED,
            prefill_gpus=",".join(groups[:num_prefill]),
            decode_gpus=",".join(groups[num_prefill : sum(split)]),
        )

    def _vllm_command(self, chunk_tokens: int) -> list[str]:
        engine = self._engine
        return [
            *shlex.split(self._arguments.vllm),
            *("serve", str(engine.model), "--served-model-name", _MODEL),
            *("--load-format", engine.load_format),
            *("--max-num-batched-tokens", str(chunk_tokens)),
            *("--max-model-len", str(engine.max_model_len or _VLLM_MODEL_LEN)),
            *("--tensor-parallel-size", str(engine.tensor_parallel_size)),
            *shlex.split(self._arguments.vllm_flags),
        ]


def label(mode: str, arguments: argparse.Namespace) -> str:
    """The name of a mode in the results: ours include number of gateways and margin, if these are
    not the defaults."""
    parts = [mode]
    is_ours = mode in (*PROMISING, DISAGGREGATED) or split_of(mode) is not None
    if is_ours and arguments.num_gateways > 1:
        parts.append(f"{arguments.num_gateways} gateways")
    if mode in PROMISING and arguments.margin != _MARGIN:
        parts.append(f"margin {arguments.margin:g}")
    return ", ".join(parts)


def _warm_up(first: Run) -> Run:
    """Warm-up requests, which do not count."""
    timing = Timing(min(_WARM_UP_S, first.timing.count_s), 0.0)
    return replace(first, timing=timing, rate_per_s=first.rate_per_s / 2)


def _name(run: Run) -> str:
    target = "" if run.y_ms is None else f", Y {run.y_ms:g} ms"
    return f"{run.cell.name} at {run.rate_per_s:g}/s{target}"


def _line(found: dict[str, object]) -> str:
    groups: dict[str, dict[str, dict[str, float | None]]] = found["groups"]  # type: ignore[assignment]
    parts = [f"good {json.dumps(found['attained'])}"]
    for name, group in groups.items():
        for key in ("ttft_ms", "tpot_ms", "tbt_ms", "handoff_gap_ms"):
            numbers = "/".join("-" if v is None else f"{v:.1f}" for v in group[key].values())
            parts.append(f"{name} {key.removesuffix('_ms')} {numbers}")
    if found["kept_steps"]:
        parts.append(f"steps kept {json.dumps(found['kept_steps'])}")
    return "  ".join(parts)


def _metrics(target: str) -> str:
    """The metrics of our gateway; empty for a server without metrics."""
    try:
        with urlopen(f"{target.split(',')[0]}/metrics", timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def _gpus(arguments: argparse.Namespace) -> list[str]:
    return (arguments.gpus or "0").split(",")


def _gpu_groups(arguments: argparse.Namespace) -> list[str]:
    """The GPUs of each replica."""
    gpus, size = _gpus(arguments), arguments.tensor_parallel_size
    return [",".join(gpus[first : first + size]) for first in range(0, len(gpus), size)]


def num_cards(arguments: argparse.Namespace) -> int:
    """The number of GPUs, or of engines on a CPU."""
    if arguments.device == "cpu":
        return arguments.num_engines or 2
    return len(_gpus(arguments))


def _cards(arguments: argparse.Namespace) -> str:
    """A description of the hardware, for people."""
    if arguments.device == "cpu":
        return "CPU"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "GPU"
    return output.splitlines()[0].strip()


def write_model(shape: Shape, folder: Path) -> None:
    """A model directory for dummy weights, with a tokenizer of one word per token."""
    shape.write_config(folder)
    words = {f"t{index}": index for index in range(shape.vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def without_measured(
    starts: Sequence[Start], results: Results, arguments: argparse.Namespace
) -> list[Start]:
    """The starts with only those runs that are not in the results file."""
    rest = []
    for start in starts:
        name = label(start.mode, arguments)
        runs = [run for run in start.runs if not results.has(key_of(name, run))]
        if runs:
            rest.append(replace(start, runs=tuple(runs)))
    return rest


def main(argv: list[str]) -> int:
    """Plan, measure and write the results."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    arguments.served_model_name = _MODEL
    with tempfile.TemporaryDirectory(prefix="baton-shape-") as folder:
        if arguments.shape:
            write_model(SHAPES[arguments.shape], Path(folder))
            arguments.model, arguments.load_format = folder, "dummy"
        return _run_all(parser, arguments, argv)


def _run_all(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: list[str]
) -> int:
    results = Results(
        arguments.out,
        arguments.commit or commit(),
        command_line("goodput", argv),
        _cards(arguments),
    )
    timing = Timing(arguments.count_s, arguments.warm_lifetimes)
    modes = [*arguments.modes, *(one.split("=", 1)[0] for one in arguments.running)]
    num_engines = len(_gpu_groups(arguments)) if arguments.device != "cpu" else None
    try:
        starts = [
            *plan(
                modes,
                [cell_named(name).within(arguments.max_model_len) for name in arguments.cells],
                arguments.y,
                rates_by_cell(arguments.rates),
                arguments.factors,
                timing,
                num_cards(arguments),
                num_engines,
            )
        ]
    except ValueError as error:
        parser.error(str(error))
    if arguments.resume:
        starts = without_measured(starts, results, arguments)
    sweep = Sweep(arguments, results)
    for start in starts:
        print(f"{start.name}: {sweep.start_s(start):.0f} s to come up")
        for run in start.runs:
            print(f"  {_name(run)}: {run.most_s:.0f} s")
    runs_s = sum(run.most_s for start in starts for run in start.runs)
    total_s = runs_s + sum(map(sweep.start_s, starts))
    print(f"{total_s / 60:.1f} minutes at most, {len(starts)} starts", flush=True)
    if not arguments.plan:
        for start in starts:
            sweep.measure(start)
        print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
