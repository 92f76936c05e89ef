"""nano-vllm's public workload through `LLM`, ours or another engine's: output tokens per second.

    python -m baton.bench.offline --shape qwen3-0.6b
    python -m baton.bench.offline --shape llama-3.1-8b --engine vllm      (where vLLM is installed)
    python -m baton.bench.offline --model DIR --engine nano

256 prompts of 100 to 1024 random ids, each with 100 to 1024 output tokens, all sent at once, at a
temperature of 0.6, without prefix caching: requests and seed are those of the benchmark in
github.com/GeeeekExplorer/nano-vllm. Weights of a shape are random; only output tokens count. For
our engine also the host time of a step with all sequences: the CPU time of the thread that
schedules, launches, collects and delivers while the device computes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..floors.figures import ROOT, command_line, commit, machine
from ..floors.gpu_shapes import SHAPES
from .engines import ENGINES, MAX_MODEL_LEN, HostTimes
from .workload import MAX_ID, Work


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m baton.bench.offline")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    model.add_argument("--model", default="demo", help="a folder with weights")
    parser.add_argument("--engine", choices=ENGINES, default="baton")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=100, help="tokens, of prompts and outputs")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--vocab-size", type=int, default=MAX_ID + 1, help="ids are below")
    parser.add_argument("--repeats", type=int, default=2, help="the best counts")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more for LLM, JSON")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "offline.json")
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure, print, and add a row to the results file."""
    arguments, measured = _parser().parse_args(argv), commit()
    work = Work.draw(arguments.num_seqs, arguments.shortest, arguments.longest)
    work = work.within(arguments.vocab_size)
    host = HostTimes(arguments.num_seqs)
    more = {"max_model_len": arguments.max_model_len, **arguments.engine_args}
    with tempfile.TemporaryDirectory(prefix="baton-shape-") as folder:
        model = arguments.model
        if arguments.shape:
            model = str(SHAPES[arguments.shape].write_config(Path(folder)))
            more["load_format"] = "dummy"
        generate = ENGINES[arguments.engine](model, more, host)
        generate(work.prompts[:4], [16] * 4)  # one-time costs of the first steps
        seconds = []
        for _ in range(arguments.repeats):
            began_s = time.perf_counter()
            generate(work.prompts, work.num_outputs)
            seconds.append(time.perf_counter() - began_s)
    row = {
        "engine": arguments.engine,
        "model": arguments.shape or Path(arguments.model).name,
        "num_seqs": arguments.num_seqs,
        "prompt_tokens": work.num_prompt_tokens,
        "output_tokens": sum(work.num_outputs),
        "seconds": [round(one, 3) for one in seconds],
        "tokens_per_s": round(sum(work.num_outputs) / min(seconds), 1),
        **(host.summary() if arguments.engine == "baton" else {}),
        "commit": measured,
        "command": command_line("offline", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
    }
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    _add(arguments.out, row)
    return 0


def _add(path: Path, row: dict[str, Any]) -> None:
    """Add the row in place of an earlier one of the same command and engine."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    same = ("engine", "model", "num_seqs")
    rows = [one for one in rows if any(one[key] != row[key] for key in same)]
    path.write_text(json.dumps({"rows": [*rows, row]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
