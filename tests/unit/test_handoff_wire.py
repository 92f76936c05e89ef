"""The wire form of the hand-off's messages: nothing is lost, and nothing malformed gets in."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from baton.core.block_hash import BlockHash
from baton.core.errors import HandoffFailed, StaleBlocks
from baton.engine.block_pool import BlockRef
from baton.kv_transfer import wire
from baton.kv_transfer.messages import (
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
REFS = st.builds(
    BlockRef,
    UINT32,
    UINT32,
    st.integers(0, 2**64 - 1),
    st.none() | st.binary(min_size=16, max_size=16).map(BlockHash),
)
MESSAGES = st.one_of(
    st.builds(Hello, IDS, st.dictionaries(st.text(max_size=9), st.text(max_size=9)), UINT32),
    st.builds(Attach, IDS),
    st.builds(Renew, st.lists(IDS, max_size=5).map(tuple)),
    st.builds(Release, IDS),
    st.builds(CancelTransfer, IDS),
    st.builds(
        Manifest,
        IDS,
        UINT32,
        st.lists(REFS, max_size=5).map(tuple),
        UINT32,
        st.integers(0, 3600).map(float),
        st.none() | st.builds(HandoffState, UINT32, UINT32),
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


def _blocks(count: int) -> list[pb.BlockRef]:
    return [pb.BlockRef()] * count


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
        pb.PeerMessage(manifest=pb.Manifest(blocks=[])),
        pb.PeerMessage(manifest=pb.Manifest(transfer_id=ID, blocks=_blocks(wire.MAX_BLOCKS + 1))),
        pb.PeerMessage(manifest=pb.Manifest(transfer_id=ID, blocks=[pb.BlockRef(hash=b"short")])),
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
