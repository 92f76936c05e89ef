"""A private Redis that dies."""

from __future__ import annotations

from baton.cluster.redis_server import RedisServer


def test_a_server_that_died_is_started_again_at_its_address() -> None:
    with RedisServer.start() as server:
        url = server.url
        server.process.kill()
        server.process.wait()
        server.start_again()
        server._wait_until_it_answers()
        assert server.url == url
    assert not server.folder.exists()
