"""A private Redis that dies, or that becomes unreachable."""

from __future__ import annotations

import shutil

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


def test_a_server_whose_folder_was_removed_is_ended_and_has_it_again() -> None:
    with RedisServer.start() as server:
        shutil.rmtree(server.folder)
        lost = server.process
        server.start_again()
        server._wait_until_it_answers()
        assert lost.returncode is not None
        assert server.folder.stat().st_mode & 0o777 == 0o700
    assert not server.folder.exists()
