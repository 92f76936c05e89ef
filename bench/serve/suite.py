"""The whole comparison on two GPUs, part by part into one results file.

python -m baton.bench.serve.suite --parts PART[,PART...] [--out FOLDER] [flags of an engine]

    alone      an engine in this process, on each prefill GPU in turn: the time of one prefill in a
               queue and when idle, the floor of all below
    system     one deployment (prefill GPU 0, decode GPU 1): running streams alone, running streams
               while prompts of 8192 tokens arrive, idle latencies
    mixed      the same two GPUs, each prefilling and decoding: running streams, and the same load

Parts that run later extend serve.json and use the results of earlier ones in it. A card's clock
falls by up to a per cent as it warms up: every part begins with load, and `alone` may run before
and after `system`. `--queued` prompts of 8192 tokens should take as long as the load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from baton.client import Result
from baton.core import flags
from baton.core.config import NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.metrics import Slo
from baton.loadgen import plots
from baton.loadgen.figures import ReportWindow
from baton.prefill_node import engine_main

from ..floors.figures import command_line, commit, machine
from ..floors.gpu_shapes import SHAPES
from . import idle, load, report, systems
from .clients import clocks, record_files
from .clients.arrivals import BACKGROUND
from .clients.workloads import DEFAULT_SHAPE, PROBE, LoadShape, make_workload

_SLO = Slo(ttft_s=0.5, tbt_s=0.05)


class Suite:
    """The results so far, and the file for them."""

    def __init__(self, arguments: argparse.Namespace, argv: Sequence[str]) -> None:
        self._arguments = arguments
        self._folder: Path = arguments.out
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / "serve.json"
        self._lengths = tuple(map(int, arguments.lengths.split(",")))
        shape = SHAPES[arguments.shape]
        model = shape.write_config(Path(tempfile.mkdtemp(prefix="baton-shape-")))
        self._vocab_size = shape.vocab
        arguments.model, arguments.load_format = str(model), "dummy"
        self._engine = flags.parse(EngineConfig, arguments)
        self._results = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._alone_samples: dict[int, list[idle.IdleRequests]] = {}
        self._queued_s: list[float] = []
        self._through: dict[int, list[Result]] = {}
        self._again: list[Result] = []
        self._results.setdefault("runs", []).append(
            {
                "commit": arguments.commit or commit(),
                "command": command_line("serve.suite", argv),
                "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
                "machine": machine(),
            }
        )

    def run(self, part: str) -> None:
        """Run one part; its results are written at once."""
        {"alone": self._alone, "system": self._system, "mixed": self._mixed}[part]()

    def _save(self, name: str, found: Any) -> None:
        self._results[self._arguments.label + name] = found
        self._path.write_text(json.dumps(self._results, indent=1) + "\n")

    def _found(self, name: str) -> Any:
        """The result of this name from this run, or from one without its label; None if there is
        neither."""
        return self._results.get(self._arguments.label + name) or self._results.get(name)

    @contextmanager
    def _clocks(self, name: str) -> Iterator[None]:
        """Record the GPU clocks during a part of this run."""
        found: clocks.Clocks = {}
        with clocks.recorded(found):
            yield
        self._results["runs"][-1].setdefault("clocks", []).append({name: found})
        print(f"{name}: {found}", flush=True)

    def _alone(self) -> None:
        config, gpus = engine_main.adjust(self._engine), self._arguments.prefill_gpus
        if gpus is None or config.num_ranks > 1:
            self._alone_on(config)
            return
        for gpu in gpus.split(","):  # no two cards are equally fast
            self._alone_on(dataclasses.replace(config, device=f"cuda:{gpu}"))

    def _alone_on(self, config: EngineConfig) -> None:
        """An engine alone; the samples of several runs are pooled."""
        repeats, num_queued = self._arguments.idle_repeats, self._arguments.queued
        queued_length = DEFAULT_SHAPE.num_prompt_tokens
        with self._clocks("alone"):
            found, queued_s = idle.measure_engine(
                config, self._lengths, repeats, queued_length, num_queued
            )
        for length, samples in found.items():
            times_ms = sorted(round(one.ttft_s * 1e3, 2) for one in samples)
            print(f"{config.device} alone, {length} tokens: TTFT {times_ms} ms", flush=True)
        queue_ms = median(queued_s) * 1e3
        print(f"a queue of {queued_length} tokens: {queue_ms:.2f} ms each", flush=True)
        self._queued_s += queued_s
        for length, samples in found.items():
            self._alone_samples.setdefault(length, []).extend(samples)
        alone = {n: [[s.ttft_s, s.gap_s] for s in ss] for n, ss in self._alone_samples.items()}
        self._save("alone queued", self._queued_s)
        self._save("alone", alone)
        self._compare()

    def _system(self) -> None:
        up = flags.parse(UpConfig, self._arguments)
        node = flags.parse(NodeConfig, self._arguments)
        is_one_caller = self._arguments.one_caller
        with systems.over_grpc(self._engine, up, node, is_one_caller=is_one_caller) as target:
            repeats, address = self._arguments.idle_repeats, target.removeprefix("grpc://")
            if repeats:
                # The prefill time of a restarted stream, whose prompt is cached: for the floor.
                length = DEFAULT_SHAPE.stream_prompt_tokens
                self._again = idle.measure_again(address, length, repeats, self._vocab_size)
                self._compare()
            self._streams("", target)
            if repeats:
                lengths, vocab = self._lengths, self._vocab_size
                self._through = idle.measure_system(address, lengths, repeats, vocab)
                self._compare()

    def _compare(self) -> None:
        """Compare the system with the engine alone, where both are measured."""
        if not self._again:
            return
        compared = idle.compare(self._known_alone(), self._through)
        name = f"{DEFAULT_SHAPE.stream_prompt_tokens} again"
        compared[name] = idle.compare({}, {0: self._again})["0"]
        print(json.dumps(compared, indent=1), flush=True)
        self._save("idle", compared)

    def _known_alone(self) -> dict[int, list[idle.IdleRequests]]:
        known = self._found("alone") or {}
        return {int(n): [idle.IdleRequests(*pair) for pair in pairs] for n, pairs in known.items()}

    def _mixed(self) -> None:
        gpus = [self._arguments.prefill_gpus, self._arguments.decode_gpus]
        num_engines = sum(map(_num_gpus, gpus))
        joined = ",".join(filter(None, gpus)) or None
        with systems.mixed(self._engine, joined, num_engines) as target:
            self._streams("mixed ", target)

    def _streams(self, prefix: str, target: str) -> None:
        """Running streams alone, then with prompts arriving; both in one page of plots."""
        arguments, runs, tables = self._arguments, {}, []
        for mix, duration_s in (
            ("streams", arguments.idle_s),
            ("streams+8k", arguments.load_s),
        ):
            if not duration_s:
                continue
            shape = LoadShape(
                rate_per_s=arguments.rate,
                duration_s=duration_s,
                warmup_s=arguments.warmup_s,
                num_streams=arguments.streams,
                num_output_tokens=arguments.output_tokens,
            )
            with self._clocks(f"{prefix}{mix}"):
                found = load.apply(
                    make_workload(mix, shape),
                    target,
                    vocab_size=self._vocab_size,
                    num_generators=arguments.generators,
                )
            window = ReportWindow(shape.warmup_s, shape.duration_s)
            num_gpus = _num_gpus(arguments.prefill_gpus)
            num_prefills = max(1, num_gpus // self._engine.num_ranks)
            summary = report.summarise(found, window, _SLO, self._prefill_s(), num_prefills)
            name = f"{prefix}{mix}"
            tables.append(f"{arguments.label}{name}\n{report.table(summary)}")
            print(tables[-1], flush=True)
            record_files.save(self._folder / f"{_file_name(arguments.label + name)}.npz", found)
            self._save(name, summary)
            runs[name] = (found, window)
        if runs:
            title = f"{arguments.shape}, {arguments.label}{prefix or 'disaggregated'}"
            page = self._folder / f"{_file_name(title)}.html"
            plots.write(page, title, runs, "\n\n".join(tables))

    def _prefill_s(self) -> dict[str, float]:
        """By group, the time of one prefill in a queue: the card's power limit slows it by some per
        cent compared with an idle one. Empty if it is not measured."""
        queued_s, idle_times = self._found("alone queued"), self._found("idle")
        if not queued_s or not idle_times:
            return {}
        again_ms = idle_times[f"{DEFAULT_SHAPE.stream_prompt_tokens} again"]["prefill_ms"]
        return {PROBE: median(queued_s), BACKGROUND: again_ms / 1e3}


def _num_gpus(gpus: str | None) -> int:
    """The number of GPUs of a role; 1 without GPUs, for one engine on the CPU."""
    return len(gpus.split(",")) if gpus else 1


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text).strip("-")


def main(argv: list[str]) -> int:
    """Run the parts in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--lengths", default="1024,8192,32768", help="of prompts, when idle")
    parser.add_argument("--idle-repeats", type=int, default=8)
    parser.add_argument("--queued", type=int, default=48, help="prompts of a queue alone")
    parser.add_argument("--rate", type=float, default=3.7)
    parser.add_argument("--streams", type=int, default=DEFAULT_SHAPE.num_streams)
    parser.add_argument(
        "--output-tokens", type=int, default=DEFAULT_SHAPE.num_output_tokens, help="of the prompts"
    )
    parser.add_argument("--idle-s", type=float, default=20.0, help="running streams alone")
    parser.add_argument("--load-s", type=float, default=60.0, help="with prompts arriving")
    parser.add_argument("--generators", type=int, default=4, help="of load; each is a caller")
    parser.add_argument("--one-caller", action="store_true", help="all generators show one key")
    parser.add_argument("--warmup-s", type=float, default=5.0)
    parser.add_argument("--label", default="", help="before the names of what is found")
    parser.add_argument("--commit", help="what is measured, where git does not know")
    parser.add_argument("--out", type=Path, default=Path("serve-results"))
    flags.add_flags(parser, EngineConfig, NodeConfig, UpConfig)
    parser.set_defaults(mode="disaggregated")
    arguments = parser.parse_args(argv)
    suite = Suite(arguments, argv)
    for part in arguments.parts.split(","):
        suite.run(part)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
