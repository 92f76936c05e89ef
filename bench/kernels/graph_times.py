"""The time of calls in sequence in a CUDA graph, which excludes launch overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def graph_times_us(calls: Sequence[Callable[[], object]], repeats: int) -> tuple[float, ...]:
    """Microseconds per call, for each replay of all calls."""
    for call in calls:
        call()  # compile first
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    samples = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / len(calls) * 1e3)
    return tuple(samples)
