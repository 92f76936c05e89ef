"""The process of a load generator: one Python process cannot read ten thousand tokens per second.

parent ── plan: JSON, one line ──► worker ── "connected" ──► parent
parent ── start_s ───────────────► worker ── "done" ───────► parent reads the records' file
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from baton.core.process import event_loop
from baton.loadgen.records import Record

from . import generator, record_files
from .arrivals import Arrival, Background, Prompt
from .driver_choice import connect


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The JSON-able plan of one generator. `fields`: additional fields of each request's body, over
    HTTP."""

    target: str
    model: str
    vocab_size: int
    index: int
    num_generators: int
    duration_s: float
    drain_s: float
    arrivals: tuple[Arrival, ...]
    background: Background | None
    out: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerPlan:
        plan: dict[str, Any] = json.loads(text)
        background = plan.pop("background")
        arrivals = tuple(map(_arrival, plan.pop("arrivals")))
        return cls(
            **plan,
            arrivals=arrivals,
            background=None if background is None else Background(**background),
        )

    @property
    def streams(self) -> range:
        """The background streams of this generator."""
        num_streams = 0 if self.background is None else self.background.num_streams
        return range(self.index, num_streams, self.num_generators)


def _arrival(fields: dict[str, Any]) -> Arrival:
    prompt = fields.pop("prompt")
    prompt["seeds"] = tuple(prompt["seeds"])
    return Arrival(prompt=Prompt(**prompt), **fields)


async def _run(plan: WorkerPlan) -> list[Record]:
    async with connect(plan.target, plan.model, plan.index, plan.fields) as driver:
        print("connected", flush=True)
        start_s = float(await asyncio.to_thread(sys.stdin.readline))
        return await generator.run(
            driver,
            plan.arrivals,
            plan.streams,
            plan.background,
            start_s=start_s,
            duration_s=plan.duration_s,
            drain_s=plan.drain_s,
            vocab_size=plan.vocab_size,
        )


def main() -> None:
    """Read the plan, run it, write the records."""
    plan = WorkerPlan.from_json(sys.stdin.readline())
    record_files.save(Path(plan.out), event_loop.run(lambda: _run(plan)))
    print("done", flush=True)


if __name__ == "__main__":
    main()
