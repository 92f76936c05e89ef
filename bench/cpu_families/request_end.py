"""Host time after a long request's last token: its blocks are released and copied to host memory.

    python -m baton.bench.cpu "request end"

Host memory is full of short requests, each of which is evicted separately. A simulated device
computes nothing and copies at 50 GB/s. Times are CPU time of the engine's thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import count

from baton.core.ports import Clock
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.kv.generations import SharedGenerations
from baton.engine.kv.limits import EngineLimits

from ..floors.figures import Figure
from ..played.caches import TOKEN_BYTES, PlayedCopier, PublishedCache
from .scheduling import HostRunner

_BLOCK_SIZE = 16  # as in HostRunner
_LONG_BLOCKS = 2000
_NUM_SHORT, _MOST_SHORT_BLOCKS = 1600, 3
_DEVICE_BLOCKS, _HOST_BLOCKS = 2 * _LONG_BLOCKS, 3000
_NUM_OUTPUTS = 4
_REPEATS = 7


def measure() -> list[Figure]:
    """CPU milliseconds of the engine's thread."""
    engine, rng, numbers = _engine(), random.Random(0), count()
    samples = []
    for _ in range(_REPEATS):
        for _ in range(_NUM_SHORT):
            num_blocks = rng.randrange(1, _MOST_SHORT_BLOCKS + 1)
            engine.add(_request(next(numbers), num_blocks, rng))
        while engine.has_work:
            engine.step()
        engine.add(_request(next(numbers), _LONG_BLOCKS, rng))
        samples.append([*_serve(engine)])
    request = f"of a request of {_LONG_BLOCKS} blocks"
    last, behind = ([one[0] for one in samples], [max(one[1:]) for one in samples])
    return [
        Figure(f"the step with the last token {request}", "ms", tuple(last)),
        Figure("the longest step behind it, while its blocks are copied", "ms", tuple(behind)),
    ]


def _engine() -> Engine:
    max_len = _BLOCK_SIZE * (_LONG_BLOCKS + 1)
    return Engine(
        EngineParts(
            HostRunner(),
            EngineLimits(_DEVICE_BLOCKS, _BLOCK_SIZE, max_len, 64, 8192),
            SharedGenerations(_DEVICE_BLOCKS, "0" * 32),
            fingerprint="bench",
            eos_token_ids=(),
            cache_observer=PublishedCache("0" * 32),
            host_copier=PlayedCopier(Clock(), _HOST_BLOCKS, _BLOCK_SIZE * TOKEN_BYTES),
        )
    )


def _request(number: int, num_blocks: int, rng: random.Random) -> Request:
    prompt = tuple(rng.choices(range(4000), k=num_blocks * _BLOCK_SIZE))
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=_NUM_OUTPUTS)
    return Request(f"r{number}", 0, prompt, params)


def _serve(engine: Engine) -> Iterator[float]:
    """CPU ms of the step with the last token, then of each later step until all blocks are
    copied."""
    num_given = 0
    while engine.has_work:
        began_s = time.thread_time()
        num_given += len(engine.step().tokens)
        if num_given == _NUM_OUTPUTS:
            yield 1e3 * (time.thread_time() - began_s)
