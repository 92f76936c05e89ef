"""A pool on a GPU in a process of its own, from which tests of transports between GPUs pull.

On a host with one GPU the source and the test share it: everything but the link is the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import queue
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from fakes.handoff import block_pairs
from fakes.handoff.block_pairs import BlockPair, BlockRef

from baton.engine.kv.kv_memory import CudaKvMemory
from baton.kv_transfer.window.transport import PoolWindow, PullOutcome

SOURCE_GPU, PULLER_GPU = "cuda:0", f"cuda:{max(0, torch.cuda.device_count() - 1)}"
FOLDER = Path(__file__).parent / "gpu"


def _load_peer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_ipc_peer", FOLDER / "cuda_ipc_peer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peer = _load_peer()
NUM_BLOCKS, LAYOUT = peer.NUM_BLOCKS, peer.LAYOUT


@dataclass
class Source:
    """The process that owns the pool. `printed`: its line when it was ready."""

    incarnation: str
    process: subprocess.Popen[str]
    published: np.ndarray
    printed: str = ""

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def receive(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def pair(self, block_id: int, destination: int) -> BlockPair:
        generation = int(self.published[block_id])
        return BlockPair(BlockRef(block_id, generation), destination)


@contextlib.contextmanager
def source_process(script: str, *arguments: str) -> Iterator[Source]:
    """Run tests/gpu/`script` until the block ends."""
    incarnation = secrets.token_hex(16)
    fd = os.memfd_create("published")
    os.ftruncate(fd, 8 * NUM_BLOCKS)
    published = np.frombuffer(mmap.mmap(fd, 8 * NUM_BLOCKS), dtype=np.uint64)
    path = str(FOLDER / script)
    command = [sys.executable, path, incarnation, SOURCE_GPU, str(fd), *arguments]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, pass_fds=(fd,), **pipes) as process:
        os.close(fd)
        source = Source(incarnation, process, published)
        try:
            ready, _, source.printed = source.receive().partition(" ")
            assert ready == "ready"
            yield source
        finally:
            process.kill()


def pull(window: PoolWindow, *pairs: BlockPair) -> PullOutcome:
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    window.start_pull(block_pairs.join(*pairs), done.put)
    return done.get(timeout=30)


def holds(kv: CudaKvMemory, pair: BlockPair) -> bool:
    """Whether the whole destination block has the content that the source announced."""
    expected = peer.content(pair.source.block_id, pair.source.generation)
    return bool((kv.tensor[pair.destination].view(torch.int64) == expected).all())
