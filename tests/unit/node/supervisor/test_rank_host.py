"""A host of ranks that dials: what ends it, and what it waits for. The test answers its dials."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.engine_config import EngineConfig
from baton.core.errors import NodeLost, StartupFailed, Unauthenticated
from baton.engine.hosts.joining import JoinRequest
from baton.node.supervisor import rank_host
from baton.node.supervisor.rank_host import RankHost

HUNG_UP, NOBODY = NodeLost("it hung up"), ConnectionRefusedError("nobody is there")


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([HUNG_UP] * 4, "hangs up within the handshake"),
        ([HUNG_UP, HUNG_UP, HUNG_UP, NOBODY, HUNG_UP], "refuses this host"),
        ([NOBODY] * 9, "refuses this host"),
    ],
)
def test_only_hang_ups_one_after_the_other_end_it(
    monkeypatch: pytest.MonkeyPatch, answers: list[Exception], said: str
) -> None:
    """A rank 0 that starts again hangs up, is not there for a while, and may hang up again."""
    left = [*answers, Unauthenticated("another secret")]

    async def dial(*_: object) -> None:
        raise left.pop(0)

    monkeypatch.setattr(RankHost, "_dial", dial)
    monkeypatch.setattr(rank_host, "_AGAIN_S", 0.0)
    request = JoinRequest("", "decode", 1, "127.0.0.1", "", {})
    ranks = RankHost(EngineConfig(master_addr="127.0.0.1"), [request], b"", None)
    with pytest.raises(StartupFailed, match=said):
        asyncio.run(ranks.run())
