"""The table of bad requests on both fronts: same request, same verdict; and routes that stay
closed.
"""

from __future__ import annotations

import pytest
from bad_input.cases.endpoints import ENDPOINTS
from bad_input.cases.fronts import LEAKS, Answer, Target
from bad_input.cases.table import NOT_HERE, SAME, TABLE, TYPED, Row, deep_arguments
from bad_input.cases.turns import TURNS

ROWS = (*TABLE, *TURNS, *ENDPOINTS)
_SHOWN = 400  # characters of an error that may be returned to a caller


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in ROWS])
def test_bad_request(target: Target, row: Row) -> None:
    _check_http(target, row)
    if row.over_grpc == SAME:
        _check_grpc(target, row)
    elif row.over_grpc == TYPED:
        with pytest.raises((TypeError, ValueError, AttributeError)):
            row.message()
    else:
        assert " " in row.over_grpc, "a reason, in words"


def _check_http(target: Target, row: Row) -> None:
    headers = {"Content-Type": "application/json"} | dict(row.headers)
    headers = {name: value for name, value in headers.items() if value}
    answer = target.http("POST", row.path, row.body(), headers)
    assert (answer.status, answer.code, answer.param) == (row.status, row.code, row.param), answer
    if row.status >= 400:
        assert answer.headers["Content-Type"].startswith("application/json")
    _check_says_nothing(answer)


def _check_grpc(target: Target, row: Row) -> None:
    answer = target.generate(row.message())
    code = row.code if row.grpc_code is None else row.grpc_code
    param = row.param if row.grpc_code is None else row.grpc_param
    assert (answer.status, answer.code, answer.param) == (row.grpc_status, code, param), answer
    _check_says_nothing(answer)


def _check_says_nothing(answer: Answer) -> None:
    assert not LEAKS.search(answer.text), answer.text
    assert answer.status == 200 or len(answer.text) < _SHOWN, "a caller's value thrown back whole"


@pytest.mark.parametrize("kind", ["body", "surrogates", "arguments"])
def test_every_depth_has_a_verdict(target: Target, kind: str) -> None:
    """A depth that the parser just accepts may be too deep for the next stage."""
    for depth in range(880, 1010):
        match kind:
            case "body":
                path, body = "/v1/completions", b'{"user":' + b"[" * depth + b"]" * depth + b"}"
            case "surrogates":
                deep = b"[" * depth + rb'"\ud83d\ude00"' + b"]" * depth
                path, body = "/v1/completions", b'{"user":' + deep + b"}"
            case _:
                path, body = "/v1/chat/completions", deep_arguments(depth)
        answer = target.post(path, body)
        assert answer.status == 400, (depth, answer)


def test_it_serves_after_all_of_it(target: Target) -> None:
    target.check_serves()
    log = target.log()
    assert "Traceback" not in log, log[-4000:]
    assert "by a bug" not in log


def test_ids_are_unique_and_every_kind_is_there() -> None:
    ids = [row.id for row in ROWS]
    assert len(ids) == len(set(ids))
    kinds = {row_id.partition("-")[0] for row_id in ids}
    assert not kinds & NOT_HERE.keys()
