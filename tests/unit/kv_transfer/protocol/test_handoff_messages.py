"""The hand-off's messages as bytes: nothing is lost, and malformed messages are rejected."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.channels.addresses import HOST_ID_BYTES
from baton.core.errors import BatonError, HandoffFailed, InvalidRequest, StaleBlocks
from baton.core.request.token_ids import BlockHash
from baton.engine.execution.batch import SampledToken
from baton.engine.kv.block_pool import BlockRefs
from baton.kernels.sampling.top_logprobs import Candidate
from baton.kv_transfer.protocol.messages import (
    MAX_BLOCKS,
    MAX_CANDIDATES,
    MAX_RENEWALS,
    MAX_TEXT_CHARS,
    Attach,
    HandoffState,
    Hello,
    Manifest,
    Message,
    Refused,
    Release,
    Renew,
    Revoked,
    decode,
    encode,
)
from baton.kv_transfer.window.network_address import KEY_BYTES, PoolAccess

ID = "0123456789abcdef" * 2
IDS = st.text("0123456789abcdef", min_size=32, max_size=32)
UINT32 = st.integers(0, 2**32 - 1)
HASHES = st.binary(min_size=16, max_size=16).map(BlockHash)


@st.composite
def refs(draw: st.DrawFn) -> BlockRefs:
    """Consecutive blocks, the last of which may be partial."""
    hashes = draw(st.lists(HASHES, max_size=5))
    num_blocks = len(hashes) + draw(st.integers(0, 1))
    ids, generations = (
        draw(st.lists(each, min_size=num_blocks, max_size=num_blocks))
        for each in (UINT32, st.integers(0, 2**64 - 1))
    )
    return BlockRefs.pack(ids, generations, hashes)


MESSAGES = st.one_of(
    st.builds(Hello, IDS, st.dictionaries(st.text(max_size=9), st.text(max_size=9)), UINT32),
    st.builds(Attach, IDS, st.booleans()),
    st.builds(Renew, st.lists(IDS, max_size=5).map(tuple)),
    st.builds(Release, IDS),
    st.builds(
        Manifest,
        IDS,
        UINT32,
        refs(),
        st.integers(0, 3600).map(float),
        st.none() | st.builds(HandoffState, UINT32),
        st.integers(0, 2**64 - 1),
    ),
    st.builds(Revoked, IDS, st.just(StaleBlocks("why"))),
)


@given(message=MESSAGES)
def test_every_message_survives_the_wire(message: Message) -> None:
    found = decode(encode(message))
    assert type(found) is type(message) and encode(found) == encode(message)


def test_what_beams_begin_with_survives_the_wire() -> None:
    first = SampledToken(7, -0.5, ((7, -0.5), (8, -1.5)), candidates=(Candidate(7, -0.25, -0.5),))
    message = Manifest(ID, 0, BlockRefs(), 1.0, HandoffState(first=first))
    assert decode(encode(message)) == message


@pytest.mark.parametrize("error", [StaleBlocks("block 7"), InvalidRequest("no", param="top_k")])
def test_an_error_keeps_its_class_and_words(error: BatonError) -> None:
    for message in (decode(encode(Revoked(ID, error))), decode(encode(Refused(error)))):
        assert isinstance(message, Revoked | Refused)
        assert type(message.error) is type(error)
        assert (message.error.message, message.error.param) == (error.message, error.param)


def test_our_own_long_errors_are_cut_to_what_a_peer_accepts() -> None:
    message = decode(encode(Revoked(ID, StaleBlocks("x" * 100_000))))
    assert isinstance(message, Revoked)
    assert len(message.error.message) == MAX_TEXT_CHARS


def test_a_key_is_not_logged() -> None:
    access = PoolAccess(bytes(HOST_ID_BYTES), 1, b"secret" + bytes(KEY_BYTES - 6))
    message = Hello(ID, {}, access=access)
    assert decode(encode(message)) == message and "secret" not in repr(message)


HASH = b"h" * 16
ONE = {"packed_ids": bytes(4), "packed_generations": bytes(8), "hashes": HASH}


def attach(**body: Any) -> dict[str, Any]:
    return {"type": "Attach", "transfer_id": ID} | body


def manifest(**body: Any) -> dict[str, Any]:
    least = {"seq": 0, "blocks": {}, "lease_remaining_s": 1.0}
    return {"type": "Manifest", "transfer_id": ID} | least | body


def hello(**body: Any) -> dict[str, Any]:
    return {"type": "Hello", "incarnation": ID, "fingerprint": {}} | body


def beams(*candidates: tuple[object, ...]) -> dict[str, Any]:
    return manifest(state={"first": [7, 0.0, [], [], [], candidates]})


@pytest.mark.parametrize(
    "well_formed",
    [
        attach(block_hashes=[HASH]),
        manifest(blocks=ONE),
        manifest(blocks={name: column * MAX_BLOCKS for name, column in ONE.items()}),
        hello(fingerprint={str(i): "" for i in range(64)}),
        hello(of_a_later_version=1),
        beams((7, 0.0, 0.0)),
        {"type": "Renew", "transfer_ids": [ID] * MAX_RENEWALS},
    ],
    ids=range(7),
)
def test_what_sane_peers_send_is_a_message(well_formed: dict[str, Any]) -> None:
    decode(msgspec.msgpack.encode(well_formed))


@pytest.mark.parametrize(
    "malformed",
    [
        {},
        {"type": "Farewell"},
        [],
        {"type": "Attach"},
        attach(transfer_id=ID.upper()),
        attach(block_hashes=[b"short"]),
        {"type": "Release", "transfer_id": ID[:-1]},
        {"type": "Release", "transfer_id": ID + "\n"},
        {"type": "Renew", "transfer_ids": [ID, "../../etc/passwd"]},
        {"type": "Renew", "transfer_ids": [ID] * (MAX_RENEWALS + 1)},
        hello(incarnation="localhost"),
        hello(fingerprint={str(i): "" for i in range(65)}),
        hello(fingerprint={"model": "m" * 2000}),
        hello(access={"host_id": b"", "port": 1, "key": bytes(KEY_BYTES)}),
        hello(access={"host_id": bytes(HOST_ID_BYTES), "port": 65_536, "key": bytes(KEY_BYTES)}),
        manifest(transfer_id=""),
        manifest(seq=-1),
        manifest(blocks={name: column * (MAX_BLOCKS + 1) for name, column in ONE.items()}),
        manifest(blocks=ONE | {"packed_ids": bytes(5)}),
        manifest(blocks=ONE | {"packed_ids": bytes(8)}),
        manifest(blocks=ONE | {"packed_generations": bytes(7)}),
        manifest(blocks=ONE | {"packed_generations": bytes(16)}),
        manifest(blocks=ONE | {"hashes": HASH[1:]}),
        manifest(blocks=ONE | {"hashes": 2 * HASH}),
        manifest(blocks=ONE | {"hashes": "text"}),
        manifest(blocks=[(0, 1, 2, HASH)]),
        manifest(lease_remaining_s=3601.0),
        manifest(lease_remaining_s=-1.0),
        manifest(lease_remaining_s=math.nan),
        manifest(state=[]),
        manifest(state={"fork_token_ids": [1] * 65}),
        beams(),
        beams(*[(7, 0.0, 0.0)] * (MAX_CANDIDATES + 1)),
        beams((7, math.nan, 0.0)),
        beams((7, 0.0)),
        {"type": "Revoked", "transfer_id": ID, "error": "text"},
        {"type": "Revoked", "transfer_id": ID, "error": ["internal", "x" * 2000, None]},
    ],
)  # fmt: skip
def test_what_no_sane_peer_sends_is_a_typed_error(malformed: object) -> None:
    with pytest.raises(HandoffFailed):
        decode(msgspec.msgpack.encode(malformed))


def test_what_a_peer_sent_is_not_all_told() -> None:
    with pytest.raises(HandoffFailed) as refused:
        decode(msgspec.msgpack.encode({"type": "x" * 1_000_000}))
    assert len(refused.value.message) <= MAX_TEXT_CHARS


def test_a_nest_without_end_is_a_typed_error() -> None:
    with pytest.raises(HandoffFailed):
        decode(b"\x91" * 1_000_000)


@given(noise=st.binary(max_size=200))
def test_noise_is_a_typed_error_or_a_message(noise: bytes) -> None:
    with contextlib.suppress(HandoffFailed):
        decode(noise)


@given(message=MESSAGES, data=st.data())
def test_a_flipped_byte_is_a_typed_error_or_a_message(
    message: Message, data: st.DataObject
) -> None:
    packed = bytearray(encode(message))
    position = data.draw(st.integers(0, len(packed) - 1))
    packed[position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(HandoffFailed):
        decode(bytes(packed))
