"""The direct channel between two engines of one host: who gets one, and who does not."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.node.direct_pair import ELSEWHERE, End, Pair, asking, attach, stranger_of

from baton.core.channels import direct_question
from baton.core.channels.direct_question import TOKEN_BYTES
from baton.core.channels.framing import encode_payload
from baton.core.errors import HandoffFailed
from baton.node.channels import listener as reception
from baton.node.channels.listener import MAX_STRANGERS


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(End(), End())
    pair.source.direct.listen()
    yield pair
    pair.source.close()
    pair.puller.close()


@pytest.fixture
def joined(pair: Pair) -> Pair:
    pair.link()
    pair.greet()
    pair.settle()
    assert pair.ways() == ("direct", "direct")
    pair.source.heard.clear()
    pair.puller.heard.clear()
    return pair


def test_greeted_engines_of_one_host_speak_directly(pair: Pair) -> None:
    pair.link()
    assert not pair.say(pair.source, attach())  # so early it would go over the link
    pair.greet()
    assert not pair.puller.heard  # until it is known which way an answer will go
    pair.settle()
    assert pair.ways() == ("direct", "direct")
    (hello,) = pair.puller.heard
    assert hello.hello.incarnation == pair.source.incarnation
    for speaker, listener in ((pair.puller, pair.source), (pair.source, pair.puller)):
        listener.heard.clear()
        messages = [attach(f"{n}" * 1000) for n in range(50)]
        assert all(pair.say(speaker, message) for message in messages)
        pair.settle()
        assert listener.heard == messages
    assert not pair.source.broken and not pair.puller.broken


def test_puller_is_accepted_only_once_it_has_greeted(pair: Pair) -> None:
    pair.link()
    pair.puller.hear(pair.source, pair.source.hello(pair.puller))
    pair.settle()
    assert pair.ways() == ("asking", "asking")
    assert not pair.say(pair.source, attach())
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    pair.settle()
    assert pair.ways() == ("direct", "direct")


def test_doubled_greeting_changes_nothing(pair: Pair) -> None:
    pair.link()
    hello = pair.source.hello(pair.puller)
    pair.puller.hear(pair.source, hello)
    pair.puller.hear(pair.source, hello)
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    pair.settle()
    pair.puller.hear(pair.source, hello)
    pair.settle()
    assert pair.puller.heard == [hello, hello]
    assert pair.ways() == ("direct", "direct")


def assert_over_the_link(pair: Pair) -> None:
    pair.settle()
    assert pair.ways() == ("link", "link")
    assert [message.WhichOneof("body") for message in pair.puller.heard] == ["hello"]
    assert not pair.say(pair.source, attach()) and not pair.say(pair.puller, attach())
    assert not pair.source.broken and not pair.puller.broken


def test_other_hosts_are_not_tried(pair: Pair) -> None:
    pair.source.host_id = ELSEWHERE
    pair.link()
    pair.greet()
    assert_over_the_link(pair)


def test_nobody_listening_is_no_error() -> None:
    pair = Pair(End(), End())
    pair.link()
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    hello = pair.source.hello(pair.puller)
    assert not hello.hello.direct_token
    hello.hello.direct_token = b"t" * TOKEN_BYTES
    pair.puller.hear(pair.source, hello)
    assert_over_the_link(pair)
    pair.source.close()
    pair.puller.close()


@pytest.mark.parametrize("token", [b"", b"t" * TOKEN_BYTES, b"t" * (TOKEN_BYTES - 1)])
def test_wrong_token_is_refused(pair: Pair, token: bytes) -> None:
    pair.link()
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    hello = pair.source.hello(pair.puller)
    hello.hello.direct_token = token
    pair.puller.hear(pair.source, hello)
    assert_over_the_link(pair)


def test_token_is_of_one_link_alone(pair: Pair) -> None:
    pair.link()
    old = pair.source.hello(pair.puller)
    pair.link()
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    assert old != pair.source.hello(pair.puller)
    pair.puller.hear(pair.source, old)
    assert_over_the_link(pair)


@pytest.mark.parametrize("side", ["source", "puller"])
def test_other_users_are_refused(pair: Pair, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(connection: socket.socket) -> None:
        raise HandoffFailed("the other end belongs to user 1")

    pair.link()
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    hello = pair.source.hello(pair.puller)
    if side == "puller":
        monkeypatch.setattr(direct_question, "require_same_user", refuse)
    pair.puller.hear(pair.source, hello)
    monkeypatch.setattr(reception, "require_same_user", refuse)
    assert_over_the_link(pair)


@pytest.mark.parametrize(
    "words",
    [
        lambda pair: encode_payload(asking(pair, magic=b"BATONDR0")),
        lambda pair: encode_payload(asking(pair, source=os.urandom(16))),
        lambda pair: encode_payload(asking(pair, puller=os.urandom(16))),
        lambda pair: encode_payload(asking(pair, token=os.urandom(TOKEN_BYTES))),
        lambda pair: encode_payload(asking(pair)[:-1]),
        lambda pair: encode_payload(asking(pair) + b"!"),
        lambda pair: encode_payload(asking(pair)) * 2,
        lambda pair: encode_payload(b""),
        lambda pair: struct.pack("<I", 0xFFFFFFFF),
        lambda pair: b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["magic", "source", "puller", "token", "short", "long", "twice", "empty", "huge", "http"],
)
def test_strangers_are_turned_away(pair: Pair, words: Callable[[Pair], bytes]) -> None:
    pair.link()
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    with stranger_of(pair.source) as stranger:
        stranger.sendall(words(pair))
        pair.source.turn(1.0)
        pair.source.turn(1.0)
        assert pair.source.way(pair.puller) == "link"
        assert stranger.recv(100) == b""
    assert not pair.source.broken


def test_silent_strangers_do_not_pile_up(pair: Pair) -> None:
    strangers = [stranger_of(pair.source) for _ in range(MAX_STRANGERS // 2)]
    pair.source.turn()
    strangers += [stranger_of(pair.source) for _ in range(MAX_STRANGERS // 2 + 3)]
    pair.source.turn()
    assert [s.recv(1) for s in strangers[:3]] == [b""] * 3
    with pytest.raises(TimeoutError):
        strangers[3].settimeout(0.01)
        strangers[3].recv(1)
    pair.link()
    pair.greet()
    pair.settle()
    assert pair.ways() == ("direct", "direct")
    for stranger in strangers:
        stranger.close()


def test_who_cannot_be_taken_in_uses_the_link(pair: Pair) -> None:
    def accept() -> None:
        raise OSError(24, "too many open files")

    pair.link()
    pair.source.hear(pair.puller, pair.puller.hello(pair.source))
    hello = pair.source.hello(pair.puller)
    desk: Any = pair.source.direct._reception
    desk._listener = OutOfDescriptors(desk._listener, accept)
    pair.puller.hear(pair.source, hello)
    assert_over_the_link(pair)
    assert not pair.source.hello(pair.puller).hello.direct_token


class OutOfDescriptors:
    """A listener whose `accept` is another."""

    def __init__(self, listener: Any, accept: Callable[[], None]) -> None:
        self.fileno, self.close, self.accept = listener.fileno, listener.close, accept


def test_second_connection_with_the_same_token_is_refused(joined: Pair) -> None:
    with stranger_of(joined.source) as stranger:
        stranger.sendall(encode_payload(asking(joined)))
        joined.source.turn(1.0)
        joined.source.turn(1.0)
        assert stranger.recv(100) == b""
    assert joined.say(joined.puller, attach())
    joined.settle()
    assert joined.source.heard == [attach()]
