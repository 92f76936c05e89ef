"""The tables in README.md and docs/, and the pictures of docs/, made from bench/results/*.json.

    python -m baton.bench.report        (or `make docs`)

A page names a table between markers (`bench/pages/reference.py`); a test fails if a page differs
from the output of this module. Measures nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from .pages.reference import refresh_parts
from .result_tables import baselines, goodput, gpu, host, offline, serving
from .result_tables.results import ROOT

PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "why.md")

PICTURES: Mapping[Path, Callable[[], str]] = {
    ROOT / "docs" / "images" / "why-memory.svg": baselines.memory_picture,
    ROOT / "docs" / "images" / "why-throughput.svg": baselines.throughput_picture,
    ROOT / "docs" / "images" / "why-gaps.svg": baselines.gaps_picture,
    ROOT / "docs" / "images" / "why-pairs.svg": baselines.pairs_picture,
}

TABLES: Mapping[str, Callable[[], str]] = {
    "gpu summary": gpu.summary,
    "gpu steps": gpu.steps,
    "gpu shapes": gpu.shapes,
    "gpu quantised": gpu.quantised,
    "host tier": gpu.host_tier,
    "copies": gpu.copies,
    "sums": gpu.sums,
    "sending products": gpu.sending_products,
    "several gpus": gpu.parallel,
    "on h100s": gpu.on_h100s,
    "products": gpu.products,
    "attention of prompts": gpu.prompts_attention,
    "idle": serving.idle,
    "moves": serving.moves,
    "load": serving.load_rows,
    "four gpus": serving.four_gpus,
    "mixture on four": serving.mixture_on_four,
    "two prefill": serving.two_prefill,
    "overload": serving.overload,
    "faults": serving.faults,
    "schemes": baselines.schemes,
    "schemes on a gpu": baselines.on_gpu,
    "pairs": baselines.pairs,
    "admissions": baselines.admissions,
    "goodput summary": goodput.summary,
    "goodput": goodput.highest,
    "goodput by rate": goodput.by_rate,
    "sharegpt": goodput.sharegpt,
    "offline": offline.offline,
    "front": host.front,
    "texts": host.texts,
    "callers": host.callers,
    "simulated goodput": host.simulated_goodput,
    "beam blocks": host.beam_blocks,
    "index": host.index,
    "prefix": host.prefix,
    "quality": host.quality,
    "speculation": host.speculation,
    "speculation gpu": host.speculation_gpu,
    "lora": host.lora,
    "chats": host.chats,
    "soak": host.soak,
    "strangers": host.strangers,
    "fault sweep": host.fault_sweep,
    **{
        f"cpu {family}": partial(host.cpu, family)
        for family in ("scheduling", "shm", "model", "structured", "telemetry", "system")
    },
}


def refreshed(page: Path) -> str:
    """The text of a page with all its tables updated."""
    results = "bench/results" if page.parent == ROOT else "../bench/results"
    return refresh_parts(
        page.read_text(), lambda name: TABLES[name]().replace("{results}", results)
    )


def main() -> int:
    """Write the pages and pictures."""
    for path, picture in PICTURES.items():
        path.write_text(picture())
    for page in PAGES:
        page.write_text(refreshed(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
