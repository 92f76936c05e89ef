"""All-reduce over the GPUs of one engine: NCCL beside kernels over peer memory, in a CUDA graph.

python -m baton.bench.allreduce [--ranks N] [--check] [--out FILE]

One process per GPU, as in an engine. The floor is the bytes that one GPU must receive over its
links. `--check` compares with a sum in float64 and times nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.core.engine_config import EngineConfig
from baton.engine.parallel.loopback import connect_store, make_store
from baton.engine.parallel.peer_reduce import PeerReduce
from baton.engine.parallel.torch_communicator import NcclCommunicator, make_communicator
from baton.kernels.layers.ops_triton import TritonOps, send_product
from baton.kernels.peer_reduce_triton import MAX_BYTES, peer_add_rms_norm
from baton.kernels.products.weights import Sent
from baton.kernels.row_room import empty_rows

from .floors.figures import ROOT, Figure, command_line, commit, machine, table
from .floors.gpu_shapes import BYTES_PER_S

_LINK_BYTES_PER_S = 390e9  # into one GPU, measured with large copies
_SIZES = [4 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20, 2 << 20, 8 << 20]
_ROWS = [(1, 4096), (64, 4096), (64, 8192)]
_PRODUCTS = [(64, 4096, 2048), (64, 4096, 7168), (64, 8192, 2048), (64, 8192, 7168)]
_WEIGHT_BYTES = 400 << 20  # all weights of a graph together: more than the L2 cache holds
_SUMS, _REPEATS = 40, 9  # all-reduces in a graph, and replays of the graph
_TARGETS_US = {32 << 10: 9.0, 512 << 10: 16.0}

Sum = Callable[[Tensor], Tensor]


class Rank:
    """The process of one GPU."""

    def __init__(self, rank: int, size: int, port: int | None) -> None:
        self.store = make_store() if port is None else connect_store(port)
        self.rank, self.size = rank, size
        self._num_barriers = 0

    def connect(self) -> None:
        config = EngineConfig(device=f"cuda:{self.rank}", tensor_parallel_size=self.size)
        communicator = make_communicator(config, self.rank, self.store, self.meet)
        communicator.connect()
        assert isinstance(communicator, NcclCommunicator)
        self._communicator = communicator

    def meet(self, word: bytes = b"") -> list[bytes]:
        """A host-side barrier of all ranks; returns the word of each rank."""
        self._num_barriers += 1
        names = [f"bench/{self._num_barriers}/{rank}" for rank in range(self.size)]
        self.store.set(names[self.rank], word.hex())
        self.store.wait(names, timedelta(seconds=120))
        return [bytes.fromhex(self.store.get(name).decode()) for name in names]

    def sums(self, num_bytes: int) -> dict[str, Sum]:
        """The available all-reduce methods for a message of `num_bytes`."""
        nccl, peers = self._communicator, self._communicator.peers
        ways: dict[str, Sum] = {"NCCL": nccl.sum_by_nccl}
        if peers is not None and num_bytes <= MAX_BYTES:
            for name, in_parts in (("at once", False), ("in parts", True)):
                ways[name] = partial(peers.sum, in_parts=in_parts)
        return ways

    def check(self) -> None:
        """Check every method over ragged shapes, dtypes and many rounds: all ranks get the same
        bits."""
        for round_number in range(60):
            generator = torch.Generator().manual_seed(round_number)
            dtype = (torch.bfloat16, torch.float32, torch.float16)[round_number % 3]
            n = int(torch.randint(1, MAX_BYTES // 4, (1,), generator=generator)) >> (
                round_number % 12
            )
            if round_number % 2:  # as in a model: several words are reduced at once
                n = -(-n // 16) * 16 - 1
            parts = [torch.randn(n + 1, generator=generator).to(dtype) for _ in range(self.size)]
            expected = torch.stack(parts).double().sum(0)
            mine = parts[self.rank].cuda()
            for name, add_up in self.sums(mine.nbytes).items():
                found = add_up(mine.clone())
                error = float((found.double().cpu() - expected).norm() / expected.norm())
                assert error < {torch.float32: 1e-6}.get(dtype, 6e-3), (name, n, dtype, error)
                if name != "NCCL":
                    ordered = torch.stack([part.float() for part in parts])
                    total = ordered[0].clone()
                    for part in ordered[1:]:
                        total += part
                    assert torch.equal(found.cpu(), total.to(dtype)), (name, n, dtype)
        self._check_norm()
        self._check_sent()
        self._check_graph()
        self._check_mixed()

    def _check_norm(self) -> None:
        """The fused all-reduce, residual and norm kernel gives the same as separate kernels."""
        peers, ops = self._communicator.peers, TritonOps()
        for num_rows, dim in ((1, 4096), (64, 4096), (64, 8192), (128, 5120), (3, 96)):
            generator = torch.Generator("cuda").manual_seed(dim)
            shape = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
            weight, residual = torch.rand(dim, **shape), torch.randn(num_rows, dim, **shape)
            parts = torch.randn(self.size, num_rows, dim, **shape)
            x = parts[self.rank].contiguous()
            if peers is None or not peers.can_reduce_rows(x):
                continue
            expected = residual.clone()
            normed = ops.add_rms_norm(peers.sum(x, in_parts=False), expected, weight, 1e-5)
            found = peers.add_rms_norm(x, residual, weight, 1e-5)
            assert torch.equal(residual, expected), (num_rows, dim)
            difference = (found.float() - normed.float()).norm() / normed.float().norm()
            assert float(difference) < 3e-3

    def _check_sent(self) -> None:
        """GEMMs that send their own output, by either method, give the same bits as a separate
        all-reduce."""
        peers = self._communicator.peers
        if peers is None or torch.cuda.get_device_capability() != (9, 0):
            return
        for num_rows, dim, num_inputs in ((40, 4096, 2048), (64, 8192, 512), (33, 5120, 1024)):
            operands = self._operands(num_rows, dim, num_inputs)
            for in_parts in (False, True, None):
                self._check_sent_so(peers, *operands, in_parts=in_parts)

    def _check_sent_so(
        self,
        peers: PeerReduce,
        x: Tensor,
        product_weight: Tensor,
        weight: Tensor,
        residual: Tensor,
        *,
        in_parts: bool | None,
    ) -> None:
        """Check in a CUDA graph with ranks that are late. `in_parts` None: the method that models
        choose."""
        ops, exchange = self._communicator.rank_ops(TritonOps()), peers.exchange
        bias = weight if self.rank == 0 else None
        found, expected = residual.clone(), residual.clone()

        def add_product() -> Tensor:
            if in_parts is None:
                summand = ops.summand(x, product_weight, bias)
                assert isinstance(summand, Sent)
                return ops.add_rms_norm(summand, found, weight, 1e-5)
            is_sent = send_product(x, product_weight, bias, exchange, in_parts=in_parts)
            assert is_sent
            return peer_add_rms_norm(None, found, weight, 1e-5, exchange, in_parts=in_parts)

        add_product()
        found.copy_(residual)
        other_kind = torch.ones(3000, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            normed = []
            for number in range(6):
                if number % 3 == 1:  # the others follow at once, without a delay
                    torch.cuda._sleep((self.rank * 7 + number * 5) % 11 * 2000)
                if number % 3 == 2:
                    peers.sum(other_kind, in_parts=number > 3)
                normed.append(add_product())
        for _ in range(20):
            x.normal_()
            graph.replay()
            for one in normed:
                product = ops.linear(x, product_weight, bias)
                other = ops.add_rms_norm(product, expected, weight, 1e-5)
                assert torch.equal(one, other), (x.shape, in_parts)
            assert torch.equal(found, expected), (x.shape, in_parts)

    def _operands(self, num_rows: int, dim: int, num_inputs: int) -> tuple[Tensor, ...]:
        """This rank's inputs and weight; the norm's weight and the residual stream, equal on all
        ranks."""
        ours = torch.Generator("cuda").manual_seed(self.rank)
        all_ = torch.Generator("cuda").manual_seed(dim)
        like = {"device": "cuda", "dtype": torch.bfloat16}
        x = empty_rows((num_rows, num_inputs), torch.empty(0, **like)).normal_(generator=ours)
        product_weight = torch.randn(dim, num_inputs, generator=ours, **like) / num_inputs**0.5
        weight = torch.rand(dim, generator=all_, **like)
        return x, product_weight, weight, torch.randn(num_rows, dim, generator=all_, **like)

    def _check_graph(self) -> None:
        """Captured all-reduces read what their input holds at each replay."""
        x = torch.zeros(3000, device="cuda", dtype=torch.bfloat16)
        for name, add_up in self.sums(x.nbytes).items():
            add_up(x.clone())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = [add_up(x.clone()) for _ in range(3)]
            for value in (1.0, 2.0, 3.0):
                x.fill_(value)
                graph.replay()
                assert all(bool((y == value * self.size).all()) for y in out), name

    def _check_mixed(self) -> None:
        """All-reduces of mixed kinds and sizes in sequence, with ranks that are late, give the same
        bits as a sum in rank order."""
        peers = self._communicator.peers
        if peers is None:
            return
        dtypes = (torch.bfloat16, torch.float32, torch.float16)
        sizes = (16, 1000, 4096, 65_536, 262_144, 33_000)
        inputs = [
            torch.zeros(sizes[i % 6], device="cuda", dtype=dtypes[i // 2 % 3]) for i in range(30)
        ]
        ways = [partial(peers.sum, in_parts=index % 4 < 2) for index in range(30)]
        for x, way in zip(inputs, ways, strict=True):
            way(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = []
            for index, (x, way) in enumerate(zip(inputs, ways, strict=True)):
                torch.cuda._sleep((self.rank * 7 + index * 5) % 11 * 2000)
                found.append(way(x))
        for replay in range(50):
            generator = torch.Generator("cuda").manual_seed(replay)
            expected = []
            for x in inputs:
                parts = torch.randn(self.size, len(x), generator=generator, device="cuda")
                parts = parts.to(x.dtype)
                x.copy_(parts[self.rank])
                total = parts[0].float()
                for part in parts[1:]:
                    total += part.float()
                expected.append(total.to(x.dtype))
            graph.replay()
            for index, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert torch.equal(one, other), (replay, index)

    def measure(self, num_bytes: int) -> dict[str, tuple[float, ...]]:
        """Microseconds of one all-reduce, by method."""
        x = torch.randn(num_bytes // 2, device="cuda", dtype=torch.bfloat16)
        return {name: self._time_us(add_up, x) for name, add_up in self.sums(num_bytes).items()}

    def measure_norm(self, num_rows: int, dim: int) -> dict[str, tuple[float, ...]]:
        """Microseconds of an all-reduce with residual addition and norm, by method."""
        communicator, ops = self._communicator, TritonOps()
        ranked = communicator.rank_ops(ops)
        x = torch.randn(num_rows, dim, device="cuda", dtype=torch.bfloat16)
        residual, weight = torch.randn_like(x), torch.rand_like(x[0])
        ways: dict[str, Sum] = {
            "sum by NCCL, then norm": lambda y: ops.add_rms_norm(
                communicator.sum_by_nccl(y), residual, weight, 1e-5
            ),
            "sum, then norm": lambda y: ops.add_rms_norm(
                communicator.all_reduce(y), residual, weight, 1e-5
            ),
            "sum and norm at once": lambda y: ranked.add_rms_norm(y, residual, weight, 1e-5),
        }
        return {name: self._time_us(way, x) for name, way in ways.items()}

    def measure_product(
        self, num_rows: int, dim: int, num_inputs: int
    ) -> dict[str, tuple[float, ...]]:
        """Microseconds of a GEMM with all-reduce, residual and norm; and of a GEMM that sends its
        output."""
        ops = self._communicator.rank_ops(TritonOps())
        x, *weights, weight, residual = self._operands(num_rows, dim, num_inputs)
        weights += [torch.randn_like(weights[0]) for _ in range(_WEIGHT_BYTES // weights[0].nbytes)]
        turns = itertools.cycle(weights)  # so that no weight is in a cache

        def one_by_one(x: Tensor) -> Tensor:
            product = ops.linear(x, next(turns), None)
            return ops.add_rms_norm(product, residual, weight, 1e-5)

        def sending(x: Tensor) -> Tensor:
            product = ops.summand(x, next(turns), None)
            return ops.add_rms_norm(product, residual, weight, 1e-5)

        ways = {"product, then sum and norm": one_by_one, "product that sends itself": sending}
        return {name: self._time_us(way, x) for name, way in ways.items()}

    def _time_us(self, add_up: Sum, x: Tensor) -> tuple[float, ...]:
        add_up(x.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_SUMS):
                add_up(x)
        samples = []
        for _ in range(_REPEATS + 2):
            x.normal_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            self.meet()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) / _SUMS * 1e3)
        return tuple(samples[2:])


def figures_of(rank: Rank) -> list[Figure]:
    """The figures of all sizes and methods, from rank 0; all ranks measure."""
    figures = []
    for num_bytes in _SIZES:
        floor_us = num_bytes * 2 * (rank.size - 1) / rank.size / _LINK_BYTES_PER_S * 1e6
        for name, samples in rank.measure(num_bytes).items():
            title = f"{num_bytes >> 10} KiB over {rank.size} GPUs, {name}"
            target = None if name == "NCCL" else _TARGETS_US.get(num_bytes)
            figures.append(Figure(title, "us", samples, floor_us, "links", target))
            if rank.rank == 0:
                print(f"{title}: {statistics.median(samples):.1f} us", flush=True)
    for num_rows, dim in _ROWS:
        for name, samples in rank.measure_norm(num_rows, dim).items():
            figures.append(
                Figure(f"{num_rows} x {dim} over {rank.size} GPUs, {name}", "us", samples)
            )
    for num_rows, dim, num_inputs in _PRODUCTS:
        floor_us = dim * num_inputs * 2 / BYTES_PER_S * 1e6
        for name, samples in rank.measure_product(num_rows, dim, num_inputs).items():
            title = f"{num_rows} x {num_inputs} -> {dim} over {rank.size} GPUs, {name}"
            figures.append(Figure(title, "us", samples, floor_us, "reading the weight"))
    return figures


def main(argv: list[str]) -> int:
    """Start the other ranks, check or measure, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--commit", default=None, help="what is measured, where git does not know")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "allreduce.json")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    torch.cuda.set_device(arguments.rank)
    rank = Rank(arguments.rank, arguments.ranks, arguments.port)
    peers = []
    if rank.rank == 0:
        command = [sys.executable, "-m", "baton.bench.allreduce", *argv]
        for other in range(1, rank.size):
            more = ["--rank", str(other), "--port", str(rank.store.port)]
            peers.append(subprocess.Popen([*command, *more]))
    rank.connect()
    if arguments.check:
        rank.check()
    else:
        figures = figures_of(rank)
    rank.meet()
    if rank.rank > 0:
        return 0
    codes = [peer.wait() for peer in peers]
    assert not any(codes), codes
    if arguments.check:
        print(f"sums over {rank.size} GPUs are right")
        return 0
    print(table(figures))
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": arguments.commit or commit(),
        "command": command_line("allreduce", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "figures": [figure.as_dict() for figure in figures],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
