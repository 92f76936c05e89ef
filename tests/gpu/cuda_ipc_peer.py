"""The other process of test_cuda_ipc.py: exports a pool on a GPU and rewrites blocks on demand.

INCARNATION DEVICE FD [ALLOCATED]     FD maps, for each block, the generation whose content is
complete; with ALLOCATED, only that many blocks exist, but NUM_BLOCKS are announced

Then it reads lines: `rewrite BLOCK`, acknowledged by a line; `churn`, which runs until killed.
"""

from __future__ import annotations

import itertools
import mmap
import sys
import time

import numpy as np
import torch

from baton.engine.kv.block_pool import CANARY_BLOCK, NUM_RESERVED_BLOCKS
from baton.engine.kv.generations import SharedGenerations
from baton.engine.kv.kv_memory import CudaKvMemory, KvLayout, canary_bytes
from baton.kv_transfer.cuda_ipc.cuda_ipc_memory import memory_of
from baton.kv_transfer.export.pool_address import PoolDescription, PoolExporter

NUM_BLOCKS = 130
ENGINE_KEY = bytes(range(32))  # fakes/access.py
LAYOUT = KvLayout(
    num_layers=32, num_kv_heads=8, block_size=16, head_dim=128, dtype=torch.bfloat16
)  # 2 MiB, as of Llama-3.1-8B


def content(block_id: int, generation: int) -> int:
    """The 64-bit word that fills a block of this generation."""
    word = (generation & ~0xFFFF) | block_id
    return word - (word >> 63 << 64)  # signed, as torch stores it


class Source:
    """A pool that is rewritten like an engine's: the generation moves first."""

    def __init__(self, incarnation: str, device: torch.device, fd: int, num_allocated: int) -> None:
        self.kv = CudaKvMemory(LAYOUT, num_allocated, device)
        self.generations = SharedGenerations(NUM_BLOCKS, incarnation)
        self.published = np.frombuffer(mmap.mmap(fd, 8 * NUM_BLOCKS), dtype=np.uint64)
        canary = bytearray(canary_bytes(incarnation, self.kv.block_bytes))
        block = self.kv.tensor[CANARY_BLOCK].view(torch.uint8)
        block.copy_(torch.frombuffer(canary, dtype=torch.uint8).view(block.shape))
        for block_id in range(NUM_RESERVED_BLOCKS, num_allocated):
            self.rewrite(block_id)
        self.kv.num_blocks = NUM_BLOCKS  # the announced number
        memory = memory_of(self.kv)
        description = PoolDescription(incarnation, self.kv.block_bytes, NUM_BLOCKS, memory)
        self.exporter = PoolExporter(description, [self.generations.fd], ENGINE_KEY)

    def rewrite(self, block_id: int) -> None:
        self.generations.bump([block_id])
        generation = self.generations.read(block_id)
        self.kv.tensor[block_id].view(torch.int64).fill_(content(block_id, generation))
        torch.cuda.synchronize(self.kv.tensor.device)
        self.published[block_id] = generation

    def churn(self) -> None:
        for block_id in itertools.cycle(range(NUM_RESERVED_BLOCKS, NUM_BLOCKS)):
            self.rewrite(block_id)
            time.sleep(0.0005)


def main() -> None:
    incarnation, device, fd, *allocated = sys.argv[1:]
    num_allocated = int(allocated[0]) if allocated else NUM_BLOCKS
    source = Source(incarnation, torch.device(device), int(fd), num_allocated)
    print("ready", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["rewrite", block_id]:
                source.rewrite(int(block_id))
                print("rewritten", flush=True)
            case _:
                source.churn()


if __name__ == "__main__":
    main()
