"""The hand-off's copy between two GPUs, alone: from one block to 32k tokens, by every method.

python -m baton.bench.handoff [--blocks KIND...] [--methods NAME...] [--commit NAME] [--out FILE]

A second process owns the source's pool, on the first GPU; the last GPU pulls. Wall time from
`start_pull` to `on_done`: check generations, launch the copy, wait for it, check again. The same
for a pull that was prepared in advance, as it is while the source computes the blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import random
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace

from baton.core.config import NodeConfig
from baton.core.process.children import end_waits_on_time
from baton.engine.kv.block_pool import CANARY_BLOCK, NUM_RESERVED_BLOCKS, BlockRefs
from baton.engine.kv.generations import GenerationsReader, SharedGenerations
from baton.engine.kv.kv_memory import CudaKvMemory, KvLayout, canary_bytes
from baton.kv_transfer.cuda_ipc.cuda_ipc import CudaIpcTransport, CudaStagedTransport
from baton.kv_transfer.cuda_ipc.cuda_ipc_copy import DmaCopy, KernelCopy, StagedCopy
from baton.kv_transfer.cuda_ipc.cuda_ipc_memory import memory_of
from baton.kv_transfer.cuda_ipc.cuda_window import CudaWindow
from baton.kv_transfer.device_transports import outlets, transports
from baton.kv_transfer.export.pool_address import PoolDescription, PoolExporter
from baton.kv_transfer.nccl.nccl import NcclTransport
from baton.kv_transfer.network.data_server import DataServer, ServedPool
from baton.kv_transfer.network.remote_window import RemoteWindow
from baton.kv_transfer.network.tcp import TcpTransport
from baton.kv_transfer.window.block_pairs import BlockPairs
from baton.kv_transfer.window.block_pieces import BlockPiece, Span
from baton.kv_transfer.window.network_address import KEY_BYTES, RemotePool, pair_key
from baton.kv_transfer.window.transport import PullOutcome

from .floors.figures import ROOT, Figure, command_line, commit, machine, repeat_s, table, time_s

LINK_BYTES_PER_S = 391e9  # the rate of a plain 1 GiB copy over the 18 NVLinks of an H200
_TOKENS_PER_BLOCK = 16
_REPEATS = 15
# For 1 GiB, and for as many tokens in 8 bits; with staging, 3.0 is one buffer of 256 MiB at
# 360 GB/s.
_TARGETS_MS = {"8192 tokens, 2 MiB": 3.1, "8192 tokens, 8-bit": 1.8}
_NCCL_TARGETS_MS = {"8192 tokens, 2 MiB": 3.6}
# Blocks of 16 tokens: of Llama-3.1-8B, of a sixteenth of its layers or heads, and of the full model
# with 8-bit values.
_LAYOUTS = {
    "2 MiB": KvLayout(32, 8, _TOKENS_PER_BLOCK, 128, torch.bfloat16),
    "128 KiB": KvLayout(2, 8, _TOKENS_PER_BLOCK, 128, torch.bfloat16),
    "8-bit": KvLayout(32, 8, _TOKENS_PER_BLOCK, 128, torch.float8_e4m3fn),
}
_NUM_BLOCKS = {"2 MiB": (1, 4, 16, 64, 128, 512, 2048), "128 KiB": (512,), "8-bit": (512,)}
_SLOW_METHODS = (StagedCopy.name, TcpTransport.name)
_METHODS = (KernelCopy.name, DmaCopy.name, NcclTransport.name, *_SLOW_METHODS)
_STAGED_BLOCKS = (64, 512)  # a fallback path: two sizes are enough


def _serve(name: str, incarnation: str) -> None:
    """The source's process: export the pool until killed."""
    num_blocks = max(_NUM_BLOCKS[name]) + NUM_RESERVED_BLOCKS
    kv = CudaKvMemory(_LAYOUTS[name], num_blocks, torch.device("cuda:0"))
    kv.tensor.view(torch.uint8).random_()
    canary = bytearray(canary_bytes(incarnation, kv.block_bytes))
    block = kv.tensor[CANARY_BLOCK].view(torch.uint8)
    block.copy_(torch.frombuffer(canary, dtype=torch.uint8).view(block.shape))
    generations = SharedGenerations(num_blocks, incarnation)
    key = secrets.token_bytes(KEY_BYTES)
    description = PoolDescription(incarnation, kv.block_bytes, num_blocks)
    PoolExporter(replace(description, cuda=memory_of(kv)), [generations.fd], key)
    server = DataServer("127.0.0.1", ["127.0.0.1"], outlets(kv))
    reader = GenerationsReader(generations.fd, num_blocks, incarnation)
    server.start(ServedPool(description, reader, key))
    print("ready", server.port, key.hex(), flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def _source(name: str) -> Iterator[RemotePool]:
    """Start a source in a process of its own."""
    incarnation = secrets.token_hex(16)
    command = [sys.executable, "-m", "baton.bench.handoff", "--source", name, incarnation]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ready, port, key = process.stdout.readline().split()
        assert ready == b"ready"
        puller = secrets.token_hex(16)
        ours = pair_key(bytes.fromhex(key.decode()), puller)
        yield RemotePool(incarnation, "127.0.0.1", int(port), ours, False, puller)
        process.kill()


def _pairs(num_blocks: int, *, is_scattered: bool) -> BlockPairs:
    ids = range(NUM_RESERVED_BLOCKS, NUM_RESERVED_BLOCKS + num_blocks)
    rng = random.Random(0)
    sources, targets = (
        rng.sample(ids, num_blocks) if is_scattered else list(ids) for _ in range(2)
    )
    return BlockPairs.join(BlockRefs.pack(sources, [0] * num_blocks), targets)


def _pull(window: CudaWindow | RemoteWindow, pairs: BlockPairs) -> float:
    """Pull; returns the seconds that `start_pull` blocked its caller."""
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    took_s = time_s(lambda: window.start_pull(pairs, done.put))
    assert done.get(timeout=60) is PullOutcome.OK
    return took_s


def _prepared_s(window: CudaWindow, pairs: BlockPairs) -> float:
    """The time of a prepared pull from the moment its blocks are computed."""
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    start = window.prepare(pairs)
    begin_s = time.perf_counter()
    start(done.put)
    assert done.get(timeout=60) is PullOutcome.OK
    return time.perf_counter() - begin_s


def _connect(method: str, kv: CudaKvMemory, source: RemotePool) -> CudaWindow | RemoteWindow:
    if method == StagedCopy.name:
        return CudaStagedTransport(kv).connect(source)
    if method in (NcclTransport.name, TcpTransport.name):
        config = NodeConfig(kv_transport=method)
        (transport,) = transports(kv, config, None)
        window = transport.connect(source)
        assert isinstance(window, RemoteWindow)
        return window
    return CudaIpcTransport(kv, method).connect(source)


def _measure(name: str, method: str, kv: CudaKvMemory, source: RemotePool) -> Iterator[Figure]:
    window = _connect(method, kv, source)
    few = [n for n in _STAGED_BLOCKS if n in _NUM_BLOCKS[name]]
    for num_blocks in few if method in _SLOW_METHODS else _NUM_BLOCKS[name]:
        for is_scattered in (True, False):
            where = "scattered" if is_scattered else "in one piece"
            what = f"{num_blocks * _TOKENS_PER_BLOCK} tokens, {name} blocks, {where}, {method}"
            pairs = _pairs(num_blocks, is_scattered=is_scattered)
            samples = repeat_s(partial(_pull, window, pairs), _REPEATS, warmups=3)
            floor_ms = num_blocks * kv.block_bytes / LINK_BYTES_PER_S * 1e3
            targets_ms = _NCCL_TARGETS_MS if method == NcclTransport.name else _TARGETS_MS
            size = f"{num_blocks * _TOKENS_PER_BLOCK} tokens, {name}"
            target_ms = None if method in _SLOW_METHODS else targets_ms.get(size)
            yield _figure(what, samples, floor_ms, "the link's bandwidth", target_ms)
            if isinstance(window, CudaWindow):
                samples = [_prepared_s(window, pairs) for _ in range(3 + _REPEATS)][3:]
                yield _figure(
                    f"{what}, prepared", samples, floor_ms, "the link's bandwidth", target_ms
                )
            starts = tuple(_pull(window, pairs) for _ in range(_REPEATS))
            yield _figure(f"  of which start_pull keeps its caller: {what}", starts)
    window.close()
    window.join()


def _measure_half(name: str, kv: CudaKvMemory, source: RemotePool) -> Iterator[Figure]:
    """Half of the heads: what each of two ranks pulls from a source with one rank."""
    num_layers = kv.layout.num_layers
    layers = Span(0, 0, num_layers, num_layers, num_layers)
    piece = BlockPiece(0, Span(4, 0, 4, 8, 8), layers)
    window = CudaIpcTransport(kv).connect(source, piece)
    num_blocks = 512
    pairs = _pairs(num_blocks, is_scattered=True)

    samples = repeat_s(partial(_pull, window, pairs), _REPEATS, warmups=3)
    floor_ms = num_blocks * kv.block_bytes / 2 / LINK_BYTES_PER_S * 1e3
    what = f"{num_blocks * _TOKENS_PER_BLOCK} tokens, {name} blocks, 4 of 8 heads, {window.method}"
    yield _figure(what, samples, floor_ms, "the link's bandwidth")
    window.close()
    window.join()


def _figure(
    name: str,
    seconds: Sequence[float],
    floor_ms: float | None = None,
    bound_is: str = "",
    target_ms: float | None = None,
) -> Figure:
    return Figure(name, "ms", tuple(s * 1e3 for s in seconds), floor_ms, bound_is, target_ms)


def main(argv: list[str]) -> int:
    """Measure, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--blocks", nargs="*", choices=_LAYOUTS, default=list(_LAYOUTS))
    parser.add_argument("--methods", nargs="*", choices=_METHODS, help="default: all")
    parser.add_argument("--commit", default=None, help="what is measured, where git does not know")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "handoff.json")
    arguments = parser.parse_args(argv)
    end_waits_on_time()
    if arguments.source:
        _serve(*arguments.source)
        return 0
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    figures: list[Figure] = []
    for name in arguments.blocks:
        num_blocks = max(_NUM_BLOCKS[name]) + NUM_RESERVED_BLOCKS
        kv = CudaKvMemory(_LAYOUTS[name], num_blocks, device)
        with _source(name) as source:
            for method in arguments.methods or _METHODS:
                figures += _measure(name, method, kv, source)
            figures += _measure_half(name, kv, source)
        kv.close()
    print(table(figures))
    result = {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "commit": arguments.commit or commit(),
        "command": command_line("handoff", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "floors_from": {"link_bytes_per_s": LINK_BYTES_PER_S},
        "figures": [figure.as_dict() for figure in figures],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
