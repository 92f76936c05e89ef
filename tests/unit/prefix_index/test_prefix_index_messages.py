"""The index messages: what is encoded can be decoded; invalid data raises BadMessage,
nothing else.
"""

from __future__ import annotations

import msgspec
import pytest
from fakes.clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from baton.prefix_index.messages import (
    MAX_HASHES,
    MAX_MESSAGE_BYTES,
    BadMessage,
    Delta,
    Head,
    Message,
    decode,
    encode,
)
from baton.prefix_index.mirror import PrefixMirror

A = "aa" * 16
seqs = st.integers(0, 2**64 - 1)
incarnations = st.binary(min_size=16, max_size=16).map(bytes.hex)
hash_lists = st.lists(st.binary(min_size=16, max_size=16), max_size=5).map(tuple)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Head, incarnations, seqs),
    st.builds(Delta, incarnations, seqs, hash_lists, hash_lists, hash_lists),
)


@given(messages)
def test_what_is_written_can_be_read(message: Message) -> None:
    assert decode(encode(message)) == message


def test_the_layout_is_messagepack_as_documented() -> None:
    raw = encode(Delta(A, 7, (b"r" * 16,), (b"s" * 16, b"t" * 16)))
    fields = ["delta 2", A, 7, [b"r" * 16], [b"s" * 16, b"t" * 16], []]
    assert msgspec.msgpack.decode(raw) == fields


def test_a_message_without_the_host_tier_is_read() -> None:
    message = Delta(A, 7, (b"r" * 16,))
    fields = msgspec.msgpack.decode(encode(message))[:-1]
    assert decode(msgspec.msgpack.encode(fields)) == message


def test_the_fullest_message_is_within_the_limit() -> None:
    full = tuple(i.to_bytes(16, "little") for i in range(MAX_HASHES))
    assert len(encode(Delta(A, 1, full))) <= MAX_MESSAGE_BYTES


@given(st.one_of(st.binary(max_size=80), messages.map(encode)), st.data())
def test_junk_is_refused_and_never_more_than_that(raw: bytes, data: st.DataObject) -> None:
    """Also messages with a byte changed, cut short, or with trailing bytes."""
    if raw:
        position = data.draw(st.integers(0, len(raw) - 1))
        raw = raw[:position] + data.draw(st.binary(max_size=2)) + raw[position + 1 :]
    mirror = PrefixMirror(FakeClock())
    mirror.add(A, 10)
    to_read = mirror.take(raw)
    try:
        message = decode(raw)
    except BadMessage:
        assert to_read is None and mirror.counts(A) == (0, 0)
    else:
        assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"BPX1" + b"\x01" + b"\xaa" * 16 + bytes(8),  # of the previous version
        b"x" * (MAX_MESSAGE_BYTES + 1),
        encode(Head(A, 1)).replace(b"head 2", b"head 3"),
        encode(Head(A, 1)) + b"x",
        encode(Delta(A, 1, (), (b"h" * 16,)))[:-1],
        msgspec.msgpack.encode(["delta 2", A, 1, [b"h" * 15], []]),
        msgspec.msgpack.encode(["head 2", A.upper(), 1]),
        msgspec.msgpack.encode(["head 2", A, -1]),
        msgspec.msgpack.encode(["snapshot 2", A, 1, 1]),
        b"\x97" + encode(Delta(A, 1))[1:] + b"\x91" * 60_000 + b"\1",  # an extra field, nested
    ],
)
def test_examples_of_junk(raw: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(raw)
