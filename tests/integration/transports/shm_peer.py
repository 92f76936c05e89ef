"""The other process of test_shm_transport.py: exports a pool, or pulls from one.

export INCARNATION                    prints "ready", then sleeps until it is killed
pull INCARNATION SECONDS FD           pulls random blocks; FD maps their published generations
squat UID INCARNATION                 as user 65534: takes the name of UID's exporter
intrude UID INCARNATION               as user 65534: requests the memory of UID's exporter
"""

from __future__ import annotations

import collections
import json
import mmap
import os
import queue
import random
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from fakes.access import access
from fakes.handoff import block_pairs
from fakes.handoff.block_pairs import BlockPair, BlockRef
from fakes.host_pool import HostPool, export_host_pool

from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS
from baton.kv_transfer.shm.shm import ShmTransport
from baton.kv_transfer.window.transport import PullOutcome

NUM_BLOCKS = 16
BLOCK_BYTES = 256 << 10
NOBODY = 65534


def content(block_id: int, generation: int) -> int:
    """The 64-bit word that fills a block of this generation."""
    return (generation & ~0xFFFF) | block_id


def export(incarnation: str) -> None:
    pool = HostPool(incarnation, NUM_BLOCKS, BLOCK_BYTES)
    exporter = export_host_pool(incarnation, pool, pool.generations.fd)
    print("ready", flush=True)
    time.sleep(60)
    exporter.close()


def pull(incarnation: str, seconds: float, fd: int) -> None:
    """Print the counts of outcomes, and of pulls that ended OK with wrong bytes."""
    published = np.frombuffer(mmap.mmap(fd, 8 * NUM_BLOCKS), dtype=np.uint64)
    pool = HostPool("d" * 32, NUM_BLOCKS, BLOCK_BYTES)
    window = ShmTransport(pool).connect(access(incarnation))
    counts: collections.Counter[str] = collections.Counter()
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        block_id = random.randrange(NUM_RESERVED_BLOCKS, NUM_BLOCKS)
        generation = int(published[block_id])
        pair = BlockPair(BlockRef(block_id, generation), 5)
        window.start_pull(block_pairs.join(pair), done.put)
        outcome = done.get(timeout=10)
        counts[outcome.value] += 1
        if outcome is PullOutcome.OK:
            words = np.frombuffer(pool.block(5), dtype=np.uint64)
            counts["wrong"] += not bool((words == content(block_id, generation)).all())
    window.close()
    window.join()
    print(json.dumps(counts))


def squat(uid: str, incarnation: str) -> None:
    os.setuid(NOBODY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0baton-kv-{uid}-{incarnation}".encode())
    listener.listen()
    print("ready", flush=True)
    time.sleep(60)


def intrude(uid: str, incarnation: str) -> None:
    os.setuid(NOBODY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        connection.connect(f"\0baton-kv-{uid}-{incarnation}".encode())
        data, fds, _, _ = socket.recv_fds(connection, 100, 2)
    print(json.dumps([len(data), len(fds)]))


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "export":
        export(arguments[0])
    elif role == "pull":
        pull(arguments[0], float(arguments[1]), int(arguments[2]))
    elif role == "squat":
        squat(arguments[0], arguments[1])
    else:
        intrude(arguments[0], arguments[1])
