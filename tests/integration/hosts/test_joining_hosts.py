"""Which ranks may join an engine on several hosts, in any order, and which are refused by name.

Rank 0 and the other hosts are threads here.
"""

from __future__ import annotations

import dataclasses
import queue
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from deployments import free_port
from node_driver import write_tiny_model

from baton.cluster.secret import ClusterSecret
from baton.core.engine_config import EngineConfig
from baton.core.errors import BatonError, NodeLost, PermissionDenied, StartupFailed
from baton.engine.hosts.head import ClusterTrust, JoinedRank, gather
from baton.engine.hosts.joining import dial_head, request_of

SECRET = ClusterSecret("a secret of these tests")
HEAD = "127.0.0.2"


class Head:
    """Rank 0, which waits for the other hosts."""

    def __init__(self, config: EngineConfig) -> None:
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        trust = ClusterTrust("prefill", config, SECRET.keys_by_id(), None)
        self._pool = ThreadPoolExecutor(1)
        self.joined: Future[dict[int, JoinedRank]] = self._pool.submit(
            gather, trust, self.lines.put
        )
        self.lines.get(timeout=10)  # it listens

    def close(self) -> None:
        for each in self.joined.result(timeout=10).values():
            each.connection.close()
        self._pool.shutdown()


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    """The config of an engine on three hosts, with a stage on each."""
    return EngineConfig(
        model=str(write_tiny_model(tmp_path)),
        load_format="dummy",
        device="cpu",
        pipeline_parallel_size=3,
        nnodes=3,
        master_addr=HEAD,
        master_port=free_port(HEAD),
    )


@pytest.fixture
def head(config: EngineConfig) -> Iterator[Head]:
    head = Head(config)
    yield head
    others = [join(config, rank) for rank in (1, 2) if not head.joined.done()]
    head.close()
    for connection in others:
        connection.close()


def join(
    config: EngineConfig, rank: int, role: str = "prefill", key: bytes = SECRET.dialing_key
) -> socket.socket:
    return dial_head(config, key, request_of(config, role, rank, f"127.0.0.{3 + rank}"), None)


def test_ranks_come_in_any_order(config: EngineConfig) -> None:
    with pytest.raises(OSError):  # rank 0 does not listen yet
        join(config, 2)
    head = Head(config)
    with join(config, 2), join(config, 1):
        joined = head.joined.result(timeout=10)
    assert {rank: each.host for rank, each in joined.items()} == {1: "127.0.0.4", 2: "127.0.0.5"}
    head.close()


def test_a_rank_that_is_gone_makes_room(config: EngineConfig) -> None:
    head = Head(config)
    join(config, 1).close()
    with join(config, 1) as again, join(config, 2):
        joined = head.joined.result(timeout=10)
        joined[1].connection.send(b"x")
        assert again.recv(1) == b"x"
    head.close()


def test_a_rank_comes_once(config: EngineConfig, head: Head) -> None:
    already = "--node-rank: rank 1 has already joined"
    with join(config, 1), pytest.raises(PermissionDenied, match=already):
        join(config, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 32}, "--block-size: 32 on the host of rank 1, None on that of rank 0"),
        ({"nnodes": 1}, "--nnodes: 1 on the host of rank 1, 3 on"),
        ({"seed": 5}, "--seed: 5 on"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype: int8 on"),
    ],
)
def test_other_flags_are_refused_by_name(
    config: EngineConfig, head: Head, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(PermissionDenied, match=reason):
        join(dataclasses.replace(config, **changes), 1)


def test_what_is_a_hosts_own_may_differ(
    config: EngineConfig, head: Head, tmp_path_factory: pytest.TempPathFactory
) -> None:
    there = str(write_tiny_model(tmp_path_factory.mktemp("there")))
    join(dataclasses.replace(config, model=there, num_threads=2, node_rank=1), 1).close()


def test_another_model_is_refused(
    config: EngineConfig, head: Head, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = str(write_tiny_model(tmp_path_factory.mktemp("other"), 300))
    with pytest.raises(PermissionDenied, match="another model"):
        join(dataclasses.replace(config, model=other), 1)


def test_another_role_or_version_is_refused(
    config: EngineConfig, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PermissionDenied, match="role: decode on the host of rank 1, prefill on"):
        join(config, 1, role="decode")
    monkeypatch.setattr("baton.engine.hosts.joining.version", lambda: "0.0.0")
    with pytest.raises(PermissionDenied, match=r"version: 0\.0\.0 on the host of rank 1"):
        join(config, 1)


def test_a_rank_of_the_first_host_is_refused(config: EngineConfig, head: Head) -> None:
    with pytest.raises(PermissionDenied, match="rank 0 does not belong to another host"):
        join(config, 0)


def test_another_secret_is_refused(config: EngineConfig, head: Head) -> None:
    with pytest.raises(NodeLost, match="during the handshake"):
        join(config, 1, key=ClusterSecret("another secret of the tests").dialing_key)


def test_who_proves_nothing_is_no_rank(config: EngineConfig, head: Head) -> None:
    with socket.create_connection((HEAD, config.master_port), 5) as stranger:
        stranger.sendall(b"x" * 1000)
        stranger.settimeout(5)
        try:
            received = stranger.recv(100)
        except ConnectionResetError:  # its data was not read
            received = b""
        assert received == b""
    assert not head.joined.done()


def test_the_head_names_an_address_that_is_not_its_own(config: EngineConfig) -> None:
    elsewhere = dataclasses.replace(config, master_addr="192.0.2.1")
    trust = ClusterTrust("prefill", elsewhere, SECRET.keys_by_id(), None)
    with pytest.raises(StartupFailed, match="--master-addr: cannot listen at 192"):
        gather(trust, lambda line: None)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"nnodes": 2, "pipeline_parallel_size": 3}, "--nnodes 2 does not divide"),
        ({"nnodes": 2, "pipeline_parallel_size": 2}, "needs --master-addr"),
        ({"node_rank": 1}, "--node-rank must lie in"),
    ],
)
def test_flags_that_do_not_fit(fields: dict[str, int], reason: str) -> None:
    with pytest.raises(BatonError, match=reason):
        EngineConfig(**fields)  # type: ignore[arg-type]
