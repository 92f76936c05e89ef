"""A host of ranks that dials rank 0: what ends it, and what it waits for. The test accepts its
connections.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from baton.core.config import ClusterConfig, NodeConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import NodeLost, StartupFailed, Unauthenticated
from baton.core.membership import Role
from baton.engine.hosts.joining import JoinRequest
from baton.node.supervisor import rank_host
from baton.node.supervisor.rank_host import RankHost

HUNG_UP, NOBODY = NodeLost("it hung up"), ConnectionRefusedError("nobody is there")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([HUNG_UP] * 4, "hangs up during the handshake"),
        ([HUNG_UP, HUNG_UP, HUNG_UP, NOBODY, HUNG_UP], "refuses this host"),
        ([NOBODY] * 9, "refuses this host"),
    ],
)
def test_only_hang_ups_one_after_the_other_end_it(
    monkeypatch: pytest.MonkeyPatch, answers: list[Exception], message: str
) -> None:
    """Only consecutive hang-ups end the host: a rank 0 that restarts hangs up, is unreachable for a
    while, and may hang up again."""
    left = [*answers, Unauthenticated("another secret")]

    async def dial(*_: object) -> None:
        raise left.pop(0)

    monkeypatch.setattr(RankHost, "_dial", dial)
    monkeypatch.setattr(rank_host, "_AGAIN_S", 0.0)
    request = JoinRequest("", "decode", 1, "127.0.0.1", "", {})
    ranks = RankHost(EngineConfig(master_addr="127.0.0.1"), [request], b"", None)
    with pytest.raises(StartupFailed, match=message):
        asyncio.run(ranks.run())


async def test_ranks_that_cannot_be_killed_hold_no_end_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_host, "KILLED_S", 0.01)
    stop = asyncio.Event()
    monkeypatch.setattr(rank_host, "StopSignals", lambda: SimpleNamespace(stop=stop))
    monkeypatch.setattr(rank_host, "set_up_logging", lambda *_, **__: None)
    runs, may_end = asyncio.Event(), asyncio.Event()

    async def live(_: RankHost) -> None:
        runs.set()
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()

    monkeypatch.setattr(RankHost, "run", live)
    engine = EngineConfig(
        master_addr="127.0.0.1", nnodes=2, node_rank=1, pipeline_parallel_size=2, device="cpu"
    )
    running = asyncio.create_task(rank_host.run(Role.DECODE, engine, NodeConfig(), ClusterConfig()))
    await asyncio.wait_for(runs.wait(), 5.0)
    stop.set()
    done, _ = await asyncio.wait({running}, timeout=5.0)
    may_end.set()
    assert done and running.result() == 0
