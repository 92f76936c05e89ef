"""The floor of TTFT under a load: the same arrivals through one server that does nothing else.

    ttft[i] = max(arrival[i], end[i - 1]) + service[i] - arrival[i]        first come, first served

`service` is the time of one prefill in a queue at an engine alone. No prefill node that computes
one prompt at a time can be faster; batching gains nothing if one prompt already saturates the GPU's
tensor cores.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise


def replay(
    sent_s: Sequence[float], service_s: Sequence[float], num_servers: int = 1
) -> list[float]:
    """TTFT in seconds of each request; `sent_s` ascends."""
    free_s = [0.0] * num_servers  # a heap
    ttfts = []
    for at_s, takes_s in zip(sent_s, service_s, strict=True):
        begin_s = max(at_s, heapq.heappop(free_s))
        heapq.heappush(free_s, begin_s + takes_s)
        ttfts.append(begin_s + takes_s - at_s)
    return ttfts


def queued_spacing(
    sent_s: Sequence[float], first_s: Sequence[float], is_ours: Sequence[bool], num_between: int
) -> list[float]:
    """The service times of our requests in the run itself, where requests queued: seconds between
    the first tokens of two of ours with `num_between` other requests between them.

    Only if the second was sent before the first token of the first: else the server may have waited
    for it.
    """
    order = sorted(range(len(first_s)), key=first_s.__getitem__)
    ours = [place for place, index in enumerate(order) if is_ours[index]]
    pairs = [
        (order[before], order[after])
        for before, after in pairwise(ours)
        if after - before == num_between + 1
    ]
    return [
        first_s[after] - first_s[before]
        for before, after in pairs
        if sent_s[after] < first_s[before]
    ]
