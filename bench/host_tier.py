"""Copies of KV blocks to host memory and back: alone, and their cost for decodes at the same time.

python -m baton.bench.host_tier [--model DIR] [--swap-space GIB] [--out FILE]

Uses an engine of the model (random weights), on the GPU if there is one. Copies of 1k to 32k
tokens, of contiguous and of scattered blocks: wall time from the call until a poll sees the end,
and the time for which the call blocks its caller. On a GPU, the same by one kernel that reads the
pinned memory. A prompt's first token, computed and with its KV from host memory. Then decodes
without copies, and with continuous copies in, out, and both, in turns and each from the same
context on; copies are polled while a step is on the device, as a node does.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.kv.host_copies import CudaCopier, Direction, HostCopier, HostCopy
from baton.engine.kv.kv_memory import CudaKvMemory
from baton.engine.local import LocalEngine

from .floors.figures import Figure, command_line, commit, machine, table
from .floors.gpu_shapes import SHAPES

_BYTES_PER_S = 55e9  # the rate of a plain copy of pinned memory on an H200
_TARGET_MS, _TARGET_TOKENS = 26.0, 8192
_MOST_SLOWER = 1.05  # TBT p99 with copies over TBT p99 without
_NUM_TOKENS = (1024, 8192, 32_768)
_REPEATS = 15
_NUM_DECODES, _CONTEXT, _NUM_STEPS, _NUM_ROUNDS = 64, 2048, 400, 3
_LOOK_S = 0.00005  # the poll interval of the engine's loop
_SHAPE = "llama-3.1-8b"


class Bench:
    """One engine, and copies of its blocks."""

    def __init__(self, local: LocalEngine, copier: HostCopier) -> None:
        self._local, self._copier = local, copier
        self._engine = local.engine
        self._size = self._engine.limits.block_size
        self._rng = random.Random(0)
        self._num_requests = 0

    # -- copies ----------------------------------------------------------------------------------

    def copies(self, num_tokens: int) -> Iterator[Figure]:
        """Copies in, out and both at once, of as many blocks as hold `num_tokens`; none if they do
        not fit."""
        n = num_tokens // self._size
        if n > self._copier.num_blocks or (ids := self._engine.pool.allocate(n)) is None:
            return
        bound_ms = n * self._copier.block_bytes / _BYTES_PER_S * 1e3
        for is_scattered in (False, True):
            blocks, hosts = sorted(ids), list(range(n))
            if is_scattered:
                self._rng.shuffle(blocks)
                hosts = self._rng.sample(range(self._copier.num_blocks), n)
            how = "scattered" if is_scattered else "side by side"
            for directions in ([Direction.IN], [Direction.OUT], [*Direction]):
                ways = " and ".join(each.name.lower() for each in directions)
                name = f"{num_tokens} tokens {ways}, {how}"

                def start(
                    directions: Sequence[Direction] = directions,
                    blocks: Sequence[int] = blocks,
                    hosts: Sequence[int] = hosts,
                ) -> list[HostCopy]:
                    return [self._copier.start(each, blocks, hosts) for each in directions]

                is_target = num_tokens == _TARGET_TOKENS and directions == [Direction.IN]
                yield from self._timed(name, start, bound_ms, _TARGET_MS if is_target else None)
            yield from self._by_kernel(f"{num_tokens} tokens in, {how}", blocks, hosts, bound_ms)
        self._engine.pool.release(ids)

    def _timed(
        self, name: str, start: Callable[[], list[HostCopy]], bound_ms: float, target: float | None
    ) -> Iterator[Figure]:
        whole_ms, call_ms = [], []
        for _ in range(_REPEATS + 1):
            began_s = time.perf_counter()
            copies = start()
            call_ms.append((time.perf_counter() - began_s) * 1e3)
            while any(copy.seconds() is None for copy in copies):
                pass
            whole_ms.append((time.perf_counter() - began_s) * 1e3)
        samples = tuple(whole_ms[1:])
        if isinstance(self._copier, CudaCopier):
            yield Figure(name, "ms", samples, bound_ms, "bytes / 55 GB/s", target)
        else:
            yield Figure(name, "ms", samples)
        yield Figure(f"{name}: the call", "ms", tuple(call_ms[1:]))

    def _by_kernel(
        self, name: str, blocks: Sequence[int], hosts: Sequence[int], bound_ms: float
    ) -> Iterator[Figure]:
        """The alternative for copies in: one kernel."""
        kv = self._local.runner.kv
        if not isinstance(self._copier, CudaCopier) or not isinstance(kv, CudaKvMemory):
            return
        from baton.kernels.kv.kv_blocks_triton import pull_blocks

        here, there = (torch.tensor(ids, device=kv.tensor.device) for ids in (blocks, hosts))
        samples = []
        for _ in range(_REPEATS + 2):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            pull_blocks(self._copier._memory.address, kv.tensor, there, here)
            torch.cuda.synchronize()
            samples.append((time.perf_counter() - began_s) * 1e3)
        yield Figure(f"{name}, by a kernel", "ms", tuple(samples[2:]), bound_ms, "bytes / 55 GB/s")

    # -- decodes at the same time ----------------------------------------------------------------

    def beside_decodes(self) -> Iterator[Figure]:
        """Decode steps, median and 99th percentile per round, and the rate of copies."""
        context = min(_CONTEXT, self._engine.limits.max_model_len // 2)
        num_decodes = min(_NUM_DECODES, self._engine.limits.max_num_seqs)
        ways: dict[str, Sequence[Direction]] = {
            "": (),
            ", in": (Direction.IN,),
            ", out": (Direction.OUT,),
            ", in and out": (*Direction,),
        }
        p50_ms, p99_ms, gb_per_s = ({name: list[float]() for name in ways} for _ in range(3))
        for _ in range(_NUM_ROUNDS):
            for name, directions in ways.items():
                with self._decoding(num_decodes, context):
                    steps_ms, rate = self._steps_beside(directions)
                p50_ms[name].append(statistics.median(steps_ms))
                p99_ms[name].append(statistics.quantiles(steps_ms, n=100)[-1])
                gb_per_s[name].append(rate)
        alone_ms = statistics.median(p99_ms[""])
        for name, directions in ways.items():
            beside = f"{num_decodes} x {context}{name}"
            target = alone_ms * _MOST_SLOWER if directions else None
            yield Figure(f"TBT, {beside}", "ms", tuple(p50_ms[name]))
            yield Figure(f"TBT p99, {beside}", "ms", tuple(p99_ms[name]), target=target)
            if directions:
                yield Figure(f"copied beside {beside}", "GB/s", tuple(gb_per_s[name]))

    def _steps_beside(self, directions: Sequence[Direction]) -> tuple[list[float], float]:
        """Milliseconds of each step while copies of each direction are on the device, and GB/s of
        the copies that ended meanwhile."""
        n = min(_TARGET_TOKENS // self._size, self._copier.num_blocks // 2)
        ids = self._engine.pool.allocate(n)
        assert ids is not None, "the pool is too small for decodes and copies"
        running: dict[Direction, HostCopy] = {}
        num_copies, samples = 0, list[float]()

        def look() -> bool:
            nonlocal num_copies
            for each in directions:
                if each not in running or running[each].seconds() is not None:
                    first = 0 if each is Direction.OUT else n
                    running[each] = self._copier.start(each, ids, range(first, first + n))
                    num_copies += 1
            time.sleep(_LOOK_S)
            return False

        is_on_gpu = isinstance(self._copier, CudaCopier)
        for _ in range(_NUM_STEPS if is_on_gpu else 40):
            began_s = time.perf_counter()
            look()
            self._engine.step(look)
            samples.append((time.perf_counter() - began_s) * 1e3)
        num_ended = num_copies - len(running)
        while any(copy.seconds() is None for copy in running.values()):
            pass
        self._engine.pool.release(ids)
        rate = num_ended * n * self._copier.block_bytes / sum(samples) / 1e6
        return samples[10:], rate

    @contextmanager
    def _decoding(self, num_decodes: int, context: int) -> Iterator[None]:
        requests = [self._request(context, _NUM_STEPS + 100) for _ in range(num_decodes)]
        for request in requests:
            self._engine.reserve(request)
            reservation = self._engine.next_reservation()
            assert reservation is not None, "the pool is too small for the decodes"
            self._engine.start(reservation, token_id=self._rng.randrange(3, 500))
        yield
        for request in requests:
            self._engine.abort(request.key)
        self._run()

    # -- a prompt --------------------------------------------------------------------------------

    def first_token(self, num_tokens: int) -> Iterator[Figure]:
        """TTFT of a prompt that is computed, and of one with all but its end from host memory."""
        engine, pool = self._engine, self._engine.pool
        num_tokens = min(num_tokens, engine.limits.max_model_len - 40)
        cold_ms, warm_ms = [], []
        for _ in range(6):
            prompt = self._prompt(num_tokens)
            cold_ms.append(self._serve(prompt))
            deadline_s = time.monotonic() + 5
            while engine.stats.totals().host.num_blocks == 0 or engine.has_work:
                engine.step()
                assert time.monotonic() < deadline_s, "nothing went to host memory"
            time.sleep(0.2)
            engine.step()
            evicted = pool.allocate(pool.num_available)
            assert evicted is not None
            pool.release(evicted)
            hits = engine.stats.totals().host_hit_tokens
            warm_ms.append(self._serve((*prompt, *self._prompt(20))))
            assert engine.stats.totals().host_hit_tokens > hits, "it was computed anew"
        yield Figure(f"first token of {num_tokens}, computed", "ms", tuple(cold_ms[1:]))
        yield Figure(f"first token of {num_tokens}, from host memory", "ms", tuple(warm_ms[1:]))

    def _serve(self, prompt: Sequence[int]) -> float:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self._num_requests += 1
        request = Request(f"{self._num_requests:032x}", 0, tuple(prompt), sampling)
        began_s = time.perf_counter()
        self._engine.add(request)
        self._run()
        return (time.perf_counter() - began_s) * 1e3

    def _run(self) -> None:
        while self._engine.has_work:
            self._engine.step()

    def _prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(3, 4096) for _ in range(num_tokens))

    def _request(self, num_tokens: int, max_tokens: int) -> Request:
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Request(f"{self._num_requests:032x}", 0, self._prompt(num_tokens), sampling)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m baton.bench.host_tier")
    parser.add_argument("--model", help=f"default: {_SHAPE} on a GPU, the demo model on a CPU")
    parser.add_argument("--swap-space", type=float, help="GiB; default: 8 on a GPU, 0.2 on a CPU")
    parser.add_argument("--only-decodes", action="store_true", help="not the copies alone")
    parser.add_argument("--commit", help="what is measured, where git does not know")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    has_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or "demo"
        if has_gpu and arguments.model is None:
            folder = str(SHAPES[_SHAPE].write_config(Path(scratch)))
        local = LocalEngine.load(
            EngineConfig(
                model=folder,
                device="cuda" if has_gpu else "cpu",
                load_format="dummy" if has_gpu else "auto",
                swap_space=arguments.swap_space or (8 if has_gpu else 0.2),
                max_num_batched_tokens=8192,
                max_num_seqs=_NUM_DECODES,
                num_kv_blocks=None if has_gpu else 12_000,
            ),
            print,
        )
        copier = local.runner.host_copier
        assert copier is not None
        began_s = time.perf_counter()
        while copier.num_blocks < copier.most_blocks and time.perf_counter() - began_s < 120:
            time.sleep(0.01)
        print(
            f"{copier.num_blocks} host blocks, the last of them "
            f"{time.perf_counter() - began_s:.1f} s behind the engine"
        )
        bench = Bench(local, copier)
        gc.collect()
        gc.freeze()  # as in an engine's process: loaded objects are excluded from collections
        figures = list[Figure]()
        if not arguments.only_decodes:
            figures += [figure for n in _NUM_TOKENS for figure in bench.copies(n)]
            figures += bench.first_token(_TARGET_TOKENS)
        figures += bench.beside_decodes()
        local.close()
    print(table(figures))
    if arguments.out is not None:
        result = {
            "gpu": torch.cuda.get_device_name() if has_gpu else None,
            "torch": torch.__version__,
            "commit": arguments.commit or commit(),
            "command": command_line("host_tier", argv),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": machine(),
            "figures": [figure.as_dict() for figure in figures],
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
