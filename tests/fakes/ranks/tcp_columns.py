"""Real `TcpStages` of an engine whose ranks are all in this process, over the loopback."""

from __future__ import annotations

from baton.engine.hosts.tcp_stages import StageLink, TcpStages

_TIMEOUT_S = 20.0


def tcp_stages(num_stages: int, size: int = 1, *, is_on_gpu: bool = False) -> list[TcpStages]:
    """The stages of each rank, not yet connected; each must be connected by a thread of its own."""
    made = []
    for rank in range(num_stages * size):
        link = StageLink(rank, size, "127.0.0.1", b"k" * 32, None)
        stage = TcpStages(link, rank // size, num_stages, _TIMEOUT_S, is_on_gpu=is_on_gpu)
        made.append(stage)
    for stage in made:
        stage.addresses = [each.address for each in made]
    return made
