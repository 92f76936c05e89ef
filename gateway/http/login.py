"""The login of the dashboard: a form takes an API key, and the response sets a session cookie.

A key is never part of a URL, since logs, histories and Referer headers would keep it.
"""

from __future__ import annotations

from aiohttp import web

from ...core.errors import PermissionDenied, Unauthenticated
from ..security.browser_sessions import COOKIE, SESSION_S
from .protocol.access import ACCESS, LOGIN_PATH
from .protocol.body import in_time
from .protocol.errors import Refusal

ROUTES = web.RouteTableDef()

_MAX_FORM_BYTES = 2048
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",  # no-referrer would give a form `Origin: null`
    "X-Content-Type-Options": "nosniff",
}
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Baton: log in</title>
<style>body {{ font: 16px system-ui; max-width: 24rem; margin: 15vh auto }}
input, button {{ font: inherit; padding: .4rem; width: 100%; box-sizing: border-box;
margin-top: .5rem }}</style>
<form method="post" action="/dashboard/login">
<label>API key with the scope <code>metrics</code>
<input type="password" name="key" autocomplete="current-password" required autofocus></label>
<button>Log in</button></form><p role="alert">{message}</p></html>
"""


@ROUTES.get(LOGIN_PATH)
async def show_login(request: web.Request) -> web.Response:
    """The form."""
    return _page(200, "")


@ROUTES.post(LOGIN_PATH)
async def log_in(request: web.Request) -> web.Response:
    """Set the cookie and redirect to the dashboard; a wrong key: 401 or 403, and the form again."""
    access = request.app[ACCESS]
    if request.content_type != "application/x-www-form-urlencoded":
        raise Refusal(415, "unsupported_media_type", "log in by the form")
    if request.content_length is None or request.content_length > _MAX_FORM_BYTES:
        raise Refusal(413, "request_too_large", "a key is shorter", is_fatal=True)
    key = (await in_time(request.post())).get("key")
    try:
        cookie = access.sessions.open(key if isinstance(key, str) else "")
    except (Unauthenticated, PermissionDenied) as error:
        return _page(error.http_status, "This key does not open the dashboard.")
    response = web.Response(status=303, headers={**_HEADERS, "Location": "/dashboard"})
    response.set_cookie(
        COOKIE,
        cookie,
        max_age=SESSION_S,
        httponly=True,
        samesite="Strict",
        # A proxy may have terminated TLS; check_access has checked that the origin is this host.
        secure=request.secure or request.headers.get("Origin", "").startswith("https:"),
        path="/",
    )
    return response


def _page(status: int, message: str) -> web.Response:
    text = _PAGE.format(message=message)
    return web.Response(text=text, status=status, content_type="text/html", headers=_HEADERS)
