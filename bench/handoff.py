"""The hand-off's copy between two GPUs, alone: from one block to 32k tokens, by both methods.

python -m baton.bench.handoff [--commit NAME] [--out FILE]

A second process owns the source's pool, on the first GPU; the last GPU pulls. Timed by the wall
from `start_pull` to `on_done`: generations judged, copy launched, completed and judged again.
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
from collections.abc import Iterator
from pathlib import Path

import torch

from baton.engine.block_pool import CANARY_BLOCK, NUM_RESERVED_BLOCKS, BlockRef
from baton.engine.canary import canary_bytes
from baton.engine.cuda_kv_memory import CudaKvMemory
from baton.engine.generations import SharedGenerations
from baton.engine.kv_memory import KvLayout
from baton.kv_transfer.cuda_ipc import CudaIpcTransport, CudaIpcWindow
from baton.kv_transfer.cuda_ipc_copy import EngineCopy, KernelCopy
from baton.kv_transfer.cuda_ipc_memory import export_cuda_pool
from baton.kv_transfer.transport import BlockPair, PullOutcome

from .figures import ROOT, Figure, commit, machine, repeat_s, table

LINK_BYTES_PER_S = 391e9  # what a plain copy of 1 GiB reaches over 18 NVLinks of an H200
_TOKENS_PER_BLOCK = 16
_REPEATS = 15
# Blocks of 16 tokens: Llama-3.1-8B's, and what a sixteenth of its layers or heads would leave.
_LAYERS = {"2 MiB": 32, "128 KiB": 2}
_NUM_BLOCKS = {"2 MiB": (1, 4, 16, 64, 128, 512, 2048), "128 KiB": (512,)}
_METHODS = (KernelCopy.name, EngineCopy.name)


def _layout(name: str) -> KvLayout:
    return KvLayout(_LAYERS[name], 8, _TOKENS_PER_BLOCK, 128, torch.bfloat16)


def _serve(name: str, incarnation: str) -> None:
    """The source's process: export until it is killed."""
    num_blocks = max(_NUM_BLOCKS[name]) + NUM_RESERVED_BLOCKS
    kv = CudaKvMemory(_layout(name), num_blocks, torch.device("cuda:0"))
    kv.tensor.normal_()
    canary = bytearray(canary_bytes(incarnation, kv.block_bytes))
    block = kv.tensor[CANARY_BLOCK].view(torch.uint8)
    block.copy_(torch.frombuffer(canary, dtype=torch.uint8).view(block.shape))
    generations = SharedGenerations(num_blocks, incarnation)
    export_cuda_pool(incarnation, kv, generations.fd)
    print("ready", flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def _source(name: str) -> Iterator[str]:
    """The incarnation of a source in a process of its own."""
    incarnation = secrets.token_hex(16)
    command = [sys.executable, "-m", "baton.bench.handoff", "--source", name, incarnation]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield incarnation
        process.kill()


def _pairs(num_blocks: int, *, is_scattered: bool) -> list[BlockPair]:
    ids = range(NUM_RESERVED_BLOCKS, NUM_RESERVED_BLOCKS + num_blocks)
    rng = random.Random(0)
    sources, targets = (
        rng.sample(ids, num_blocks) if is_scattered else list(ids) for _ in range(2)
    )
    return [
        BlockPair(BlockRef(0, source, 0, None), target)
        for source, target in zip(sources, targets, strict=True)
    ]


def _pull(window: CudaIpcWindow, pairs: list[BlockPair]) -> None:
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    window.start_pull(pairs, done.put)
    assert done.get(timeout=60) is PullOutcome.OK


def _measure(name: str, method: str, kv: CudaKvMemory, incarnation: str) -> Iterator[Figure]:
    window = CudaIpcTransport(kv, method).connect(incarnation)
    for num_blocks in _NUM_BLOCKS[name]:
        for is_scattered in (True, False):
            pairs = _pairs(num_blocks, is_scattered=is_scattered)
            samples = repeat_s(lambda pairs=pairs: _pull(window, pairs), _REPEATS, warmups=3)
            floor_s = num_blocks * kv.block_bytes / LINK_BYTES_PER_S
            where = "scattered" if is_scattered else "in one piece"
            yield Figure(
                f"{num_blocks * _TOKENS_PER_BLOCK} tokens, {name} blocks, {where}, {method}",
                "ms",
                tuple(seconds * 1e3 for seconds in samples),
                floor_s * 1e3,
                "the link's bandwidth",
            )
    window.close()
    window.join()


def main(argv: list[str]) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--commit", default=None, help="what is measured, where git does not know")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "handoff.json")
    arguments = parser.parse_args(argv)
    if arguments.source:
        _serve(*arguments.source)
        return 0
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    figures: list[Figure] = []
    for name, numbers in _NUM_BLOCKS.items():
        kv = CudaKvMemory(_layout(name), max(numbers) + NUM_RESERVED_BLOCKS, device)
        with _source(name) as incarnation:
            for method in _METHODS:
                figures += _measure(name, method, kv, incarnation)
        kv.close()
    print(table(figures))
    result = {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "commit": arguments.commit or commit(),
        "command": f"python -m baton.bench.handoff {' '.join(argv)}".strip(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "floors_from": {"link_bytes_per_s": LINK_BYTES_PER_S},
        "figures": [figure.as_dict() for figure in figures],
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
