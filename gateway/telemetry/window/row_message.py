"""What gateways share of their windows, on the wire: MessagePack, packed by zlib, and the check
that keeps junk out. Whatever else comes raises BadRow and nothing else.

    GatewayState   how one is now, and up to which second its rows are there to be read
    RowMessage     one row of one gateway: counts, histograms, calls to judge, calls to list
Seconds are of a clock that all gateways share (Redis' own); buckets are those of metrics/tally.py,
so only gateways with equal buckets add theirs up.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from ....core.membership import HexId
from ..calls.call_record import EndedCall, Text, UnixSeconds
from ..calls.slo import MAX_JUDGED, Judged
from ..metrics.tally import BOUNDS, Histogram, Key, Tally
from .window import KEPT, MAX_SHARED_CALLS

MAX_ROW_BYTES = 256 << 10  # packed
_MAX_UNPACKED = 4 << 20
_LEVEL = 1  # what is repeated are names: more effort saves little
_MAX_COUNT = 1 << 53
_MAX_S = 1e9  # what a float32 of seconds is cut at
_JUDGED = struct.Struct("<2f")
_BUCKETS = hashlib.sha256(struct.pack(f"<{len(BOUNDS)}d", *BOUNDS)).hexdigest()[:16]

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
_Second: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Key: TypeAlias = Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=8)]
T = TypeVar("T")


class BadRow(Exception):
    """This is no message of a gateway's window; the text is why."""


class GatewayState(msgspec.Struct, frozen=True, array_like=True, tag="gateway 1"):
    """`through`: the last second whose rows were written; rates are of its last whole seconds."""

    gateway: HexId
    name: Text
    version: Text
    through: _Second
    num_running: _Count
    began_per_s: _Number
    output_tokens_per_s: _Number
    is_ready: bool
    is_draining: bool


class RowMessage(msgspec.Struct, frozen=True, array_like=True, tag="row 1"):
    """A row of `row_s` seconds from `second` on, which began at `unix_s` by its writer's clock.

    `histograms`: key, sum of the samples, and (bucket - the bucket before, samples) flat. `judged`:
    float32 pairs of TTFT and longest gap; an endless TTFT is a call that did not finish.
    """

    gateway: HexId
    buckets: str
    row_s: _Second
    second: _Second
    unix_s: UnixSeconds
    counts: list[tuple[_Key, _Count]]
    histograms: list[tuple[_Key, _Number, list[_Count]]]
    num_judged: _Count
    judged: Annotated[bytes, msgspec.Meta(max_length=8 * MAX_JUDGED)]
    recent: Annotated[list[EndedCall], msgspec.Meta(max_length=MAX_SHARED_CALLS)]


_encode = msgspec.msgpack.Encoder().encode
_states = msgspec.msgpack.Decoder(GatewayState)
_rows = msgspec.msgpack.Decoder(RowMessage)


def pack_state(state: GatewayState) -> bytes:
    """For `unpack_state`."""
    return zlib.compress(_encode(state), _LEVEL)


def unpack_state(packed: bytes) -> GatewayState:
    """Raises BadRow."""
    return _unpack(packed, _states)


def pack_row(gateway: str, row_s: int, second: int, unix_s: float, row: Tally) -> bytes:
    """Without its calls to list where it would be too large with them; empty if it is anyway."""
    for recent in (row.ended, []):
        message = RowMessage(
            gateway=gateway,
            buckets=_BUCKETS,
            row_s=row_s,
            second=second,
            unix_s=unix_s,
            counts=list(row.counts.items()),
            histograms=[
                (key, histogram.total, _deltas(histogram))
                for key, histogram in row.histograms.items()
            ],
            num_judged=row.judged.number,
            judged=_judged_bytes(row.judged),
            recent=recent,
        )
        packed = zlib.compress(_encode(message), _LEVEL)
        if len(packed) <= MAX_ROW_BYTES:
            return packed
    return b""


def unpack_row(packed: bytes, gateway: str, row_s: int, second: int) -> tuple[RowMessage, Tally]:
    """What lies where this gateway's row should; raises BadRow."""
    message = _unpack(packed, _rows)
    if (message.gateway, message.row_s, message.second) != (gateway, row_s, second):
        raise BadRow("another row's")
    if message.buckets != _BUCKETS:
        raise BadRow("histograms with other buckets: another version")
    tally = Tally()
    for key, number in message.counts:
        _check(key, is_histogram=False)
        tally.counts[key] += number
    for key, total, deltas in message.histograms:
        _check(key, is_histogram=True)
        tally.histograms[key].add(_counts(deltas), total)
    tally.judged = _judged_of(message)
    return message, tally


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


def _deltas(histogram: Histogram) -> list[int]:
    buckets = sorted(histogram.counts)
    steps = [after - before for before, after in pairwise([0, *buckets])]
    return [n for step, bucket in zip(steps, buckets, strict=True)
            for n in (step, histogram.counts[bucket])]  # fmt: skip


def _counts(deltas: Sequence[int]) -> dict[int, int]:
    """Raises BadRow where a bucket does not exist."""
    counts: dict[int, int] = {}
    bucket = 0
    if len(deltas) % 2:
        raise BadRow("a bucket without its samples")
    for step, number in zip(deltas[::2], deltas[1::2], strict=True):
        bucket += step
        if not number or bucket > len(BOUNDS) or bucket in counts:
            raise BadRow("a bucket that cannot be")
        counts[bucket] = number
    return counts


def _judged_bytes(judged: Judged) -> bytes:
    return b"".join(
        _JUDGED.pack(min(ttft_s, _MAX_S) if finished else inf, min(gap_s, _MAX_S))
        for finished, ttft_s, gap_s in judged.calls
    )


def _judged_of(message: RowMessage) -> Judged:
    if len(message.judged) % _JUDGED.size or bool(message.judged) != bool(message.num_judged):
        raise BadRow("calls that cannot be judged")
    pairs = _JUDGED.iter_unpack(message.judged)
    calls = [(ttft_s != inf, ttft_s, gap_s) for ttft_s, gap_s in pairs]
    if len(calls) > message.num_judged:
        raise BadRow("more calls than there were")
    return Judged(message.num_judged, calls)
