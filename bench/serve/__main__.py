"""python -m baton.bench.serve --mix MIX (--target URL | --start SYSTEM [flags of an engine]) [...]

Runs one mix on a system that already runs, or on one that it starts, and writes figures (JSON), raw
times (npz) and a page of plots (HTML).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.core import flags
from baton.core.config import NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.metrics import Slo
from baton.core.model_dir import read_json, resolve_model_dir
from baton.loadgen import plots
from baton.loadgen.figures import ReportWindow

from ..floors.figures import ROOT, command_line, commit, machine
from ..floors.gpu_shapes import SHAPES
from . import idle, load, report, systems
from .clients import record_files
from .clients.workloads import DEFAULT_SHAPE, MIXES, LoadShape, Workload, make_workload


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m baton.bench.serve", description=__doc__)
    parser.add_argument("--mix", choices=MIXES, default="streams+8k")
    parser.add_argument("--target", help="grpc://HOST:PORT, http://HOST:PORT or nodes:REDIS_URL")
    parser.add_argument("--start", choices=("disaggregated", "mixed"), help="start this instead")
    parser.add_argument("--shape", choices=SHAPES, help="dummy weights of this shape as --model")
    parser.add_argument(
        "--rate", type=float, default=DEFAULT_SHAPE.rate_per_s, help="requests a second"
    )
    parser.add_argument("--duration-s", type=float, default=DEFAULT_SHAPE.duration_s)
    parser.add_argument(
        "--warmup-s", type=float, default=DEFAULT_SHAPE.warmup_s, help="not reported"
    )
    parser.add_argument("--drain-s", type=float, default=10.0, help="for requests at the end")
    parser.add_argument("--prompt-tokens", type=int, default=DEFAULT_SHAPE.num_prompt_tokens)
    parser.add_argument("--output-tokens", type=int, default=DEFAULT_SHAPE.num_output_tokens)
    parser.add_argument("--streams", type=int, default=DEFAULT_SHAPE.num_streams)
    parser.add_argument(
        "--stream-prompt-tokens", type=int, default=DEFAULT_SHAPE.stream_prompt_tokens
    )
    parser.add_argument(
        "--stream-output-tokens", type=int, default=DEFAULT_SHAPE.stream_output_tokens
    )
    parser.add_argument("--idle-lengths", default="1024,8192,32768", help="of the mix `idle`")
    parser.add_argument("--idle-repeats", type=int, default=DEFAULT_SHAPE.num_idle_requests)
    parser.add_argument("--trace-speed", type=float, default=1.0)
    parser.add_argument("--load-seed", type=int, default=0, help="of arrivals and prompts")
    parser.add_argument("--generators", type=int, default=1, help="processes that send and read")
    parser.add_argument("--vocab-size", type=int, help="default: the model's")
    parser.add_argument("--ttft-slo-ms", type=float, default=500.0)
    parser.add_argument("--tbt-slo-ms", type=float, default=50.0)
    parser.add_argument("--prefill-ms", default="", help="GROUP=MS,...: for the FIFO replay")
    parser.add_argument("--out", type=Path, default=Path("serve.json"))
    parser.add_argument("--commit", help="what is measured, where git does not know")
    flags.add_flags(parser, EngineConfig, NodeConfig, UpConfig)
    parser.set_defaults(mode="disaggregated")
    return parser


def _shape(arguments: argparse.Namespace) -> LoadShape:
    return LoadShape(
        rate_per_s=arguments.rate,
        duration_s=arguments.duration_s,
        warmup_s=arguments.warmup_s,
        num_prompt_tokens=arguments.prompt_tokens,
        num_output_tokens=arguments.output_tokens,
        num_streams=arguments.streams,
        stream_prompt_tokens=arguments.stream_prompt_tokens,
        stream_output_tokens=arguments.stream_output_tokens,
        idle_lengths=tuple(map(int, arguments.idle_lengths.split(","))),
        num_idle_requests=arguments.idle_repeats,
        trace_speed=arguments.trace_speed,
        max_tokens=arguments.max_model_len or DEFAULT_SHAPE.max_tokens,
        seed=arguments.load_seed,
    )


@contextmanager
def _system(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.target:
        yield arguments.target
        return
    engine = flags.parse(EngineConfig, arguments)
    if arguments.start == "mixed":
        with systems.mixed(engine, arguments.gpus, arguments.num_engines or 1) as target:
            yield target
    else:
        up, node = flags.parse(UpConfig, arguments), flags.parse(NodeConfig, arguments)
        with systems.over_grpc(engine, up, node) as target:
            yield target


def _run_idle(target: str, arguments: argparse.Namespace, shape: LoadShape, vocab: int) -> dict:
    address = target.removeprefix("grpc://")
    through = idle.measure_system(address, shape.idle_lengths, shape.num_idle_requests, vocab)
    return {"idle": idle.compare({}, through)}


def _run_load(target: str, arguments: argparse.Namespace, workload: Workload, vocab: int) -> dict:
    found = load.apply(
        workload,
        target,
        vocab_size=vocab,
        model=arguments.served_model_name or "",
        num_generators=arguments.generators,
        drain_s=arguments.drain_s,
    )
    window = ReportWindow(workload.warmup_s, workload.duration_s)
    slo = Slo(arguments.ttft_slo_ms / 1e3, arguments.tbt_slo_ms / 1e3)
    pairs = (pair.split("=") for pair in arguments.prefill_ms.split(",") if pair)
    summary = report.summarise(found, window, slo, {name: float(ms) / 1e3 for name, ms in pairs})
    text = report.table(summary)
    print(text)
    record_files.save(arguments.out.with_suffix(".npz"), found)
    page = arguments.out.with_suffix(".html")
    plots.write(page, f"{workload.name} on {target}", {workload.name: (found, window)}, text)
    return summary


def main(argv: list[str]) -> int:
    """Measure, print the figures and write them."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not (arguments.target or arguments.start):
        parser.error("give --target, or --start")
    shape = _shape(arguments)
    if arguments.shape:
        folder = Path(tempfile.mkdtemp(prefix="baton-shape-"))
        arguments.model = str(SHAPES[arguments.shape].write_config(folder))
        arguments.load_format = "dummy"
    config = read_json(resolve_model_dir(arguments.model) / "config.json")
    vocab = arguments.vocab_size or int(config["vocab_size"])
    with _system(arguments) as target:
        if arguments.mix == "idle":
            summary = _run_idle(target, arguments, shape, vocab)
            print(json.dumps(summary, indent=1))
        else:
            workload = make_workload(arguments.mix, shape)
            summary = _run_load(target, arguments, workload, vocab)
    result = {
        "commit": arguments.commit or commit(),
        "command": command_line("serve", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        **summary,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    assert ROOT.is_dir()
    sys.exit(main(sys.argv[1:]))
