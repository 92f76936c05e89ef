"""The stream to one engine: a unix socket on its host, else TCP; and whether its process has ended.

    connect ─► handshake ─► messages, the first of which is a Welcome ─► the reason of the end

A silent engine counts as lost. Knows no message but the Welcome.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import Any, cast

from google.protobuf.message import DecodeError

from ...cluster.secret import ClusterSecret
from ...cluster.tls import ClusterTls, role_name
from ...core.channels.addresses import host_and_port, host_id, require_same_user, socket_address
from ...core.channels.admission import (
    GATEWAY,
    MAX_REFUSAL_BYTES,
    SOCKET,
    THIS_HOST,
    check_verdict,
    tune,
)
from ...core.channels.frames import LENGTH_BYTES, BrokenStream, FrameBuffer, decode_length
from ...core.channels.handshake import CHALLENGE_BYTES, Dialer
from ...core.errors import BatonError, NodeLost
from ...core.membership import Member
from ...core.ports import Clock
from ...proto.v1 import node_pb2

_CONNECT_TIMEOUT_S = 3.0
_CLOSED = "the engine closed the connection"
_PROBE_S = 0.5
_PROBE_PAUSES_S = (0.0, 0.005, 0.02, 0.08)  # a process that ends closes its sockets one by one
_LIVES_S = 0.1  # a node whose port stays open for so long is not ending


class EngineStream(asyncio.Protocol):
    """One attempt to connect to `member`. `take` is called for each message on its own, so that an
    error in one affects no other, and for none after the end; its owner asks `accepts` about the
    Welcome. `transport`: to write frames to, once connected."""

    def __init__(
        self,
        member: Member,
        secret: ClusterSecret,
        take: Callable[[node_pb2.NodeMessage], None],
        clock: Clock,
        silence_s: float,
        tls: ClusterTls | None = None,
    ) -> None:
        self._member = member
        self._secret = secret
        self._take = take
        self._clock = clock
        self._silence_s = silence_s
        self._tls = tls
        self.is_local = is_local(member)
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self._is_lost = False  # whether the transport is
        self._received = bytearray()  # of the handshake
        self._arrived = asyncio.Event()
        self._frames: FrameBuffer | None = None  # from the first frame on
        self._welcome: asyncio.Future[None] = self._loop.create_future()
        self._over: asyncio.Future[str] = self._loop.create_future()  # the reason of the end
        self._last_received_s = clock.monotonic_s()

    def accepts(self, welcome: node_pb2.Welcome) -> bool:
        """Whether the Welcome agrees with the directory's entry; a difference ends the stream."""
        member = self._member
        for field in ("incarnation", "role", "model", "fingerprint"):
            expected = member.role.value if field == "role" else getattr(member, field)
            if (found := getattr(welcome, field)) != expected:
                self.end(f"{field} is {found!r}, announced was {expected!r}")
                return False
        if not self._welcome.done():
            self._welcome.set_result(None)
        return True

    @property
    def is_over(self) -> bool:
        """Whether either side has ended it; not where the engine is only silent."""
        return self._over.done()

    def end(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)
        self._arrived.set()

    def abort(self) -> None:
        """End at once, without sending what is buffered, as closing would."""
        self.end("closed by the gateway")
        if self.transport is not None and not self._is_lost:
            self.transport.abort()

    async def serve(self) -> str:
        """Connect, and wait for the end; returns its reason. Raises no network errors."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._connect()
                await asyncio.wait((self._welcome, self._over), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return f"no welcome within {_CONNECT_TIMEOUT_S:g} s"
        except (OSError, BatonError) as error:
            return str(error) or type(error).__name__
        silence = asyncio.create_task(self._watch_silence())
        try:
            await asyncio.wait((self._over, silence), return_when=asyncio.FIRST_COMPLETED)
            return self._over.result() if self._over.done() else silence.result()
        finally:
            silence.cancel()

    async def _connect(self) -> None:
        """Raises OSError, BatonError."""
        member = self._member
        context = None if self._tls is None or self.is_local else self._tls.client_context()
        name = None if context is None else role_name(member.role.value)
        sock = await open_socket(member)
        await self._loop.create_connection(
            lambda: self, sock=sock, ssl=context, server_hostname=name
        )
        ours = Dialer(
            self._secret.dialing_key,
            GATEWAY,
            dialer=secrets.token_hex(16),
            listener=member.incarnation,
            address=THIS_HOST if self.is_local else member.engine_address,
        )
        assert self.transport is not None
        self.transport.write(ours.opening)
        self.transport.write(ours.answer(await self._read(CHALLENGE_BYTES)))
        length = decode_length(await self._read(LENGTH_BYTES), 0, MAX_REFUSAL_BYTES)
        check_verdict(await self._read(length))
        self._frames = FrameBuffer()
        received, self._received = bytes(self._received), bytearray()
        self.data_received(received)

    async def _read(self, num_bytes: int) -> bytes:
        """Read bytes of the handshake. Raises NodeLost."""
        while len(self._received) < num_bytes:
            if self._over.done():
                raise NodeLost("it hung up during the handshake")
            self._arrived.clear()
            await self._arrived.wait()
        data = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return data

    async def _watch_silence(self) -> str:
        """Return the reason once the engine was silent for too long.

        If this process itself was suspended, messages of the engine may be unread: the time of
        silence starts again.
        """
        period_s = self._silence_s / 8
        while True:
            before_s = self._clock.monotonic_s()
            await asyncio.sleep(period_s)
            now_s = self._clock.monotonic_s()
            if now_s - before_s > 2 * period_s:
                self._last_received_s = now_s
            if now_s - self._last_received_s > self._silence_s:
                return f"no heartbeat for {self._silence_s:g} s"

    # -- asyncio.Protocol --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._last_received_s = self._clock.monotonic_s()
        if self._frames is None:
            self._received += data
            self._arrived.set()
            return
        try:
            for payload in self._frames.cut(data):
                self._loop.call_soon(self._pass_on, node_pb2.NodeMessage.FromString(payload))
        except (BrokenStream, DecodeError) as error:
            self.end(f"its message cannot be read: {error}")

    def eof_received(self) -> None:
        """Bytes that are unsent by then may never be read by the engine."""
        self._loop.call_soon(self.end, _CLOSED)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        reason = f"the connection broke: {error}" if error else _CLOSED
        self._loop.call_soon(self.end, reason)  # after the messages that came before

    def _pass_on(self, message: node_pb2.NodeMessage) -> None:
        if not self._over.done():
            self._take(message)


# --- sockets --------------------------------------------------------------------------------------


def is_local(member: Member) -> bool:
    """Whether the engine runs on this host."""
    return member.host_id == host_id().hex()


async def open_socket(member: Member) -> socket.socket:
    """Raises OSError, HandoffFailed."""
    if not is_local(member):
        return await _open_tcp(member.engine_address)
    sock = await _open(socket.AF_UNIX, socket_address(member.incarnation, SOCKET))
    try:
        require_same_user(sock)
    except BaseException:
        sock.close()
        raise
    return sock


async def has_ended(member: Member) -> bool:
    """Whether the engine's socket is closed while its node's port accepts connections."""
    try:
        async with asyncio.timeout(_PROBE_S):
            for pause_s in _PROBE_PAUSES_S:
                await asyncio.sleep(pause_s)
                try:
                    (await open_socket(member)).close()
                except ConnectionResetError:
                    continue  # it stopped listening while we connected
                except ConnectionRefusedError:
                    with await _open_tcp(member.address) as sock:
                        return await _stays_open(sock)
    except (OSError, BatonError):  # TimeoutError too
        pass
    return False


async def _stays_open(sock: socket.socket) -> bool:
    """Whether the other end lives: the port of a killed process accepts connections until its last
    thread has ended, after its engine, and then resets them. Raises OSError."""
    try:
        async with asyncio.timeout(_LIVES_S):
            return bool(await asyncio.get_running_loop().sock_recv(sock, 1))
    except TimeoutError:  # it waits for our first bytes, as TLS does
        return True


async def _open_tcp(address: str) -> socket.socket:
    """Connect to the first address of the name that accepts. Raises OSError."""
    host, port = host_and_port(address)
    failure = OSError(f"{address} is no address")
    resolve = asyncio.get_running_loop().getaddrinfo
    try:
        found = await resolve(host, port, type=socket.SOCK_STREAM)
        for family, _, _, _, there in found:
            try:
                sock = await _open(family, there)
            except OSError as error:
                failure = error
            else:
                tune(sock, GATEWAY)
                return sock
    except ValueError as error:  # no name of a host
        raise failure from error
    raise failure


async def _open(family: int, there: Any) -> socket.socket:
    """Raises OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        await asyncio.get_running_loop().sock_connect(sock, there)
    except BaseException:
        sock.close()
        raise
    return sock
