"""The messages with which gateways share their windows: MessagePack, compressed by zlib. Any
invalid message raises BadRow and no other error.

    GatewayState   the state of a gateway now
    RowMessage     one row of one gateway: counts, histograms, a sample for SLOs, calls to list
Seconds are of Redis' clock, which all gateways share. A row names its buckets (metrics/tally.py):
only gateways with equal buckets add it up.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

import msgspec

from ....core.membership import HexId
from ..calls.ended_call import MAX_COUNT, Count, EndedCall, Text, UnixSeconds
from ..calls.slo import MAX_JUDGED, Judged
from ..metrics.tally import BOUNDS, Key, Tally
from .window import KEPT, MAX_SHARED_CALLS

MAX_ROW_BYTES = 256 << 10  # packed
_MAX_UNPACKED = 4 << 20
_LEVEL = 1  # most redundancy is repeated names: higher levels save little
_BUCKETS = hashlib.sha256(struct.pack(f"<{len(BOUNDS)}d", *BOUNDS)).hexdigest()[:16]

_Samples: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
_Bucket: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=len(BOUNDS))]
_Worst: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]  # inf without a token
_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Key: TypeAlias = Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=8)]
T = TypeVar("T")


class BadRow(Exception):
    """Not a message of a gateway's window; the text is why."""


class GatewayState(msgspec.Struct, frozen=True, array_like=True, tag="gateway 2"):
    """Rates are of the last whole seconds."""

    gateway: HexId
    name: Text
    version: Text
    num_running: Count
    began_per_s: _Number
    output_tokens_per_s: _Number
    is_ready: bool
    is_draining: bool


class RowKey(NamedTuple):
    """The key of a gateway's row: `row_s` seconds from `second` on."""

    gateway: HexId
    row_s: Count
    second: Count


class RowMessage(msgspec.Struct, frozen=True, array_like=True, tag="row 2"):
    """A row, which began at `unix_s` by its writer's clock.

    `histograms`: the sum of the samples, and their number by bucket. `judged`: a sample of
    `num_judged` calls.
    """

    key: RowKey
    buckets: str
    unix_s: UnixSeconds
    counts: dict[_Key, Count]
    histograms: dict[_Key, tuple[_Number, dict[_Bucket, _Samples]]]
    num_judged: Count
    judged: Annotated[list[tuple[bool, _Worst, _Worst]], msgspec.Meta(max_length=MAX_JUDGED)]
    recent: Annotated[list[EndedCall], msgspec.Meta(max_length=MAX_SHARED_CALLS)]


_encode = msgspec.msgpack.Encoder().encode
_states = msgspec.msgpack.Decoder(GatewayState)
_rows = msgspec.msgpack.Decoder(RowMessage)


def pack_state(state: GatewayState) -> bytes:
    """The inverse of `unpack_state`."""
    return zlib.compress(_encode(state), _LEVEL)


def unpack_state(packed: bytes, gateway: str) -> GatewayState:
    """The state of this gateway; raises BadRow."""
    state = _unpack(packed, _states)
    if state.gateway != gateway:
        raise BadRow("another gateway's")
    return state


def pack_row(key: RowKey, unix_s: float, row: Tally) -> bytes:
    """Omits the calls to list if the row is too large with them; b"" if it still is."""
    for recent in (row.ended, []):
        message = RowMessage(
            key=key,
            buckets=_BUCKETS,
            unix_s=unix_s,
            counts=row.counts,
            histograms={
                name: (histogram.total, histogram.counts)
                for name, histogram in row.histograms.items()
            },
            num_judged=row.judged.number,
            judged=row.judged.calls,
            recent=recent,
        )
        packed = zlib.compress(_encode(message), _LEVEL)
        if len(packed) <= MAX_ROW_BYTES:
            return packed
    return b""


def unpack_row(packed: bytes, key: RowKey) -> tuple[float, Tally]:
    """The row that was read at this key, after its begin by its writer's clock; raises BadRow."""
    message = _unpack(packed, _rows)
    if message.key != key:
        raise BadRow("another row's")
    if message.buckets != _BUCKETS:
        raise BadRow("histograms with other buckets: another version")
    if not bool(message.num_judged) <= len(message.judged) <= message.num_judged:
        raise BadRow("more calls than there were, or none of them")
    tally = Tally(judged=Judged(message.num_judged, message.judged), ended=message.recent)
    for name, number in message.counts.items():
        _check(name, is_histogram=False)
        tally.counts[name] = number
    for name, (total, counts) in message.histograms.items():
        _check(name, is_histogram=True)
        tally.histograms[name].add(counts, total)
    return message.unix_s, tally


def _unpack(packed: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    unpacking = zlib.decompressobj()
    try:
        raw = unpacking.decompress(packed, _MAX_UNPACKED)
        if not unpacking.eof:
            raise BadRow("cut off, or too large")
        return decoder.decode(raw)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRow(str(error)) from error


def _check(key: Key, *, is_histogram: bool) -> None:
    metric = KEPT.get(key[0])
    if metric is None or len(key) != 1 + len(metric.labels):
        raise BadRow(f"no metric of the window: {key[0]}")
    if bool(metric.buckets) != is_histogram:
        raise BadRow(f"not a {metric.kind}: {key[0]}")
