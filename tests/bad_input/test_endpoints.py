"""Every route is tested with bad requests: POSTs by rows of the table, the login by forms, and
reads by unsupported input.
"""

from __future__ import annotations

import re

import pytest
from bad_input.cases.endpoints import ENDPOINTS, PATHS
from bad_input.cases.fronts import LEAKS, Target
from bad_input.cases.table import TABLE
from bad_input.cases.turns import TURNS

LOGIN = "/dashboard/login"
READS = (
    *("/live", "/ready", "/load", "/health", "/version", "/v1/models", "/v1/models/{model}"),
    *("/server_info", "/openapi.json", "/metrics", "/v1/responses/{response_id}", LOGIN),
    *("/dashboard", "/dashboard/", "/dashboard/{path}", "/api/snapshot", "/api/stream"),
)
_NAMES = ("x", "x" * 4000, "%00", "..%2f..", "%f0%9f", "a%0d%0aX:%20b", "<script>", "{{7*7}}")
_QUERIES = ("", "?" + "a=1&" * 500, "?%00=%ff", "?stream=1&stream=2", "?limit=-1&last=%00", "?" * 9)
_FORM = "application/x-www-form-urlencoded"


def test_every_route_has_bad_requests(target: Target) -> None:
    posts = {path for method, path in target.routes if method == "POST"}
    assert posts == {*PATHS, LOGIN}, "GOOD_OF in cases/fronts.py has a good body of each"
    rows = {row.path for row in (*TABLE, *TURNS, *ENDPOINTS)}
    assert posts == rows | {LOGIN}, "rows in cases/endpoints.py, or beside it"
    assert {path for method, path in target.routes if method in ("GET", "DELETE")} == {*READS}


@pytest.mark.parametrize("path", READS)
def test_reads_with_what_they_do_not_take(target: Target, path: str) -> None:
    names = _NAMES if "{" in path else ("",)
    for query in _QUERIES:
        for name in names:
            requested = re.sub(r"{\w+}", lambda _, name=name: name, path) + query
            with target.connect() as plain:
                head = f"GET {requested} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
                plain.sendall(head.encode() + b'{"a": [1]')
                plain.shutdown(1)
                status_line, _, rest = plain.recv(1 << 16).partition(b"\r\n")
            status = int(status_line.split()[1])
            assert status in (200, 303, 308, 400, 404), (requested, status_line)
            if status in (303, 308):
                found = re.search(rb"Location: (.*)\r\n", rest)
                assert found and found[1] in (b"/dashboard/login", b"../dashboard"), rest
            if status >= 400:
                assert not LEAKS.search(rest.decode()), rest
            assert b"X: b" not in rest.partition(b"\r\n\r\n")[0]
    target.check_serves()


@pytest.mark.parametrize(
    ("form", "kind", "status"),
    [
        (b"", _FORM, 401),
        (b"key=", _FORM, 401),
        (b"key=wrong", _FORM, 401),
        (b"key=%00%ff&key=x", _FORM, 401),
        (b"=&&==&", _FORM, 401),
        (b"key=" + b"x" * 3000, _FORM, 413),
        (b'{"key": "x"}', "application/json", 415),
        (b"--b\r\n", "multipart/form-data; boundary=b", 415),
        (b"key=x", "", 415),
    ],
)
def test_logins_that_are_none(target: Target, form: bytes, kind: str, status: int) -> None:
    answer = target.http("POST", LOGIN, form, {"Content-Type": kind} if kind else {})
    assert answer.status == status, answer
    assert "Set-Cookie" not in answer.headers and not LEAKS.search(answer.text)
