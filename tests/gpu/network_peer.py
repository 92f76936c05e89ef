"""The other process of test_nccl_transport.py: cuda_ipc_peer.py's source, served over the loopback.

INCARNATION DEVICE FD KEY     prints `ready PORT`, then reads the same lines
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

from baton.engine.kv.generations import GenerationsReader
from baton.kv_transfer.device_transports import outlets
from baton.kv_transfer.export.pool_address import PoolDescription
from baton.kv_transfer.network.data_server import DataServer, ServedPool

spec = importlib.util.spec_from_file_location("peer", Path(__file__).parent / "cuda_ipc_peer.py")
assert spec is not None and spec.loader is not None
peer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peer)


def main() -> None:
    incarnation, device, fd, key = sys.argv[1:]
    source = peer.Source(incarnation, torch.device(device), int(fd), peer.NUM_BLOCKS)
    server = DataServer("127.0.0.1", ["127.0.0.1"], outlets(source.kv))
    description = PoolDescription(incarnation, source.kv.block_bytes, peer.NUM_BLOCKS)
    reader = GenerationsReader(source.generations.fd, peer.NUM_BLOCKS, incarnation)
    server.start(ServedPool(description, reader, bytes.fromhex(key)))
    print("ready", server.port, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["rewrite", block_id]:
                source.rewrite(int(block_id))
                print("rewritten", flush=True)
            case _:
                source.churn()


if __name__ == "__main__":
    main()
