"""How a rank of another host joins rank 0: one connection per rank, accepted, or refused by name.

    the other host                            rank 0, at --master-addr
      │ ── (TLS), handshake ─────────────────►   │ of this cluster?   core/channels/admission.py
      │ ── a frame: JoinRequest ─────────────►   │ the same version, model and flags?
      │ ◄─ a frame: empty, or the refusal ────   │
      │ ◄─ rank 0's messages ─────────────────   │ once all ranks have joined

The messages that follow are those of parallel/rank_channel.py. Never imports torch: the process
that joins is the other host's supervisor, which passes the connection to a rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from ...core.channels.admission import (
    ADMIT_S,
    MAX_REFUSAL_BYTES,
    Secure,
    check_verdict,
    dial,
    read_frame,
)
from ...core.channels.engine_tls import EngineTls
from ...core.channels.frames import encode_payload
from ...core.channels.handshake import Opening
from ...core.engine_config import EngineConfig
from ...core.errors import NodeLost, PermissionDenied
from ...core.model_dir import resolve_model_dir
from ...core.version import version
from ..model.weights.weight_files import weights_identity

PURPOSE = b"ranks 2"  # of the handshake; the number is the protocol version of the ranks
_MAX_REQUEST_BYTES = 64 << 10
# Flags that hosts may set differently; all others must be the same.
_OF_ONE_HOST = frozenset({"model", "served_model_name", "device", "num_threads", "node_rank"})


class JoinRequest(msgspec.Struct, frozen=True):
    """A rank of another host, and its config. `host`: the address at which peers connect to it."""

    version: str
    role: str
    rank: int
    host: str
    model: str
    flags: dict[str, Any]


_decoder = msgspec.json.Decoder(JoinRequest)


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a rank's process gets from its own host, not from rank 0. `host`: the address at which
    peers connect to it; `device`: with the GPUs of all ranks of its host; `store_port`, `store_fd`:
    the store of these ranks, the socket for the rank that hosts it."""

    host: str
    model: str
    device: str
    num_threads: int | None
    tls: EngineTls | None
    store_port: int = 0
    store_fd: int | None = None

    def of_this_host(self, config: EngineConfig) -> EngineConfig:
        """Rank 0's `config` with the settings of this host."""
        return dataclasses.replace(
            config, model=self.model, device=self.device, num_threads=self.num_threads
        )


def request_of(config: EngineConfig, role: str, rank: int, host: str) -> JoinRequest:
    """The request of a rank, with the flags that all ranks must share. Reads a small part of the
    weights. Raises StartupFailed."""
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    flags = {name: value for name, value in values.items() if name not in _OF_ONE_HOST}
    return JoinRequest(version(), role, rank, host, _identity(config), flags)


def _identity(config: EngineConfig) -> str:
    """A digest of the model that `config` names."""
    folder = resolve_model_dir(config.model)
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16)
    if config.load_format != "dummy":
        digest.update(weights_identity(folder).encode())
    return digest.hexdigest()


def refusal_of(theirs: JoinRequest, ours: JoinRequest) -> str:
    """Why a rank that sends `theirs` does not fit the engine of `ours`; empty if it does."""
    who = f"the host of rank {theirs.rank}"
    for name in ("version", "role"):
        there, here = getattr(theirs, name), getattr(ours, name)
        if there != here:
            return f"{name}: {there or 'none'} on {who}, {here or 'none'} on that of rank 0"
    for name in sorted(ours.flags.keys() | theirs.flags.keys()):
        there, here = theirs.flags.get(name), ours.flags.get(name)
        if there != here:
            flag = name.replace("_", "-")
            return f"--{flag}: {there} on {who}, {here} on that of rank 0"
    return "" if theirs.model == ours.model else f"--model: another model on {who} than on rank 0's"


def dial_head(
    config: EngineConfig, key: bytes, request: JoinRequest, secure: Secure | None
) -> socket.socket:
    """A connection to rank 0 that was accepted for the rank of `request`.

    Raises OSError: rank 0 does not listen yet; NodeLost: the listener closes during the handshake,
    as with a different secret; Unauthenticated, PermissionDenied: either side refuses the other.
    """
    connection = dial(
        PURPOSE,
        key,
        dialer=id_of(request.rank),
        listener=id_of(0),
        address=config.master,
        secure=secure,
    )
    try:
        connection.sendall(encode_payload(msgspec.json.encode(request)))
        verdict = read_frame(connection, time.monotonic() + ADMIT_S, MAX_REFUSAL_BYTES)
        check_verdict(verdict)
    except PermissionDenied:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        raise NodeLost(f"rank 0 hung up: {error}") from error
    return connection


def read_request(connection: socket.socket, opening: Opening) -> JoinRequest:
    """The request of an authenticated dialer. Raises OSError, PermissionDenied."""
    payload = read_frame(connection, time.monotonic() + ADMIT_S, _MAX_REQUEST_BYTES)
    try:
        request = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PermissionDenied(f"its request is invalid: {error}") from error
    if id_of(request.rank) != opening.dialer:
        raise PermissionDenied("it is another rank than in its handshake")
    return request


def id_of(rank: int) -> str:
    """The identity of a rank in handshakes."""
    return f"{rank % (1 << 64):032x}"
