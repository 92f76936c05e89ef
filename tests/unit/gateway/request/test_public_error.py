"""No error shows internals to a caller: no traceback, no path, no address."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from baton.core import errors
from baton.core.errors import BatonError, InvalidRequest, public_error
from baton.gateway.grpc.service import with_typed_errors
from baton.proto.v1 import inference_pb2

INSIDE = "File /srv/baton/secret.py at 10.0.0.7:4711: cudaErrorIllegalAddress"
# Raised with messages of our own only, or about the request.
OURS = {
    errors.InvalidRequest, errors.AdapterRefused, errors.ContextLengthExceeded,
    errors.PromptTooLarge,
    errors.ModelNotFound, errors.Unauthenticated, errors.PermissionDenied, errors.Overloaded,
    errors.RateLimited, errors.Unavailable, errors.DeadlineExceeded, errors.Cancelled,
    errors.ResponseNotFound, errors.StartupFailed,
}  # fmt: skip


def all_errors() -> list[type[BatonError]]:
    return list(errors._tree(BatonError).values())


@pytest.mark.parametrize("kind", all_errors())
def test_failures_are_told_by_their_kind_alone(kind: type[BatonError]) -> None:
    reported = public_error(kind(INSIDE))
    assert (reported.code, reported.grpc_status, reported.http_status) == (
        kind.code, kind.grpc_status, kind.http_status
    )  # fmt: skip
    assert (INSIDE in reported.message) == (kind in OURS)


class _Aborted(Exception):
    pass


class _Context:
    """The part of a ServicerContext that is needed to end a call."""

    def __init__(self) -> None:
        self.status: Any = None
        self.details = ""

    async def abort(self, status: grpc.StatusCode, details: str, metadata: Any) -> None:
        self.status, self.details = status, details
        raise _Aborted


@pytest.mark.parametrize(
    ("error", "details"),
    [(RuntimeError(INSIDE), "internal error"), (KeyError(INSIDE), "internal error"),
     (InvalidRequest("n is wrong"), "n is wrong")],
)  # fmt: skip
async def test_a_bug_in_a_call_is_an_internal_error(error: Exception, details: str) -> None:
    async def failing(request: Any, context: Any) -> None:
        raise error

    context = _Context()
    handler = with_typed_errors(grpc.unary_unary_rpc_method_handler(failing, bytes))
    with pytest.raises(_Aborted):
        await handler.unary_unary(b"", context)
    assert context.details == details


async def test_bytes_that_are_no_message_are_the_callers_fault() -> None:
    async def never(request: Any, context: Any) -> None:
        raise AssertionError("called")

    context, parse = _Context(), inference_pb2.TokenizeRequest.FromString
    handler = with_typed_errors(grpc.unary_unary_rpc_method_handler(never, parse))
    with pytest.raises(_Aborted):
        await handler.unary_unary(b"\xff", context)
    assert context.status is grpc.StatusCode.INVALID_ARGUMENT
    assert context.details == "the bytes are no message of this method"
