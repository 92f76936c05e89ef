"""The checks before every route: valid HTTP, our host, our origin, and the caller's scope.

    Host not ours ► 421     Origin not ours ► 403     no valid credential ► 401     no scope ► 403

A page of another site can make a browser send requests here: through a host name that resolves to
this address (so foreign names in Host are refused; an address cannot be rebound), or through a form
(so a foreign Origin is refused). Sets CALLER; maps paths to the scopes that they need.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from aiohttp import web

from ....core.config import GatewayConfig
from ....core.errors import BatonError, PermissionDenied, Unauthenticated
from ...security.accepted_keys import AcceptedKeys
from ...security.browser_sessions import COOKIE, BrowserSessions
from ...security.caller import ADMIN, INFER, METRICS, Caller, anyone
from .app_state import APP_STATE, AT_DOOR, CALLER
from .connections import check_head
from .errors import Handler, Refusal

LOGIN_PATH = "/dashboard/login"
_OPEN = frozenset({"/live", "/ready", "/health", "/version", LOGIN_PATH})
_SCOPE_OF = {  # by the path, or its first part; a route that is not listed here needs ADMIN
    "v1": INFER,
    "tokenize": INFER,
    "detokenize": INFER,
    "openapi.json": INFER,
    "metrics": METRICS,
    "load": METRICS,
    "server_info": METRICS,
    "dashboard": METRICS,
    "api": METRICS,
    "admin": ADMIN,
    "reset_prefix_cache": ADMIN,
    "flush_cache": ADMIN,
    "start_profile": ADMIN,
    "stop_profile": ADMIN,
    "v1/load_lora_adapter": ADMIN,
    "v1/unload_lora_adapter": ADMIN,
}
_CALLS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"})


class Access:
    """The access rules of one server. `keys` None: no API key is required."""

    def __init__(
        self, keys: AcceptedKeys | None, sessions: BrowserSessions, config: GatewayConfig
    ) -> None:
        self.sessions = sessions
        self._keys = keys
        further = [name.strip() for name in config.allowed_hosts.split(",")]
        self._allows_all = "*" in further
        names = {"localhost", config.host, socket.gethostname(), *further} - {""}
        self._names = {name.lower().rstrip(".") for name in names}

    def check_host(self, hosts: Sequence[str]) -> None:
        """Raise Refusal unless there is one Host header, with an allowed name or an IP address."""
        name = _hostname(hosts[0]) if len(hosts) == 1 else None
        if name is None or not (self._allows_all or name in self._names or _is_address(name)):
            raise Refusal(
                421,
                "misdirected_request",
                "the name in the Host header is not allowed; the operator can allow it with "
                "--allowed-hosts",
                is_fatal=True,
            )

    def check_origin(self, origins: Sequence[str], host: str) -> None:
        """Raise Refusal if a page of another site sent the request."""
        if not origins:
            return
        try:
            parts = urlsplit(origins[0] if len(origins) == 1 else "")
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or parts.netloc.lower() != host.lower():
            raise Refusal(403, "foreign_origin", "requests of another site's pages are refused")

    def caller(self, request: web.Request) -> Caller:
        """The caller of a request; a browser session may only GET and HEAD, with the scope METRICS.

        Raises Unauthenticated, PermissionDenied.
        """
        scope = _scope(request)
        if scope is None:
            return anyone("http")
        if self._keys is None:
            return anyone("http", _peer(request))
        shown = request.headers.getall("Authorization", [])
        if request.path.startswith("/v1/messages"):  # Anthropic's clients send the key in X-Api-Key
            shown = [*shown, *(f"Bearer {k}" for k in request.headers.getall("X-Api-Key", []))]
        cookie = request.cookies.get(COOKIE)
        if not shown and cookie and scope == METRICS and request.method in ("GET", "HEAD"):
            caller = self.sessions.caller(cookie)
        else:
            caller = self._keys.caller(shown, "http")
        caller.check_scope(scope)
        return caller


ACCESS = web.AppKey("access", Access)


@web.middleware
async def check_access(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The middleware: sets CALLER. Browsers without a session are redirected to the login."""
    check_head(request)
    access = request.app[ACCESS]
    hosts = request.headers.getall("Host", [])
    access.check_host(hosts)
    access.check_origin(request.headers.getall("Origin", []), hosts[0])
    try:
        request[CALLER] = access.caller(request)
    except (Unauthenticated, PermissionDenied) as error:
        if isinstance(error, Unauthenticated) and request.path.rstrip("/") == "/dashboard":
            return web.Response(status=303, headers={"Location": LOGIN_PATH})
        if _scope(request) == INFER:  # other paths are no calls: scrapes, pages, probes
            request.app[APP_STATE].door.feed.call_refused(anyone("http"), error)
        raise
    try:
        return await handler(request)
    except BatonError as error:
        if request.path in _CALLS and AT_DOOR not in request:
            request.app[APP_STATE].door.feed.call_refused(request[CALLER], error)
        raise


def _scope(request: web.Request) -> str | None:
    return scope_of(request.path, exists=request.match_info.http_exception is None)


def scope_of(path: str, *, exists: bool) -> str | None:
    """The scope that a path needs; None: no scope, since it is open to all or does not exist."""
    if path in _OPEN:
        return None
    name = path.lstrip("/")
    of_part = _SCOPE_OF.get(name.partition("/")[0], ADMIN if exists else None)
    return _SCOPE_OF.get(name, of_part)


def _hostname(host: str) -> str | None:
    """The name or address in a Host header, lower case, without its port."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises ValueError if it is invalid
    except ValueError:
        return None
    if parts.netloc != host or parts.username is not None or not parts.hostname:
        return None
    return parts.hostname.rstrip(".")


def _peer(request: web.Request) -> str:
    """The peer's address, which identifies a connection while it is open; empty if it is closed."""
    transport = request.transport
    return "" if transport is None else str(transport.get_extra_info("peername"))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
