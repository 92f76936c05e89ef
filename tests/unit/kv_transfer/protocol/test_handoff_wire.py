"""The wire form of the hand-off's messages: nothing is lost, and nothing malformed gets in."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import HandoffFailed, StaleBlocks
from baton.core.request.token_ids import BlockHash
from baton.engine.kv.block_pool import BlockRef
from baton.kv_transfer.protocol import wire
from baton.kv_transfer.protocol.messages import (
    Attach,
    CancelTransfer,
    HandoffState,
    Hello,
    Manifest,
    Message,
    Release,
    Renew,
    Revoked,
)
from baton.proto.v1 import common_pb2
from baton.proto.v1 import handoff_pb2 as pb

ID = "0123456789abcdef" * 2
IDS = st.text("0123456789abcdef", min_size=32, max_size=32)
UINT32 = st.integers(0, 2**32 - 1)
HASHES = st.binary(min_size=16, max_size=16).map(BlockHash)


@st.composite
def refs(draw: st.DrawFn) -> tuple[BlockRef, ...]:
    """Blocks that follow each other; the last one may be partial."""
    first = draw(st.integers(0, wire.MAX_BLOCKS))
    hashes: list[BlockHash | None] = [*draw(st.lists(HASHES, max_size=5))]
    hashes += [None] * draw(st.integers(0, 1))
    return tuple(
        BlockRef(index, draw(UINT32), draw(st.integers(0, 2**64 - 1)), block_hash)
        for index, block_hash in enumerate(hashes, start=first)
    )


MESSAGES = st.one_of(
    st.builds(Hello, IDS, st.dictionaries(st.text(max_size=9), st.text(max_size=9)), UINT32),
    st.builds(Attach, IDS, st.booleans()),
    st.builds(Renew, st.lists(IDS, max_size=5).map(tuple)),
    st.builds(Release, IDS),
    st.builds(CancelTransfer, IDS),
    st.builds(
        Manifest,
        IDS,
        UINT32,
        refs(),
        UINT32,
        st.integers(0, 3600).map(float),
        st.none() | st.builds(HandoffState, UINT32, UINT32),
        st.integers(0, 2**64 - 1),
    ),
    st.builds(Revoked, IDS, st.just(StaleBlocks("why"))),
)


@given(message=MESSAGES)
def test_every_message_survives_the_wire(message: Message) -> None:
    packed = wire.to_wire(message).SerializeToString()
    assert wire.from_wire(pb.PeerMessage.FromString(packed)) == message


def test_an_error_keeps_its_class_and_words() -> None:
    message = wire.from_wire(wire.to_wire(Revoked(ID, StaleBlocks("block 7"))))
    assert isinstance(message, Revoked)
    assert type(message.error) is StaleBlocks
    assert message.error.message == "block 7"


def test_our_own_long_errors_are_cut_to_what_a_peer_accepts() -> None:
    message = wire.from_wire(wire.to_wire(Revoked(ID, StaleBlocks("x" * 100_000))))
    assert isinstance(message, Revoked)
    assert len(message.error.message) == wire.MAX_TEXT_CHARS


def _blocks(
    count: int, *, first: int = 0, num_hashes: int | None = None, cut: int = 0
) -> pb.PeerMessage:
    """A manifest of that many blocks, and what may be wrong with it."""
    manifest = pb.Manifest(
        transfer_id=ID,
        first_index=first,
        block_ids=b"b" * (4 * count - cut),
        generations=b"g" * 8 * count,
        hashes=b"h" * 16 * (count if num_hashes is None else num_hashes),
    )
    return pb.PeerMessage(manifest=manifest)


def test_manifest_may_have_all_blocks_that_are_allowed() -> None:
    for message in (_blocks(wire.MAX_BLOCKS), _blocks(0), _blocks(1, num_hashes=0)):
        assert isinstance(wire.from_wire(message), Manifest)


@pytest.mark.parametrize(
    "malformed",
    [
        pb.PeerMessage(),
        pb.PeerMessage(attach=pb.Attach()),
        pb.PeerMessage(attach=pb.Attach(transfer_id=ID.upper())),
        pb.PeerMessage(release=pb.Release(transfer_id=ID[:-1])),
        pb.PeerMessage(cancel=pb.CancelTransfer(transfer_id=ID + "\n")),
        pb.PeerMessage(renew=pb.Renew(transfer_ids=[ID, "../../etc/passwd"])),
        pb.PeerMessage(renew=pb.Renew(transfer_ids=[ID] * (wire.MAX_RENEWALS + 1))),
        pb.PeerMessage(hello=pb.Hello(incarnation="localhost")),
        pb.PeerMessage(hello=pb.Hello(incarnation=ID, fingerprint={str(i): "" for i in range(65)})),
        pb.PeerMessage(hello=pb.Hello(incarnation=ID, fingerprint={"model": "m" * 2000})),
        pb.PeerMessage(manifest=pb.Manifest()),
        _blocks(wire.MAX_BLOCKS + 1),
        _blocks(1, first=wire.MAX_BLOCKS + 1),
        _blocks(3, num_hashes=1),
        _blocks(3, num_hashes=4),
        _blocks(0, num_hashes=1),
        _blocks(3, cut=1),
        _blocks(3, cut=4),
        pb.PeerMessage(manifest=pb.Manifest(transfer_id=ID, block_ids=b"b" * 4, hashes=b"h" * 16)),
        pb.PeerMessage(manifest=pb.Manifest(transfer_id=ID, hashes=b"short")),
        pb.PeerMessage(manifest=pb.Manifest(transfer_id=ID, lease_remaining_us=2**63)),
        pb.PeerMessage(
            revoked=pb.Revoked(transfer_id=ID, error=common_pb2.Error(message="x" * 2000))
        ),
    ],
)
def test_what_no_sane_peer_sends_is_a_typed_error(malformed: pb.PeerMessage) -> None:
    with pytest.raises(HandoffFailed):
        wire.from_wire(malformed)


@given(noise=st.binary(max_size=200))
def test_noise_is_a_typed_error_or_a_message(noise: bytes) -> None:
    with contextlib.suppress(HandoffFailed, DecodeError):
        wire.from_wire(pb.PeerMessage.FromString(noise))


@given(message=MESSAGES, data=st.data())
def test_a_flipped_byte_is_a_typed_error_or_a_message(
    message: Message, data: st.DataObject
) -> None:
    packed = bytearray(wire.to_wire(message).SerializeToString())
    position = data.draw(st.integers(0, len(packed) - 1))
    packed[position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(HandoffFailed, DecodeError):
        wire.from_wire(pb.PeerMessage.FromString(bytes(packed)))
