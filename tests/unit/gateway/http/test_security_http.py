"""The checks before every HTTP route: hosts, origins, scopes, sessions. No socket is opened."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request
from fakes.clock import FakeClock

from baton.cluster.secret import ClusterSecret
from baton.core.config import GatewayConfig
from baton.core.errors import BatonError, PermissionDenied, RateLimited, Unauthenticated
from baton.core.ports import Entropy
from baton.gateway.http.app import ROUTE_GROUPS
from baton.gateway.http.chat.chat_model import CHAT_MODEL, ChatModel, prepare
from baton.gateway.http.chat.chat_template import ChatPrompt
from baton.gateway.http.login import log_in
from baton.gateway.http.protocol.access import ACCESS, LOGIN_PATH, Access, check_access, scope_of
from baton.gateway.http.protocol.app_state import APP_STATE, CALLER
from baton.gateway.http.protocol.errors import Refusal, answering
from baton.gateway.security.accepted_keys import AcceptedKeys
from baton.gateway.security.browser_sessions import COOKIE, BrowserSessions
from baton.gateway.security.caller import ADMIN, INFER, METRICS, SCOPES, Caller, Limits
from baton.gateway.security.key_file import KeyRing, add_key, digest_of
from baton.gateway.security.tenancy import Tenancy


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "keys.json"
    return {scope: add_key(path, scope, frozenset({scope})) for scope in sorted(SCOPES)}


@pytest.fixture
def access(tmp_path: Path, keys: dict[str, str]) -> Access:
    accepted = AcceptedKeys(KeyRing(tmp_path / "keys.json"), ClusterSecret())
    return Access(
        accepted, BrowserSessions(accepted, FakeClock()), GatewayConfig(allowed_hosts="my.host, B")
    )


class Door:
    """The part of the front door that the middleware uses."""

    is_draining = False

    def __init__(self) -> None:
        self.turned: list[str] = []
        self.door = self.feed = self  # Parts.door, FrontDoor.feed

    def call_refused(self, caller: Caller, error: BatonError) -> None:
        self.turned.append(f"{caller.front} {error.code}")


class Template:
    reads: frozenset[str] = frozenset()
    num_rendered = 0

    def check_variables(self, names: object, param: str) -> None:
        """Accept any names."""

    async def render(self, messages: list[dict[str, str]], *_: object) -> ChatPrompt:
        self.num_rendered += 1
        return ChatPrompt(messages[0]["content"], [])


async def ask(
    access: Access, path: str, method: str = "GET", *, door: Door | None = None, **headers: str
) -> tuple[int, web.StreamResponse]:
    """Status and response of the two middlewares for a route that returns the tenant with 200."""
    app = web.Application()
    app[ACCESS], app[APP_STATE] = access, door or Door()  # type: ignore[misc]
    given = {"Host": "127.0.0.1:8000"} | {k.replace("_", "-"): v for k, v in headers.items()}
    request = make_mocked_request(method, path, headers=given, app=app)

    async def route(request: web.Request) -> web.Response:
        return web.Response(text=request[CALLER].tenant)

    async def guarded(request: web.Request) -> web.StreamResponse:
        return await check_access(request, route)

    response = await answering(request, guarded)
    return response.status, response


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "10.1.2.3", "[::1]:8000", "[fe80::1]",
     "my.host", "My.Host.:80", "b:8000"],
)  # fmt: skip
def test_hosts_that_are_ours(access: Access, host: str) -> None:
    access.check_host([host])


@pytest.mark.parametrize(
    "hosts",
    [[], [""], ["evil.example"], ["my.host.evil.example"], ["localhost.evil.example"],
     ["user@localhost"], ["localhost:port"], ["localhost/x"], ["localhost", "localhost"],
     ["1.2.3.4.evil.example"], ["localhost evil"], ["[::1"], [":8000"], ["localhost:99999"]],
)  # fmt: skip
def test_foreign_hosts(access: Access, hosts: list[str]) -> None:
    with pytest.raises(Refusal) as raised:
        access.check_host(hosts)
    assert raised.value.http_status == 421


def test_all_hosts_may_be_allowed() -> None:
    sessions = BrowserSessions(AcceptedKeys(None, ClusterSecret()), FakeClock())
    access = Access(None, sessions, GatewayConfig(allowed_hosts="*"))
    access.check_host(["any.where:1"])


def test_origins(access: Access) -> None:
    access.check_origin([], "localhost:8000")
    access.check_origin(["http://localhost:8000"], "localhost:8000")
    access.check_origin(["https://My.Host"], "my.host")
    for origin in ("null", "", "http://evil.example", "http://localhost:8001", "http://localhost",
                   "ftp://localhost:8000", "http://localhost:8000@evil.example",
                   "http://["):  # fmt: skip
        with pytest.raises(Refusal) as raised:
            access.check_origin([origin], "localhost:8000")
        assert raised.value.http_status == 403
    with pytest.raises(Refusal):
        access.check_origin(["http://localhost:8000"] * 2, "localhost:8000")


def test_scopes_by_path() -> None:
    for path in ("/live", "/ready", "/health", "/version", "/dashboard/login"):
        assert scope_of(path, exists=True) is None
    for path in ("/metrics", "/server_info", "/dashboard", "/dashboard/app.js", "/api/snapshot"):
        assert scope_of(path, exists=True) == METRICS
    for path in ("/v1/models", "//v1/models", "/v1/../admin", "/tokenize", "/openapi.json"):
        assert scope_of(path, exists=True) == INFER
    for path in ("/admin/drain", "/reset_prefix_cache", "//admin/drain", "/start_profile",
                 "/v1/load_lora_adapter", "//v1/unload_lora_adapter"):  # fmt: skip
        assert scope_of(path, exists=True) == ADMIN
    for path in ("/", "/live/", "//live", "/healthy", "/collective_rpc", "/V1/models"):
        assert scope_of(path, exists=True) == ADMIN, "a route that nobody thought of"
        assert scope_of(path, exists=False) is None, "404 for everybody"


def test_every_route_that_exists_has_its_scope() -> None:
    """A new group of routes must be listed here and in access.py, or it requires an
    administrator."""
    paths = {route.path for group in ROUTE_GROUPS for route in group}
    assert {
        path for path in paths if scope_of(path, exists=True) == INFER
    } == {"/v1/models", "/v1/models/{model:.+}", "/v1/completions", "/v1/chat/completions",
          "/v1/responses", "/v1/responses/{response_id}", "/v1/messages",
          "/v1/messages/count_tokens",
          "/tokenize", "/detokenize", "/openapi.json"}  # fmt: skip
    assert {path for path in paths if scope_of(path, exists=True) is None} == {
        "/live", "/ready", "/health", "/version", "/dashboard/login"
    }  # fmt: skip


async def test_each_scope_opens_its_own_paths(access: Access, keys: dict[str, str]) -> None:
    paths = {INFER: "/v1/models", METRICS: "/metrics", ADMIN: "/admin/drain"}
    for scope, path in paths.items():
        for name, key in keys.items():
            status, response = await ask(access, path, Authorization=f"Bearer {key}")
            assert status == (200 if name == scope else 403)
        status, response = await ask(access, path)
        assert status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
    assert (await ask(access, "/live"))[0] == 200
    assert (await ask(access, "/v1/models", Host="evil.example"))[0] == 421
    assert (await ask(access, "/live", Origin="http://evil.example"))[0] == 403


async def test_who_is_turned_away_is_counted(access: Access, keys: dict[str, str]) -> None:
    door = Door()
    await ask(access, "/v1/models", door=door)
    await ask(access, "/v1/models", door=door, Authorization=f"Bearer {keys[METRICS]}")
    await ask(access, "/live", door=door)
    for path in ("/dashboard", "/metrics", "/api/snapshot", "/admin/keys", "/nothing"):
        await ask(access, path, door=door)  # these requests do not count as calls
    assert door.turned == ["http unauthenticated", "http permission_denied"]


async def test_a_browser_logs_in_and_reads(access: Access, keys: dict[str, str]) -> None:
    status, response = await ask(access, "/dashboard")
    assert (status, response.headers.get("Location")) == (303, "/dashboard/login")
    cookie = f"{COOKIE}={access.sessions.open(keys[METRICS])}"
    for path in ("/dashboard", "/api/events", "/metrics"):
        assert (await ask(access, path, Cookie=cookie))[0] == 200
    for path, method in (("/v1/models", "GET"), ("/admin/drain", "POST"), ("/api/x", "POST")):
        assert (await ask(access, path, method, Cookie=cookie))[0] == 401
    assert (await ask(access, "/api/events", Cookie=f"{COOKIE}=1.2.3"))[0] == 401
    both = {"Cookie": cookie, "Authorization": "Bearer wrong"}
    assert (await ask(access, "/api/events", **both))[0] == 401, "a wrong key is not overlooked"


@pytest.mark.parametrize(
    ("origin", "is_secure"),
    [("https://my.host", True), ("http://my.host", False), (None, False)],
)
async def test_a_cookie_is_secure_where_the_browser_sees_tls(
    access: Access, keys: dict[str, str], origin: str | None, is_secure: bool
) -> None:
    """Behind a proxy that terminates TLS, only the browser's Origin header shows that TLS is
    used."""
    app = web.Application()
    app[ACCESS] = access
    body = f"key={keys[METRICS]}".encode()
    given = {
        "Host": "my.host",
        "Content-Type": "application/x-www-form-urlencoded",
        "Content-Length": str(len(body)),
    } | ({} if origin is None else {"Origin": origin})
    payload = StreamReader(BaseProtocol(asyncio.get_running_loop()), 1 << 16)
    payload.feed_data(body)
    payload.feed_eof()
    request = make_mocked_request("POST", LOGIN_PATH, headers=given, app=app, payload=payload)
    response = await check_access(request, log_in)
    assert response.status == 303
    assert bool(response.cookies[COOKIE]["secure"]) is is_secure


def test_a_cookie_says_nothing_of_its_key(
    access: Access, tmp_path: Path, keys: dict[str, str]
) -> None:
    cookie, digest = access.sessions.open(keys[METRICS]), digest_of(keys[METRICS])
    assert digest.hex() not in cookie
    accepted = AcceptedKeys(KeyRing(tmp_path / "keys.json"), ClusterSecret())
    other = BrowserSessions(accepted, FakeClock()).open(keys[METRICS])
    assert not set(cookie.split(".")[1:]) & set(other.split(".")[1:]), "of no use elsewhere"
    until, reference, tag = cookie.split(".")
    for forged in (f"{until}.{digest.hex()}.{tag}", f"{until}.{reference}.{reference}", "é.é.é"):
        with pytest.raises(Unauthenticated):
            access.sessions.caller(forged)
    assert access.sessions.caller(cookie).tenant == METRICS


async def test_a_tenant_over_its_limit_has_no_chat_rendered() -> None:
    caller = Caller("acme", SCOPES, limits=Limits(requests_per_minute=1))
    tenancy = Tenancy(FakeClock(), b"k")
    app = web.Application()
    door = SimpleNamespace(tenancy=tenancy, constraint_refusal=None)
    app[APP_STATE] = cast(Any, SimpleNamespace(door=door))
    app[CHAT_MODEL] = ChatModel(Template(), None, Entropy())  # type: ignore[arg-type]
    request = make_mocked_request("POST", "/v1/chat/completions", app=app)
    request[CALLER] = caller
    found = {"messages": [{"role": "user", "content": "hi"}]}
    for _ in range(2):
        assert (await prepare(request, found)).prompt.text == "hi", "to look spends nothing"
    with tenancy.admitted(caller):
        pass
    with pytest.raises(RateLimited):
        await prepare(request, found)
    assert app[CHAT_MODEL].template.num_rendered == 2  # type: ignore[union-attr]


async def test_a_key_in_the_url_is_no_key(access: Access, keys: dict[str, str]) -> None:
    for name in ("key", "api_key", "access_token"):
        assert (await ask(access, f"/metrics?{name}={keys[METRICS]}"))[0] == 401


async def test_without_keys_hosts_and_origins_are_judged_all_the_same() -> None:
    sessions = BrowserSessions(AcceptedKeys(None, ClusterSecret()), FakeClock())
    access = Access(None, sessions, GatewayConfig())
    assert (await ask(access, "/admin/drain", "POST"))[0] == 200
    assert (await ask(access, "/metrics", Host="evil.example"))[0] == 421
    assert (await ask(access, "/v1/completions", "POST", Origin="http://evil.example"))[0] == 403


@pytest.mark.parametrize("error", [Unauthenticated("x"), PermissionDenied("x")])
def test_errors_of_callers_are_not_retryable(error: BatonError) -> None:
    assert not error.is_retryable
