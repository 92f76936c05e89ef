"""Chats of several turns, and prompts whose prefix another card has, through a whole deployment.

python -m baton.bench.serve.chats [--shape NAME --gpus 0,1 --device cuda] [--modes MODE...]

All chats begin at once; the prompt of a turn is the whole chat so far, with the last output, and
new tokens. Figures for each mode of `baton up`: computed prompt tokens over new prompt tokens, and
TTFT of the first turn and of the later ones.

`auto` also measures the cost of a prefix from a peer: streams of one prompt begin one after the
other until the router chooses the other engine, which has no block of it and fetches its KV.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton.cli.host.gpu_choice import choose_here
from baton.client import AsyncClient, Result
from baton.core import flags
from baton.core.config import NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.request.timeline import Event

from ..floors.figures import ROOT, Figure, command_line, table, write_figures
from ..floors.gpu_shapes import SHAPES
from ..goodput.__main__ import write_model
from . import systems

_MODES = ("disaggregated", "aggregated", "auto")
_PAUSE_S = 0.5  # the longest pause of a user
_MOST_STREAMS, _STREAM_TOKENS = 12, 300
_NUM_PROMPTS = 5
_TARGET_MS, _TARGET_TOKENS = 5.0, 8192  # on two H200s, in addition to a local hit
_MOST_COMPUTED = 1.1
_STAGES = (
    Event.ARRIVED,
    Event.ROUTED,
    Event.PREFILL_QUEUED,
    Event.PREFILL_STARTED,
    Event.FIRST_TOKEN,
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """The numbers of tokens per turn, of turns and of chats."""

    num_chats: int
    num_turns: int
    system: int
    new: int
    answer: int
    shared_prompt: int


class Bench:
    """One gateway and all its chats."""

    def __init__(self, client: AsyncClient, vocab_size: int, lengths: Lengths) -> None:
        self._client, self._lengths = client, lengths
        self._vocab_size = vocab_size
        self._draw = random.Random(0)

    def _tokens(self, num: int) -> list[int]:
        return [self._draw.randrange(3, self._vocab_size) for _ in range(num)]

    async def _ask(self, prompt: Sequence[int], num_tokens: int) -> Result:
        stream = self._client.generate(
            prompt_token_ids=list(prompt), max_tokens=num_tokens, temperature=0.0, ignore_eos=True
        )
        return await stream.finish()

    async def _chat(self) -> list[Result]:
        lengths, results = self._lengths, list[Result]()
        history = self._tokens(lengths.system)
        for _ in range(lengths.num_turns):
            await asyncio.sleep(self._draw.random() * _PAUSE_S)
            history += self._tokens(lengths.new)
            result = await self._ask(history, lengths.answer)
            results.append(result)
            history += result.token_ids
        return results

    async def chats(self, mode: str) -> list[Figure]:
        """Run all chats, after two that open links and compile kernels."""
        await asyncio.gather(*(self._chat() for _ in range(2)))
        chats = await asyncio.gather(*(self._chat() for _ in range(self._lengths.num_chats)))
        lengths = self._lengths
        computed = sum(r.prompt_tokens - r.cached_tokens for chat in chats for r in chat)
        new = lengths.system + lengths.new * lengths.num_turns
        share = computed / (new * len(chats))
        first = [_ttft_ms(chat[0]) for chat in chats]
        later = [_ttft_ms(result) for chat in chats for result in chat[1:]]
        gaps = [gap * 1e3 for chat in chats for r in chat for gap in r.times.gaps_s]
        return [
            Figure(f"{mode}: computed over new tokens", "x", (share,), 1.0, "", _MOST_COMPUTED),
            Figure(f"{mode}: TTFT of first turns", "ms", tuple(first)),
            Figure(f"{mode}: TTFT of later turns", "ms", tuple(later)),
            Figure(f"{mode}: TTFT of later turns, p90", "ms", (_p90(later),)),
            *_stages(mode, [result for chat in chats for result in chat[1:]]),
            Figure(f"{mode}: tokens' gaps, p90", "ms", (_p90(gaps),)),
        ]

    async def peers(self) -> list[Figure]:
        """TTFT of one prompt: computed, again at an engine with its KV, and at one that fetches
        it."""
        computed, local, fetched = list[float](), list[float](), list[float]()
        for number in range(_NUM_PROMPTS + 1):
            results = await self._streams_of(self._tokens(self._lengths.shared_prompt))
            if not number:
                continue  # opens the links
            computed.append(_ttft_ms(results[0]))
            have_it = {results[0].prefill_node, results[0].decode_node}  # by a hand-off, too
            for result in results[1:]:
                node = result.prefill_node
                if node in have_it:
                    local.append(_ttft_ms(result))
                elif result.cached_tokens:
                    fetched.append(_ttft_ms(result))
                have_it |= {node, result.decode_node}
                print(f"{node}: {result.cached_tokens} cached, TTFT {_ttft_ms(result):.1f} ms")
        length = self._lengths.shared_prompt
        figures = [
            Figure(f"{length} tokens, computed: TTFT", "ms", tuple(computed)),
            Figure(f"{length} tokens, cached here: TTFT", "ms", tuple(local)),
        ]
        if fetched:
            more = statistics.median(fetched) - statistics.median(local)
            target = _TARGET_MS if length == _TARGET_TOKENS else None
            figures += [
                Figure(f"{length} tokens, from a peer: TTFT", "ms", tuple(fetched)),
                Figure(f"{length} tokens, from a peer: more", "ms", (more,), target=target),
            ]
        return figures

    async def _streams_of(self, prompt: Sequence[int]) -> list[Result]:
        """Start streams one after the other, each once the previous one has begun; they end
        together."""
        running = list[asyncio.Task[Result]]()
        for _ in range(_MOST_STREAMS):
            has_begun = asyncio.Event()
            running.append(asyncio.create_task(self._stream(prompt, has_begun)))
            await has_begun.wait()
            await asyncio.sleep(0.05)  # until the index and the heartbeats show it
        return list(await asyncio.gather(*running))

    async def _stream(self, prompt: Sequence[int], has_begun: asyncio.Event) -> Result:
        stream = self._client.generate(
            prompt_token_ids=list(prompt),
            max_tokens=_STREAM_TOKENS,
            temperature=0.0,
            ignore_eos=True,
        )
        async for _ in stream:
            has_begun.set()
        return await stream.finish()


def _ttft_ms(result: Result) -> float:
    return (result.times.ttft_s or 0.0) * 1e3


def _stages(mode: str, results: Sequence[Result]) -> list[Figure]:
    """The stages of TTFT; the rest is the way to the gateway and back."""
    found: dict[str, list[float]] = {}
    for result in results:
        at_ns = {stamp.event: stamp.unix_ns for stamp in result.timeline}
        for begin, end in itertools.pairwise(_STAGES):
            found.setdefault(end.value, []).append((at_ns[end] - at_ns[begin]) / 1e6)
        inside = (at_ns[Event.FIRST_TOKEN] - at_ns[Event.ARRIVED]) / 1e6
        found.setdefault("client", []).append(_ttft_ms(result) - inside)
    return [
        Figure(f"{mode}: later turns, until {name}", "ms", tuple(values))
        for name, values in found.items()
    ]


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))]


async def measure(address: str, mode: str, vocab_size: int, lengths: Lengths) -> list[Figure]:
    """The figures of one deployment."""
    async with AsyncClient(address) as client:
        bench = Bench(client, vocab_size, lengths)
        figures = await bench.chats(mode)
        return figures + (await bench.peers() if mode == "auto" else [])


def main(argv: list[str]) -> int:
    """Measure, print the figures and write them."""
    parser = argparse.ArgumentParser(
        prog="python -m baton.bench.serve.chats",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, help="dummy weights of this shape as --model")
    parser.add_argument("--modes", nargs="*", choices=_MODES, default=_MODES)
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--system-tokens", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument("--shared-tokens", type=int, default=_TARGET_TOKENS)
    parser.add_argument("--commit", help="what is measured, where git does not know")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "chats.json")
    flags.add_flags(parser, EngineConfig, NodeConfig)
    arguments = parser.parse_args(argv)
    lengths = Lengths(
        *(arguments.chats, arguments.turns, arguments.system_tokens, arguments.new_tokens),
        *(arguments.answer_tokens, arguments.shared_tokens),
    )
    figures = list[Figure]()
    with tempfile.TemporaryDirectory(prefix="baton-shape-") as folder:
        if arguments.shape:
            write_model(SHAPES[arguments.shape], Path(folder))
            arguments.model, arguments.load_format = folder, "dummy"
        engine, node = flags.parse_all(arguments, EngineConfig, NodeConfig)
        vocab_size = SHAPES[arguments.shape].vocab if arguments.shape else 1000
        for mode in arguments.modes:
            up = UpConfig(mode=mode)
            if engine.device == "cpu" and mode == "aggregated":
                up = replace(up, num_decode_nodes=2)
            choice = choose_here(up, engine, node)
            begin_s = time.monotonic()
            with systems.over_grpc(choice.engine, choice.up, node) as address:
                print(f"{mode}: up in {time.monotonic() - begin_s:.0f} s", flush=True)
                figures += asyncio.run(measure(address, mode, vocab_size, lengths))
            print(table(figures), flush=True)
    command = command_line("serve.chats", argv)
    write_figures(arguments.out, figures, command, arguments.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
