"""The gateway's report of a failed call: the nodes that computed it, and their progress."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import aiohttp
import pytest
from fakes.gateway.byte_model import write_byte_model
from fakes.node.node import FakeNode

from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.redis_server import RedisServer
from baton.cluster.secret import ClusterSecret
from baton.core.config import ClusterConfig, GatewayConfig
from baton.core.errors import EngineFailed
from baton.core.membership import Role
from baton.core.request.timeline import Event
from baton.gateway.process.server import serve
from baton.gateway.request.setbacks import SessionLimits
from baton.gateway.telemetry.call_feed import CallFeed
from baton.gateway.telemetry.calls.call_record import CallRecord

SECRET = "test secret"


async def test_nodes_of_a_failed_call_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[CallRecord] = []
    report = CallFeed.call_ended

    def call_ended(feed: CallFeed, record: CallRecord) -> None:
        ended.append(record)
        report(feed, record)

    monkeypatch.setattr(CallFeed, "call_ended", call_ended)
    caplog.set_level(logging.INFO, "baton.gateway")
    model = write_byte_model(tmp_path / "demo")
    with RedisServer.start() as redis:
        cluster = ClusterConfig(redis.url, f"c{time.monotonic_ns()}", SECRET)
        config = GatewayConfig(grpc_port=0, http_port=0, model=str(model), log_json=True)
        limits = SessionLimits(max_attempts=1)
        gateway = await serve(config, cluster, session_limits=limits)
        prefill = FakeNode(Role.PREFILL, "p1", "1" * 32, secret=SECRET)
        decode = FakeNode(Role.DECODE, "d1", "2" * 32, [prefill.incarnation], secret=SECRET)
        decode.error = EngineFailed("words")
        decode.first_token_s = 0.05
        directory = RedisDirectory(
            RedisClient(cluster.redis_url, cluster.cluster, ClusterSecret(SECRET))
        )
        try:
            for node in (prefill, decode):
                await node.start()
                await directory.announce(node.member, 5.0)
            await asyncio.wait_for(gateway.startup_lines(), 5)
            async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.http_port}") as http:
                body = {"model": "demo", "prompt": "x", "max_tokens": 3}
                async with http.post("/v1/completions", json=body) as response:
                    assert response.status == 500
        finally:
            await gateway.stop(grace_s=0.0)
            await directory.close()
            for node in (prefill, decode):
                await node.kill()
    (record,) = ended
    run = record.unfinished_run
    assert run is not None and (run.prefill_node, run.decode_node) == ("p1", "d1")
    events = [stamp.event for stamp in run.timeline]
    assert events[:2] == [Event.ARRIVED, Event.ROUTED] and events[-1] is Event.FAILED
    (line,) = [
        one for one in caplog.records if one.levelno == logging.INFO and "fields" in vars(one)
    ]
    fields = vars(line)["fields"]
    assert (fields["prefill_node"], fields["decode_node"]) == ("p1", "d1")
    assert "words" not in str(fields)
