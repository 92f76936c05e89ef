"""API keys: the contents of a key file, a caller's credentials, a browser's session."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.secret import ClusterSecret, operator_key, session_key
from baton.core.config import ClusterConfig, GatewayConfig
from baton.core.errors import ModelNotFound, PermissionDenied, StartupFailed, Unauthenticated
from baton.gateway.security.accepted_keys import MAX_CREDENTIAL_CHARS, AcceptedKeys
from baton.gateway.security.browser_sessions import SESSION_S, BrowserSessions
from baton.gateway.security.caller import ADMIN, INFER, METRICS, Caller, Limits, anyone
from baton.gateway.security.key_file import BadKeyFile, KeyRing, add_key, load_keys, parse_keys
from baton.gateway.security.security import Security

ALL = frozenset({INFER, METRICS, ADMIN})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def accepted_in(path: Path, secret: str | None = None) -> AcceptedKeys:
    return AcceptedKeys(KeyRing(path), ClusterSecret(secret))


def test_a_key_is_shown_once_and_filed_as_its_hash(path: Path) -> None:
    key = add_key(path, "acme", frozenset({INFER}), limits={"requests_per_minute": 60})
    text = path.read_text()
    assert key not in text and key[3:] not in text
    assert hashlib.sha256(key.encode()).hexdigest() in text
    assert len(key) >= 3 + 43, "256 bits in base64"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not [p for p in path.parent.iterdir() if p != path], "no half-written file is left"
    (found,) = load_keys(path)
    assert found.caller.limits == Limits(requests_per_minute=60)


def test_another_key_keeps_what_is_there_and_may_change_the_tenant(path: Path) -> None:
    first = add_key(path, "acme", frozenset({INFER}), limits={"tokens_per_minute": 9})
    add_key(path, "globex", frozenset({METRICS}))
    add_key(path, "acme", frozenset({ADMIN}), models=frozenset({"demo"}))
    assert [k.caller.tenant for k in load_keys(path)] == ["acme", "globex", "acme"]
    caller = accepted_in(path).caller([f"Bearer {first}"], "http")
    assert replace(caller, caller_id=0) == Caller(
        "acme", frozenset({INFER}), "http", frozenset({"demo"}), Limits(tokens_per_minute=9)
    )


def test_who_may_read_the_file_still_may_behind_another_key(path: Path) -> None:
    add_key(path, "acme", ALL)
    path.chmod(0o640)
    add_key(path, "acme", ALL)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("tenant", "scopes", "limits"),
    [("a b", {INFER}, {}), ("", {INFER}, {}), ("a", {"root"}, {}), ("a", {INFER}, {"x": 1})],
)
def test_what_a_gateway_would_refuse_is_not_written(
    path: Path, tenant: str, scopes: set[str], limits: dict[str, int]
) -> None:
    with pytest.raises(StartupFailed):
        add_key(path, tenant, frozenset(scopes), limits=limits)
    assert not path.exists()


GOOD = {
    "tenants": {"acme": {"requests_per_minute": 1}},
    "keys": [{"id": "x", "sha256": "0" * 64, "tenant": "acme", "scopes": ["infer"]}],
}


def changed(where: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    document: Any = json.loads(json.dumps(GOOD))
    at = document
    for step in where[:-1]:
        at = at[step]
    at[where[-1]] = value
    return document  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "document",
    [
        [], None, {}, {"tenants": {}}, {"tenants": [], "keys": []},
        changed(("more",), 1), changed(("keys",), {}), changed(("keys", 0), 7),
        changed(("keys", 0, "sha256"), "0" * 63), changed(("keys", 0, "sha256"), "G" * 64),
        changed(("keys", 0, "tenant"), "nobody"), changed(("keys", 0, "scopes"), "infer"),
        changed(("keys", 0, "scopes"), ["everything"]), changed(("keys", 0, "plain"), "bk-1"),
        changed(("tenants", "acme", "requests_per_minute"), 0),
        changed(("tenants", "acme", "requests_per_minute"), True),
        changed(("tenants", "acme", "requests_per_second"), 1),
        changed(("tenants", "acme", "models"), "demo"), changed(("tenants", "@operator"), {}),
    ],
)  # fmt: skip
def test_a_file_that_says_something_else_is_refused(document: Any) -> None:
    parse_keys(json.dumps(GOOD).encode())
    with pytest.raises(BadKeyFile):
        parse_keys(json.dumps(document).encode())


@given(st.binary(max_size=200))
def test_junk_is_a_bad_file_and_nothing_else(raw: bytes) -> None:
    with pytest.raises(BadKeyFile):
        parse_keys(raw)


def test_a_file_that_others_may_write_to_is_refused(path: Path) -> None:
    add_key(path, "acme", ALL)
    path.chmod(0o620)
    with pytest.raises(StartupFailed, match="others"):
        KeyRing(path)
    with pytest.raises(StartupFailed, match="No such file"):
        KeyRing(path.with_name("missing"))


def test_what_a_caller_may_show(path: Path) -> None:
    key = add_key(path, "acme", frozenset({INFER}))
    accepted = accepted_in(path)
    for good in (f"Bearer {key}", f"bearer {key}", f"BEARER  {key}"):
        assert accepted.caller([good], "grpc").tenant == "acme"
    bad: list[list[str | bytes]] = [
        [], [""], ["Bearer"], ["Bearer "], [f"Basic {key}"], [key], [f"Bearer {key}"] * 2,
        [f"Bearer {key[:-1]}"], [f"Bearer {key}x"], [f"Bearer {key.swapcase()}"],
        ["Bearer \udcff"], [f"Bearer {key}".encode()], [f"Bearer {'k' * MAX_CREDENTIAL_CHARS}"],
        ["Bearer " + "k" * 2**20],
    ]  # fmt: skip
    for shown in bad:
        with pytest.raises(Unauthenticated) as raised:
            accepted.caller(shown, "grpc")
        assert key[:12] not in raised.value.message


def test_every_entry_is_compared_whichever_fits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All entries are compared, so that timing does not show whether, or where, a key is in the
    file."""
    keys = [add_key(path, "acme", ALL) for _ in range(5)]
    accepted, compared = accepted_in(path), []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return a == b

    monkeypatch.setattr("baton.gateway.security.accepted_keys.hmac.compare_digest", compare)
    for key in (keys[0], keys[4], "bk-wrong"):
        compared.clear()
        try:
            accepted.key(key)
        except Unauthenticated:
            assert key == "bk-wrong"
        assert len(compared) == 5


def test_queues_tell_callers_apart_by_key_or_else_by_connection(path: Path) -> None:
    first, second = (f"Bearer {add_key(path, 'acme', frozenset({INFER}))}" for _ in range(2))
    gateways = accepted_in(path), accepted_in(path)
    ids = [accepted.caller([first], "grpc").caller_id for accepted in gateways]
    assert len(set(ids)) == 1
    assert gateways[0].caller([second], "grpc").caller_id not in ids
    found = [anyone("grpc", connection).caller_id for connection in ("a", "b", "a")]
    assert found[0] == found[2] != found[1]
    assert all(0 <= caller_id < 1 << 64 for caller_id in (*ids, *found))


def test_a_changed_file_counts_at_once_and_a_broken_one_not_at_all(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = add_key(path, "acme", ALL)
    accepted = accepted_in(path)
    new = add_key(path, "globex", ALL)
    assert accepted.key(new).caller.tenant == "globex"
    path.write_text("{")
    assert accepted.key(old).caller.tenant == "acme"
    assert accepted.key(new).caller.tenant == "globex"
    assert [r.levelname for r in caplog.records].count("ERROR") == 1, "said once"
    path.unlink()
    assert accepted.key(old), "a file that is being replaced is not an empty one"
    path.write_text('{"tenants": {}, "keys": []}')
    with pytest.raises(Unauthenticated):
        accepted.key(old)


def test_a_file_that_is_put_right_counts_at_once(path: Path) -> None:
    """A file whose permissions are corrected is read again at once, though neither its content nor
    its mtime has changed."""
    old = add_key(path, "acme", ALL)
    accepted = accepted_in(path)
    new = add_key(path, "globex", ALL)
    path.chmod(0o664)
    with pytest.raises(Unauthenticated):
        accepted.key(new)
    path.chmod(0o600)
    assert accepted.key(old) and accepted.key(new)


def test_who_knows_the_cluster_secret_may_look_and_administer_but_not_infer(path: Path) -> None:
    add_key(path, "acme", ALL)
    caller = accepted_in(path, "secret").caller([f"Bearer {operator_key('secret')}"], "grpc")
    assert caller.scopes == {METRICS, ADMIN}
    assert caller.tenant not in {"", "acme"}
    with pytest.raises(Unauthenticated):
        accepted_in(path, "secret").key(operator_key("other"))
    with pytest.raises(Unauthenticated):
        accepted_in(path, None).key(operator_key(""))


def test_scopes_and_models_of_a_caller() -> None:
    caller = Caller("acme", frozenset({INFER}), "http", frozenset({"small"}))
    caller.check_scope(INFER)
    with pytest.raises(PermissionDenied, match="admin"):
        caller.check_scope(ADMIN)
    caller.check_model("", "small")
    with pytest.raises(ModelNotFound, match=r"The model `demo` does not exist\."):
        caller.check_model("demo", "demo")
    with pytest.raises(ModelNotFound) as raised:
        caller.check_model("", "secret-model")
    assert "secret-model" not in raised.value.message
    caller.check_model("small", "base", {"small", "other"})
    with pytest.raises(ModelNotFound):
        caller.check_model("other", "small", {"other"})


@pytest.mark.parametrize("name", ["other", "../../etc", "x" * 300])
def test_a_model_that_is_not_served_is_nobodys(name: str) -> None:
    with pytest.raises(ModelNotFound) as raised:
        anyone("grpc").check_model(name, "demo", {"sql"})
    assert raised.value.param == "model" and len(raised.value.message) < 100


# --- browsers -------------------------------------------------------------------------------------


def test_a_session_reads_until_its_time_or_its_key_ends(path: Path) -> None:
    key = add_key(path, "acme", ALL)
    clock = FakeClock()
    sessions = BrowserSessions(accepted_in(path), clock)
    cookie = sessions.open(key)
    assert key not in cookie
    assert sessions.caller(cookie).scopes == {METRICS}, "whatever the key may do"
    clock.advance(SESSION_S - 1)
    assert sessions.caller(cookie).tenant == "acme"
    clock.advance(1)
    with pytest.raises(Unauthenticated):
        sessions.caller(cookie)
    cookie = sessions.open(key)
    path.write_text('{"tenants": {}, "keys": []}')
    os.chmod(path, 0o600)
    with pytest.raises(Unauthenticated):
        sessions.caller(cookie)


@pytest.mark.parametrize(
    ("secret", "shares_port", "holds"),
    [("s" * 16, True, True), ("s" * 16, False, False), (None, True, False)],
)
def test_a_login_holds_at_the_gateways_that_share_a_port(
    path: Path, secret: str | None, shares_port: bool, holds: bool
) -> None:
    key = add_key(path, "acme", ALL)
    config = GatewayConfig(api_keys=str(path), reuse_port=shares_port)
    cluster = ClusterConfig(cluster_secret=secret)
    first, second = (Security.of(config, cluster, FakeClock()).sessions for _ in range(2))
    cookie = first.open(key)
    assert first.caller(cookie).tenant == "acme"
    with nullcontext() if holds else pytest.raises(Unauthenticated):
        assert second.caller(cookie).tenant == "acme"


def test_a_login_holds_on_one_host_alone() -> None:
    """A login is valid on one host only: another host's clock differs, and with it the expiry."""
    assert session_key("secret", b"host") != session_key("secret", b"other host")
    assert session_key("secret", b"host") != session_key("other secret", b"host")


def test_no_other_cookie_opens_anything(path: Path) -> None:
    key = add_key(path, "acme", ALL)
    weak = add_key(path, "acme", frozenset({INFER}))
    accepted = accepted_in(path)
    sessions = BrowserSessions(accepted, FakeClock())
    with pytest.raises(PermissionDenied):
        sessions.open(weak)
    cookie = sessions.open(key)
    until, digest, tag = cookie.split(".")
    later = f"{int(until) + 1}.{digest}.{tag}"
    other = BrowserSessions(accepted, FakeClock()).open(key)
    for bad in (
        "",
        ".",
        "..",
        "a.b.c",
        cookie[:-1],
        cookie + "0",
        later,
        other,
        key,
        "\udcff",
        "é",
    ):
        with pytest.raises(Unauthenticated):
            sessions.caller(bad)
