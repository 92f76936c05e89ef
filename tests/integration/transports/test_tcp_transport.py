"""`tcp` over the loopback: bytes, verdicts, corruption, hostile peers."""

from __future__ import annotations

import contextlib
import pickle
import queue
import shutil
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fakes.access import ENGINE_KEY, access
from fakes.handoff import block_pairs
from fakes.handoff.block_pairs import BlockPair, BlockRef
from fakes.handoff.pieces import of_heads
from fakes.host_pool import HostPool
from patience import AT_ONCE_S, SOON_S

from baton.cli.host.certs import make_certificates, sign_certificates
from baton.cluster.tls import role_name
from baton.core.channels.accept_thread import BURST
from baton.core.channels.addresses import host_id
from baton.core.channels.engine_tls import EngineTls
from baton.core.channels.handshake import CHALLENGE_BYTES, Dialer
from baton.core.errors import HandoffFailed
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS
from baton.engine.kv.generations import GenerationsReader
from baton.kv_transfer.export import pool_address
from baton.kv_transfer.export.pool_address import CudaMemory, PoolDescription, PoolPart
from baton.kv_transfer.network import data_wire as wire
from baton.kv_transfer.network.data_client import WrapSocket, connect, describe_remote
from baton.kv_transfer.network.data_server import DataServer, ServedPool
from baton.kv_transfer.network.remote_window import RemoteWindow
from baton.kv_transfer.network.stream import Stream
from baton.kv_transfer.network.tcp import HostBlockBytes, TcpOutlet, TcpTransport
from baton.kv_transfer.window.block_pairs import Ids
from baton.kv_transfer.window.block_pieces import BlockCut, BlockPiece
from baton.kv_transfer.window.network_address import PoolAccess, RemotePool
from baton.kv_transfer.window.transport import PullOutcome

SOURCE, PULLER = "5" * 32, "9" * 32
NUM_ROWS, HEAD_BYTES, NUM_HEADS = 4, 96, 4
BLOCK_BYTES = NUM_ROWS * HEAD_BYTES * NUM_HEADS
NUM_BLOCKS = 40
PARTS = (PoolPart(SOURCE, (0, 2), (0, 2), 1), PoolPart("6" * 32, (2, 2), (0, 2), 2))


@dataclass
class Served:
    """A source, and the test's hooks: `sabotage` is called before blocks are read."""

    pool: HostPool
    offered: ServedPool
    server: DataServer
    remote: RemotePool
    sabotage: list[object]


def fill(pool: HostPool) -> None:
    rng = np.random.default_rng(3)
    for block_id in range(NUM_RESERVED_BLOCKS, pool.num_blocks):
        pool.block(block_id)[:] = rng.bytes(pool.block_bytes)


@pytest.fixture(params=[BLOCK_BYTES, 3 << 20], ids=["small blocks", "blocks of several frames"])
def block_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def served(block_bytes: int) -> Iterator[Served]:
    pool = HostPool(SOURCE, NUM_BLOCKS if block_bytes == BLOCK_BYTES else 6, block_bytes)
    fill(pool)
    sabotage: list[object] = []

    class Tampered(HostBlockBytes):
        def read(self, block_ids: Ids) -> np.ndarray:
            data = super().read(block_ids)
            if sabotage:
                sabotage.pop()(data)  # type: ignore[operator]
            return data

    outlet = partial(TcpOutlet, lambda cut: Tampered(pool, cut))
    server = DataServer("127.0.0.1", ["127.0.0.1"], {wire.Mode.BYTES: outlet})
    description = PoolDescription(SOURCE, block_bytes, pool.num_blocks, parts=PARTS)
    reader = GenerationsReader(pool.generations.fd, pool.num_blocks, SOURCE)
    offered = ServedPool(description, reader, ENGINE_KEY)
    server.start(offered)
    yield Served(pool, offered, server, access(SOURCE, server.port, is_elsewhere=True), sabotage)
    server.close()
    wait_for_threads("newcomer")
    reader.close()
    pool.close()


def cut_of(num_rows: int, width: int, offset: int) -> BlockCut:
    """A cut into rows as long as blocks."""
    size = BLOCK_BYTES
    return BlockCut(num_rows, width, size, offset, width, 0, size, num_rows * width)


def wait_for_threads(name: str) -> None:
    deadline_s = time.monotonic() + 3
    while any(thread.name.startswith(name) for thread in threading.enumerate()):
        assert time.monotonic() < deadline_s, "a thread is left"
        time.sleep(0.01)


@pytest.fixture
def destination(block_bytes: int) -> Iterator[HostPool]:
    pool = HostPool(PULLER, 12, block_bytes)
    yield pool
    pool.close()


def transport_to(pool: HostPool, *, anywhere: bool = False) -> TcpTransport:
    return TcpTransport(
        lambda cut: HostBlockBytes(pool, cut),
        pool.block_bytes,
        anywhere=anywhere,
    )


@contextlib.contextmanager
def window_onto(
    served: Served, destination: HostPool, piece: BlockPiece | None = None
) -> Iterator[RemoteWindow]:
    window = transport_to(destination).connect(served.remote, piece)
    try:
        yield window
    finally:
        window.close()
        window.join()


def pair(pool: HostPool, block_id: int, destination: int) -> BlockPair:
    return BlockPair(BlockRef(block_id, pool.generations.read(block_id)), destination)


def pull(window: RemoteWindow, *pairs: BlockPair) -> PullOutcome:
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    window.start_pull(block_pairs.join(*pairs), done.put)
    return done.get(timeout=10)


def test_copies_blocks_to_where_they_belong(served: Served, destination: HostPool) -> None:
    with window_onto(served, destination) as window:
        assert window.transport == "tcp"
        assert window.gbytes_per_s > 0
        pairs = [pair(served.pool, 5, 3), pair(served.pool, 2, 11), pair(served.pool, 4, 2)]
        assert pull(window, *pairs) is PullOutcome.OK
    for each in pairs:
        copied = destination.block(each.destination)
        assert copied == served.pool.block(each.source.block_id)
    assert not any(destination.block(4))


def test_copies_heads_to_where_they_belong(served: Served, block_bytes: int) -> None:
    """Heads 1 and 2 of the source's four become heads 0 and 1 of the puller's two."""
    ours = HostPool(PULLER, 12, block_bytes // 2)
    with window_onto(served, ours, of_heads(1, 0, 2, 4, 2, num_layers=NUM_ROWS // 2)) as window:
        assert pull(window, pair(served.pool, 5, 3)) is PullOutcome.OK
    source = np.frombuffer(served.pool.block(5), np.uint8).reshape(NUM_ROWS, 4, -1)
    assert bytes(ours.block(3)) == source[:, 1:3].tobytes()
    del source
    ours.close()


def test_the_description_tells_of_all_ranks(served: Served) -> None:
    assert describe_remote(served.remote).parts == PARTS


def test_descriptions_of_another_form_have_other_versions() -> None:
    """A change of the description's format must raise both versions: exporters of memory and data
    ports send it."""
    described = PoolDescription(SOURCE, 64, 5, CudaMemory(bytes(16), bytes(64)), PARTS[:1])
    form = [[SOURCE, 64, 5, [bytes(16), bytes(64)], [[SOURCE, [0, 2], [0, 2], 1, ""]]]]
    found = (msgspec.msgpack.decode(described.pack()), pool_address.PURPOSE, wire.PURPOSE)
    assert found == (*form, b"pool 7", b"kv data 9")


def test_a_reallocated_block_is_stale(served: Served, destination: HostPool) -> None:
    announced = pair(served.pool, 5, 3)
    served.pool.generations.bump([5])
    with window_onto(served, destination) as window:
        assert pull(window, pair(served.pool, 4, 2), announced) is PullOutcome.STALE
        assert pull(window, pair(served.pool, 5, 3)) is PullOutcome.OK


def test_a_rewrite_while_it_is_sent_is_stale_and_never_lands(
    served: Served, destination: HostPool
) -> None:
    with window_onto(served, destination) as window:
        served.sabotage.append(lambda data: served.pool.generations.bump([5]))
        assert pull(window, pair(served.pool, 5, 3)) is PullOutcome.STALE
    assert not any(destination.block(3))


def test_a_block_outside_the_pool_fails(served: Served, destination: HostPool) -> None:
    with window_onto(served, destination) as window:
        beyond = BlockPair(BlockRef(NUM_BLOCKS, 0), 3)
        assert pull(window, beyond) is PullOutcome.FAILED


def test_every_pull_reports_once_even_when_cancelled(served: Served, destination: HostPool) -> None:
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    with window_onto(served, destination) as window:
        pairs = [pair(served.pool, 5, 3)] * 8
        handles = [window.start_pull(block_pairs.join(*pairs), done.put) for _ in range(6)]
        for handle in handles[1:]:
            handle.cancel()
    outcomes = [done.get(timeout=10) for _ in handles]
    assert outcomes[0] is PullOutcome.OK
    assert set(outcomes[1:]) <= {PullOutcome.OK, PullOutcome.CANCELLED}
    assert done.empty()


class Relay:
    """A wire between puller and source that flips a bit in each of the next `num_to_damage` data
    frames. With `is_false` a positive verdict replaces blocks."""

    def __init__(self, port: int) -> None:
        self.num_to_damage = 0
        self.is_false = False
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._forward, args=(near, far), daemon=True).start()
            self._tamper(far, near)

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(65536):
                far.sendall(data)
        with contextlib.suppress(OSError):
            far.shutdown(socket.SHUT_RDWR)

    def _tamper(self, far: socket.socket, near: socket.socket) -> None:
        with far, near, contextlib.suppress(OSError, struct.error):
            near.sendall(far.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
            length = far.recv(wire.LENGTH_BYTES, socket.MSG_WAITALL)
            near.sendall(length + far.recv(wire.unpack_length(length), socket.MSG_WAITALL))
            while True:
                head = far.recv(wire.FRAME_BYTES, socket.MSG_WAITALL)
                frame, data = wire.unpack_frame(head), b""
                if isinstance(frame, wire.DataFrame):
                    changed = bytearray(far.recv(frame.num_bytes, socket.MSG_WAITALL))
                    if self.num_to_damage:
                        self.num_to_damage -= 1
                        changed[len(changed) // 2] ^= 4
                    data = bytes(changed)
                near.sendall(wire.pack_end(PullOutcome.OK) if self.is_false else head + data)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES], indirect=True)
@pytest.mark.parametrize(("num_damaged", "outcome"), [(1, PullOutcome.OK), (2, PullOutcome.FAILED)])
def test_damage_on_the_way_is_asked_for_once_more(
    served: Served, destination: HostPool, num_damaged: int, outcome: PullOutcome
) -> None:
    relay = Relay(served.server.port)
    served.remote = replace(served.remote, port=relay.port)
    served.server._addresses.append(f"127.0.0.1:{relay.port}")
    with contextlib.closing(relay), window_onto(served, destination) as window:
        relay.num_to_damage = num_damaged
        assert pull(window, pair(served.pool, 5, 3)) is outcome
    arrived = destination.block(3) == served.pool.block(5)
    assert arrived is (outcome is PullOutcome.OK)
    assert arrived or not any(destination.block(3))


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES], indirect=True)
def test_a_verdict_without_blocks_is_none(served: Served, destination: HostPool) -> None:
    """A verdict without blocks fails: the buffer's old content would be taken for the blocks."""
    relay = Relay(served.server.port)
    served.remote = replace(served.remote, port=relay.port)
    served.server._addresses.append(f"127.0.0.1:{relay.port}")
    with contextlib.closing(relay), window_onto(served, destination) as window:
        relay.is_false = True
        assert pull(window, pair(served.pool, 5, 3)) is PullOutcome.FAILED
    assert not any(destination.block(3))


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES], indirect=True)
def test_who_passes_on_the_handshake_from_another_port_is_refused(
    served: Served, destination: HostPool
) -> None:
    """A relayed handshake, as by a process that took the port of a dead source, is refused."""
    relay = Relay(served.server.port)
    with contextlib.closing(relay), pytest.raises(HandoffFailed):
        connect(replace(served.remote, port=relay.port), None)


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES], indirect=True)
def test_who_guesses_generations_gets_no_byte(served: Served, destination: HostPool) -> None:
    client = connect(served.remote, BlockCut.of(None, BLOCK_BYTES))
    served.pool.generations.bump([5])
    for guess in (0, 1, 2, served.pool.generations.read(5) ^ 1):
        ids, generations = np.array([5]), np.array([guess], np.uint64)
        assert client.request(ids, generations) is PullOutcome.STALE
    client.close()


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES], indirect=True)
def test_a_broken_connection_is_made_again(served: Served, destination: HostPool) -> None:
    def hang_up(data: object) -> None:
        for stream in list(served.server._pullers):
            stream.hang_up()

    with window_onto(served, destination) as window:
        served.sabotage.append(hang_up)
        assert pull(window, pair(served.pool, 5, 3)) is PullOutcome.OK
    assert destination.block(3) == served.pool.block(5)


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES], indirect=True)
class TestWhoIsLetIn:
    """The opening: the dialer must know the key, name this pool, and send it in time."""

    @pytest.mark.parametrize("which", ["key", "pool", "port"])
    def test_a_puller_that_is_wrong_is_refused(self, served: Served, which: str) -> None:
        remote = served.remote
        if which == "key":
            remote = replace(remote, key=bytes(32))
        elif which == "pool":
            remote = replace(remote, name="7" * 32)
        else:
            with socket.create_server(("127.0.0.1", 0)) as unused:
                remote = replace(remote, port=unused.getsockname()[1])
        with pytest.raises(HandoffFailed):
            connect(remote, BlockCut.of(None, BLOCK_BYTES))

    def test_a_source_that_does_not_know_the_key_is_refused(self, served: Served) -> None:
        """A process without the key that has taken the source's port is refused."""
        with pytest.raises(HandoffFailed):
            connect(replace(served.remote, key=bytes(32)), None)

    @pytest.mark.parametrize(
        "cut",
        [
            cut_of(1, BLOCK_BYTES + 1, 0),
            cut_of(1, 8, BLOCK_BYTES),
            cut_of(2, 8, 0),
            cut_of(1, 0, 0),
        ],
    )
    def test_a_piece_that_no_block_has_is_refused(self, served: Served, cut: BlockCut) -> None:
        ids, generations = np.array([3]), np.zeros(1, np.uint64)
        with (
            pytest.raises(HandoffFailed),
            contextlib.closing(connect(served.remote, cut)) as client,
        ):
            client.request(ids, generations)

    @pytest.mark.parametrize(
        "garbage",
        [
            pickle.dumps({"a": "pickle"}) * 9,
            b"PK\x03\x04" * 40,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 6,
            bytes(200),
        ],
    )
    def test_garbage_is_closed_at_once(self, served: Served, garbage: bytes) -> None:
        with socket.create_connection(("127.0.0.1", served.server.port), 2) as connection:
            connection.sendall(garbage)
            begin_s = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            assert time.monotonic() - begin_s < AT_ONCE_S

    @pytest.mark.parametrize("step_s", [10.0, 0.2])
    def test_dawdlers_are_closed_within_two_seconds(self, served: Served, step_s: float) -> None:
        """Connections that send only the header, or a byte now and then, are closed within two
        seconds."""
        ours = Dialer(bytes(32), wire.PURPOSE, dialer=PULLER, listener=SOURCE, address="x")
        opening = ours.opening
        begin_s = time.monotonic()
        with socket.create_connection(("127.0.0.1", served.server.port), 2) as connection:
            connection.sendall(opening[:8])
            connection.settimeout(step_s)
            with contextlib.suppress(ConnectionError):
                for byte in opening[8:]:
                    try:
                        assert connection.recv(1) == b""
                        break
                    except TimeoutError:
                        connection.sendall(bytes([byte]))
        assert 1.0 < time.monotonic() - begin_s < SOON_S

    def test_a_crowd_keeps_nobody_out(self, served: Served, destination: HostPool) -> None:
        address = ("127.0.0.1", served.server.port)
        with contextlib.ExitStack() as crowd:
            for _ in range(BURST - 20):
                crowd.enter_context(socket.create_connection(address, 5))
            with window_onto(served, destination) as window:
                assert pull(window, pair(served.pool, 5, 3)) is PullOutcome.OK
            assert len(served.server._newcomers._pending) <= 64
            assert threading.active_count() < 200

    @pytest.mark.parametrize("num_blocks", [0, wire.MAX_REQUEST_BLOCKS + 1, 2**32 - 1])
    def test_a_request_of_any_size_is_not_taken(self, served: Served, num_blocks: int) -> None:
        client = connect(served.remote, BlockCut.of(None, BLOCK_BYTES))
        stream: Stream = client.stream
        stream._socket.sendall(struct.pack("<4sII", b"PULL", num_blocks, 0))
        begin_s = time.monotonic()
        stream._socket.settimeout(2)
        assert stream._socket.recv(1) == b""
        assert time.monotonic() - begin_s < AT_ONCE_S
        client.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certificates(folder)
    return folder


def tls_of(certificates: Path, role: str) -> EngineTls:
    files = (str(certificates / name) for name in ("ca.crt", f"{role}.crt", f"{role}.key"))
    ca, chain, key = files
    return EngineTls(ca, chain, key, *map(role_name, ("gateway", "prefill", "decode")))


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES], indirect=True)
def test_with_certificates_only_a_puller_s_gets_through(
    served: Served, destination: HostPool, certificates: Path
) -> None:
    wrap = tls_of(certificates, "prefill").source_wrap()
    outlet = partial(TcpOutlet, lambda cut: HostBlockBytes(served.pool, cut))
    server = DataServer("127.0.0.1", ["127.0.0.1"], {wire.Mode.BYTES: outlet}, wrap)
    server.start(served.offered)
    remote = replace(served.remote, port=server.port)
    transport = TcpTransport(
        lambda cut: HostBlockBytes(destination, cut),
        BLOCK_BYTES,
        anywhere=False,
        wrap=tls_of(certificates, "decode").puller_wrap(),
    )
    window = transport.connect(remote)
    assert pull(window, pair(served.pool, 5, 3)) is PullOutcome.OK
    window.close()
    window.join()
    assert destination.block(3) == served.pool.block(5)
    with pytest.raises(HandoffFailed):  # knows the key, but is a gateway
        describe_remote(remote, tls_of(certificates, "gateway").puller_wrap())
    with pytest.raises(HandoffFailed):  # knows the key, but uses no TLS
        describe_remote(remote)
    with pytest.raises(HandoffFailed, match="no TLS"):  # a source without TLS
        describe_remote(served.remote, tls_of(certificates, "decode").puller_wrap())
    server.close()


@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES], indirect=True)
def test_certificates_are_renewed_one_file_after_the_other(
    served: Served, certificates: Path, tmp_path: Path
) -> None:
    """The old pair stays in use until the whole new pair is there."""
    live, fresh = tmp_path / "live", tmp_path / "fresh"
    shutil.copytree(certificates, live)
    fresh.mkdir()
    sign_certificates(fresh, certificates / "ca")
    wrap = tls_of(live, "prefill").source_wrap()
    outlet = partial(TcpOutlet, lambda cut: HostBlockBytes(served.pool, cut))
    server = DataServer("127.0.0.1", ["127.0.0.1"], {wire.Mode.BYTES: outlet}, wrap)
    server.start(served.offered)
    remote = replace(served.remote, port=server.port)
    seen: list[bytes] = []

    def reach(wrap: WrapSocket) -> None:
        def noted(connection: socket.socket) -> socket.socket:
            wrapped = wrap(connection)
            seen.append(wrapped.getpeercert(binary_form=True))
            return wrapped

        describe_remote(remote, noted)

    puller = tls_of(live, "decode").puller_wrap()
    for name in ("prefill.crt", "decode.crt"):
        shutil.copyfile(fresh / name, live / name)
        reach(puller)
    late = tls_of(live, "decode").puller_wrap()  # it never loaded a pair that matches
    with pytest.raises(HandoffFailed, match="KEY_VALUES_MISMATCH"):
        reach(late)
    for name in ("prefill.key", "decode.key"):
        shutil.copyfile(fresh / name, live / name)
        reach(puller)
    reach(late)
    (live / "ca.crt").write_text("")
    (live / "decode.key").unlink()
    reach(puller)
    old, new = (
        ssl.PEM_cert_to_DER_cert((folder / "prefill.crt").read_text())
        for folder in (certificates, fresh)
    )
    assert seen == [old, old, new, new, new, new]
    server.close()


def test_on_one_host_it_is_taken_only_when_told(served: Served, destination: HostPool) -> None:
    here = replace(served.remote, is_elsewhere=False)
    with pytest.raises(HandoffFailed, match="on this host"):
        transport_to(destination).connect(here)
    window = transport_to(destination, anywhere=True).connect(here)
    window.close()
    window.join()
    with pytest.raises(HandoffFailed, match="no port"):
        transport_to(destination).connect(access(SOURCE, is_elsewhere=True))


def test_a_pool_is_at_the_directory_s_host_and_the_hello_s_port() -> None:
    data = PoolAccess(bytes(16), 5, bytes(32))
    apart = data.at(SOURCE, "10.0.0.2", host_id(), PULLER)
    assert apart == RemotePool(SOURCE, "10.0.0.2", 5, bytes(32), True, PULLER)
    here = replace(data, host_id=host_id()).at(SOURCE, "10.0.0.2", host_id(), PULLER)
    assert here == RemotePool(SOURCE, "10.0.0.2", 5, bytes(32), False, PULLER)
