"""What private Redis servers leave behind, and what of others is left alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from baton.cluster.redis_server import RedisServer


def test_folders_of_servers_that_were_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folders = {name: tmp_path / name for name in ("baton-redis-dead", "baton-redis-new", "other")}
    for folder in folders.values():
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as nobody:
            nobody.bind(str(folder / "redis.sock"))
    os.utime(folders["baton-redis-dead"], (0, 0))
    os.utime(folders["other"], (0, 0))
    with RedisServer.start() as first:
        os.utime(first.folder, (0, 0))
        with RedisServer.start() as second:
            found = {folder.name for folder in tmp_path.iterdir()}
            assert found == {"baton-redis-new", "other", first.folder.name, second.folder.name}
