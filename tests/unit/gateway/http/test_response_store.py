"""Conversations stored by response id: bounded in bytes, fair between tenants, with expiry."""

from __future__ import annotations

import time

import pytest
from fakes.clock import FakeClock
from patience import AT_ONCE_S

from baton.core.errors import ResponseNotFound
from baton.gateway.http.turns.response_input import joined
from baton.gateway.http.turns.response_store import ResponseStore


def messages_of(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def is_kept(store: ResponseStore, tenant: str, name: str) -> bool:
    try:
        store.messages(tenant, name)
    except ResponseNotFound:
        return False
    return True


def test_conversations_are_their_tenants_own() -> None:
    store = ResponseStore(FakeClock(), 1 << 20, 60)
    store.put("a", "r", messages_of("é"), b"{}")
    assert store.messages("a", "r") == messages_of("é")
    assert store.body("a", "r") == b"{}"
    with pytest.raises(ResponseNotFound) as foreign:
        store.messages("b", "r")
    with pytest.raises(ResponseNotFound) as unknown:
        store.messages("b", "s")
    assert str(foreign.value).replace("'r'", "") == str(unknown.value).replace("'s'", "")
    assert (foreign.value.http_status, foreign.value.param) == (404, "previous_response_id")


def test_they_expire() -> None:
    clock = FakeClock()
    store = ResponseStore(clock, 1 << 20, 60)
    store.put("a", "1", messages_of("x"), b"")
    clock.advance(40)
    store.put("a", "2", messages_of("x"), b"")
    store.put("b", "3", messages_of("x"), b"")
    clock.advance(20)
    assert [is_kept(store, t, n) for t, n in (("a", "1"), ("a", "2"), ("b", "3"))] == [
        False, True, True,
    ]  # fmt: skip
    clock.advance(40)
    assert not is_kept(store, "a", "2")
    assert store.num_bytes == 0


def test_who_has_most_makes_room() -> None:
    store = ResponseStore(FakeClock(), 10_000, 60)
    store.put("small", "s", messages_of("x"), b"")
    for i in range(100):
        store.put("large", f"l{i}", messages_of("x" * 1000), b"")
        assert store.num_bytes <= 10_000
    assert is_kept(store, "small", "s")
    assert is_kept(store, "large", "l99") and not is_kept(store, "large", "l0")
    store.put("small", "huge", messages_of("x" * 20_000), b"")
    assert not is_kept(store, "small", "huge")
    assert is_kept(store, "small", "s") and is_kept(store, "large", "l99")


def test_what_is_deleted_is_gone_alone() -> None:
    store = ResponseStore(FakeClock(), 1 << 20, 60)
    store.put("a", "1", messages_of("x"), b"one")
    store.put("a", "2", messages_of("x"), b"two")
    for name in ("1", "3"):
        with pytest.raises(ResponseNotFound):
            store.delete("b", name)
    store.delete("a", "1")
    assert not is_kept(store, "a", "1") and store.body("a", "2") == b"two"
    store.delete("a", "2")
    assert store.num_bytes == 0
    with pytest.raises(ResponseNotFound):
        store.delete("a", "2")


def test_bodies_count_for_the_bound() -> None:
    store = ResponseStore(FakeClock(), 10_000, 60)
    store.put("a", "1", messages_of("x"), b"x" * 6000)
    store.put("a", "2", messages_of("x"), b"x" * 6000)
    assert not is_kept(store, "a", "1") and is_kept(store, "a", "2")
    assert 6000 < store.num_bytes <= 10_000


def test_none_is_kept_where_there_is_no_room() -> None:
    store = ResponseStore(FakeClock(), 0, 60)
    store.put("a", "r", [], b"")
    assert not is_kept(store, "a", "r") and store.num_bytes == 0


def test_messages_in_a_row_are_joined() -> None:
    def of(role: str, content: str, **more: object) -> dict[str, object]:
        return {"role": role, "content": content, **more}

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    assert joined(
        [
            of("system", "a"), of("system", "b"), of("user", "c"), of("user", "d"),
            of("assistant", "", reasoning_content="e"), of("assistant", "f"),
            of("assistant", "", tool_calls=[call]), of("assistant", "", tool_calls=[call]),
            of("system", "g"), of("system", "h"),
        ]
    ) == [
        of("system", "a\n\nb"), of("user", "c"), of("user", "d"),
        of("assistant", "f", reasoning_content="e", tool_calls=[call, call]),
        of("system", "g"), of("system", "h"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "😀" + "d" * 900},
        {"role": "assistant", "content": "", "reasoning_content": "😀" + "d" * 900},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "system", "content": "d"},
    ],
)
def test_a_long_row_of_messages_is_joined_at_once(message: dict[str, object]) -> None:
    """A chain of the greatest length is joined in linear time, without a copy per message."""
    began_s = time.thread_time()
    (whole,) = joined([message] * 4096)
    assert time.thread_time() - began_s < AT_ONCE_S / 5
    assert "tool_calls" not in message or whole["tool_calls"] == [{"id": "1"}] * 4096
