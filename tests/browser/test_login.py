"""The dashboard's login in a real browser, since only browsers set the headers of a form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from fakes.clock import FakeClock

from baton.cluster.secret import ClusterSecret
from baton.core.config import GatewayConfig
from baton.gateway.http import login
from baton.gateway.http.protocol.access import ACCESS, LOGIN_PATH, Access, check_access
from baton.gateway.http.protocol.app_state import APP_STATE
from baton.gateway.http.protocol.errors import answering
from baton.gateway.security.accepted_keys import AcceptedKeys
from baton.gateway.security.browser_sessions import BrowserSessions
from baton.gateway.security.caller import METRICS
from baton.gateway.security.key_file import KeyRing, add_key


class Guarded:
    """A gateway that requires keys, with a page of no data."""

    def __init__(self, key_file: Path) -> None:
        self._keys = AcceptedKeys(KeyRing(key_file), ClusterSecret())

    def app(self, _: float | None) -> web.Application:
        async def page(request: web.Request) -> web.Response:
            return web.Response(text="inside")

        app = web.Application(middlewares=[answering, check_access])
        app[ACCESS] = Access(self._keys, BrowserSessions(self._keys, FakeClock()), GatewayConfig())
        door = SimpleNamespace(
            feed=SimpleNamespace(call_refused=lambda *_: None), is_draining=False
        )
        app[APP_STATE] = SimpleNamespace(door=door)
        app.add_routes([*login.ROUTES, web.get("/dashboard", page)])
        return app


def test_a_key_opens_the_page(
    serve: Callable[..., Any], open_page: Callable[..., Any], tmp_path: Path
) -> None:
    key = add_key(tmp_path / "keys.json", "acme", frozenset({METRICS}))
    server = serve(Guarded(tmp_path / "keys.json"))
    page = open_page(server.url)
    assert page.url.endswith(LOGIN_PATH)
    page.fill("input[name=key]", key)
    page.click("button")
    page.wait_for_url(server.url)
    assert page.inner_text("body") == "inside"
    (cookie,) = page.context.cookies()
    assert cookie["httpOnly"] and not cookie["secure"]
