"""The effect on a client when its running request moves from one engine to another.

python -m baton.bench.serve.moves [--shape NAME --gpus 0,1 --device cuda] [--contexts N...]
                                   [--beside N...]

A deployment in `auto`, and a gateway in this process that moves requests on demand: one stream at a
time, alone and beside others. Figures: a stream's longest gap from when its move begins until it
ends, the median of its gaps before, and the outcomes of moves.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from baton.cli.host.gpu_choice import choose_here
from baton.client import AsyncClient
from baton.client.async_client import AsyncGeneration
from baton.core import flags
from baton.core.config import ClusterConfig, GatewayConfig, NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.ports import Clock
from baton.gateway.moves.choice import PlannedMove
from baton.gateway.moves.mover import movable_from
from baton.gateway.process.server import Gateway, serve

from ..floors.figures import ROOT, Figure, command_line, table, write_figures
from ..floors.gpu_shapes import SHAPES
from ..goodput.__main__ import write_model
from . import systems

_TOKENS_BEFORE, _TOKENS = 60, 250
_REPEATS = 10


class Bench:
    """A gateway in this process, and client streams through it."""

    def __init__(self, gateway: Gateway, client: AsyncClient, vocab_size: int) -> None:
        self._gateway, self._client = gateway, client
        self._vocab_size = vocab_size
        self._draw = random.Random(0)

    async def figures(self, context: int, num_beside: int) -> list[Figure]:
        """The figures of sequential streams with `context` prompt tokens, beside others that
        continue."""
        gaps, before, ends = list[float](), list[float](), Counter[str]()
        async with self._beside(context, num_beside):
            for number in range(_REPEATS + 1):
                end, gap_s, before_s = await self._move_one(context)
                if number:  # the first opens links and measures them
                    ends[end] += 1
                if number and end == "moved":
                    gaps.append(gap_s * 1e3)
                    before.append(before_s * 1e3)
        name = f"{context} tokens beside {num_beside}"
        title = f"{name}: the longest gap of a move"
        if not gaps:
            raise RuntimeError(f"{name}: nothing was moved, {self._moves()}")
        return [
            Figure(title, "ms", tuple(gaps)),
            Figure(f"{name}: gaps before", "ms", tuple(before)),
            *(
                Figure(f"{name}: {end}, of {_REPEATS}", "", (float(number),))
                for end, number in ends.most_common()
            ),
        ]

    @asynccontextmanager
    async def _beside(self, context: int, count: int) -> AsyncIterator[None]:
        """`count` streams, each of which begins again when it ends."""

        async def stream() -> None:
            while True:
                await self._stream(context).finish()

        tasks = [asyncio.create_task(stream()) for _ in range(count)]
        await asyncio.sleep(1.0 if count else 0.0)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _stream(self, context: int) -> AsyncGeneration:
        prompt = [self._draw.randrange(3, self._vocab_size) for _ in range(context)]
        return self._client.generate(
            prompt_token_ids=prompt, max_tokens=_TOKENS, temperature=0.0, ignore_eos=True
        )

    async def _move_one(self, context: int) -> tuple[str, float, float]:
        """(outcome of the stream's move, longest gap since it began, median gap before), in
        seconds."""
        others = {one.request_id for one in self._gateway._sessions}
        stream, count, began_s = self._stream(context), 0, math.inf
        earlier = self._moves()
        async for chunk in stream:
            count += len(chunk.token_ids)
            if began_s == math.inf and count >= _TOKENS_BEFORE:
                began_s = time.monotonic()
                self._move(others)
        end = next(iter(self._moves() - earlier), "not begun")
        times = stream.result.times
        since = [
            gap for at, gap in zip(times.token_s[1:], times.gaps_s, strict=True) if at > began_s
        ]
        return end, max(since), statistics.median(times.gaps_s[: _TOKENS_BEFORE - 1])

    def _moves(self) -> Counter[str]:
        return Counter(self._gateway._table.plans.moves)

    def _move(self, others: set[str]) -> None:
        """Move the longest of the streams that are not in `others` to the other engine."""
        mover, sessions = self._gateway._mover, self._gateway._sessions
        ours = [one for one in sessions if one.request_id not in others]
        session = max(ours, key=lambda one: len(one.answer.output_ids))
        source = movable_from(session, Clock().monotonic_s())
        if mover is not None and source is not None:
            (target,) = self._gateway._table.engines.keys() - {source}
            mover._begin(PlannedMove(session.request_id, source, target), session)


async def measure(
    config: GatewayConfig,
    cluster: ClusterConfig,
    vocab_size: int,
    loads: Sequence[tuple[int, int]],
) -> list[Figure]:
    """Measure through a gateway with these settings, whose nodes are ready; loads: (context, number
    of other streams)."""
    gateway = await serve(config, cluster)
    try:
        await gateway.startup_lines()
        async with AsyncClient(f"127.0.0.1:{gateway.port}") as client:
            bench = Bench(gateway, client, vocab_size)
            return [
                figure
                for context, num_beside in loads
                for figure in await bench.figures(context, num_beside)
            ]
    finally:
        await gateway.stop(grace_s=0.0)


def main(argv: list[str]) -> int:
    """Measure, print the figures and write them."""
    parser = argparse.ArgumentParser(
        prog="python -m baton.bench.serve.moves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, help="dummy weights of this shape as --model")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--beside", type=int, nargs="*", default=[0, 32], help="other streams")
    parser.add_argument("--commit", help="what is measured, where git does not know")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "moves.json")
    flags.add_flags(parser, EngineConfig, NodeConfig)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="baton-shape-") as folder:
        if arguments.shape:
            write_model(SHAPES[arguments.shape], Path(folder))
            arguments.model, arguments.load_format = folder, "dummy"
        engine, node = flags.parse_all(arguments, EngineConfig, NodeConfig)
        vocab_size = SHAPES[arguments.shape].vocab if arguments.shape else 1000
        config = GatewayConfig(
            grpc_port=0, http_port=0, model=engine.model, skip_tokenizer_init=True
        )
        choice = choose_here(UpConfig(), engine, node)
        with systems.joined(choice.engine, choice.up, node) as cluster:
            loads = list(itertools.product(arguments.contexts, arguments.beside))
            figures = asyncio.run(measure(config, cluster, vocab_size, loads))
    print(table(figures))
    command = command_line("serve.moves", argv)
    write_figures(arguments.out, figures, command, arguments.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
