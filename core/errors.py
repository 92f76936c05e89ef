"""Every error Baton raises on purpose, as one tree.

    BatonError
    ├── InvalidRequest                 the caller's fault; never retry
    │   ├── ContextLengthExceeded
    │   └── PromptTooLarge             fits the context, but no pool of this deployment
    ├── ModelNotFound
    ├── Unauthenticated
    ├── PermissionDenied               known, but this is not the caller's to do
    ├── Overloaded                     queue or credit full; retry later
    │   └── RateLimited                a limit of the caller's own; carries when to try again
    ├── Unavailable                    no node for a role, draining; retry later
    │   └── NodeLost                   a node went away under the request; the gateway retries
    ├── DeadlineExceeded
    ├── Cancelled
    ├── HandoffFailed                  the KV could not be passed; the gateway retries elsewhere
    │   ├── FingerprintMismatch        the two sides differ; names the field
    │   ├── StaleBlocks                a generation moved under the copy
    │   ├── LeaseExpired
    │   └── UnknownTransfer            no such ticket here (never existed, finished, or cancelled)
    ├── EngineFailed                   the engine process broke; its supervisor restarts it
    └── StartupFailed                  names what is wrong and what to do; the process exits 1

Each error knows its gRPC status (by name: this module imports no grpc), its HTTP status, a stable
`code` that survives the wire, and whether a retry can help. An InvalidRequest may carry one of
INVALID_REQUEST_CODES in place of its class's.
"""

from __future__ import annotations

from typing import ClassVar

# What exactly is wrong with a request, for programs that want to know.
INVALID_REQUEST_CODES = frozenset(
    {
        *("array_too_long", "duplicate_field", "empty_array", "empty_prompt", "invalid_encoding"),
        *("invalid_json", "invalid_number", "invalid_schema", "invalid_token_id", "invalid_value"),
        *("json_too_deep", "missing_required", "unknown_parameter", "unsupported_content"),
        "unsupported_parameter",
    }
)


class BatonError(Exception):
    """Base of all. `param` names the request field at fault, if one is."""

    code: str = "internal"
    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    is_retryable: ClassVar[bool] = False
    retry_after_s: float = 1.0  # when a retry may help, if it can

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(BatonError):
    """The request cannot be served as it is written."""

    code = "invalid_request"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param)
        if code is not None:
            assert code in INVALID_REQUEST_CODES, code
            self.code = code


class ContextLengthExceeded(InvalidRequest):
    """prompt + max_tokens is longer than the model's context."""

    code = "context_length_exceeded"


class PromptTooLarge(InvalidRequest):
    """The prompt fits the context but not the KV pool of any node: never retryable."""

    code = "prompt_too_large_for_deployment"
    grpc_status = "FAILED_PRECONDITION"


class ModelNotFound(BatonError):
    """This deployment does not serve the model that was asked for."""

    code = "model_not_found"
    grpc_status = "NOT_FOUND"
    http_status = 404


class Unauthenticated(BatonError):
    """The cluster secret or API key is absent or wrong."""

    code = "unauthenticated"
    grpc_status = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(BatonError):
    """The credential is good, but does not go so far."""

    code = "permission_denied"
    grpc_status = "PERMISSION_DENIED"
    http_status = 403


class Overloaded(BatonError):
    """A bounded queue or a credit is full."""

    code = "overloaded"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    is_retryable = True

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The caller's tenant is over a limit of its own."""

    code = "rate_limit_exceeded"


class Unavailable(BatonError):
    """No node can take the request now."""

    code = "unavailable"
    grpc_status = "UNAVAILABLE"
    http_status = 503
    is_retryable = True


class NodeLost(Unavailable):
    """A node that held the request went away."""

    code = "node_lost"


class DeadlineExceeded(BatonError):
    """The request's deadline passed."""

    code = "deadline_exceeded"
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(BatonError):
    """The client gave up or called Abort."""

    code = "cancelled"
    grpc_status = "CANCELLED"
    http_status = 499


class HandoffFailed(BatonError):
    """The KV blocks could not be passed from source to puller."""

    code = "handoff_failed"
    grpc_status = "UNAVAILABLE"
    http_status = 503
    is_retryable = True


class FingerprintMismatch(HandoffFailed):
    """Source and puller are not of one make; the message names the first field that differs."""

    code = "fingerprint_mismatch"
    grpc_status = "FAILED_PRECONDITION"
    is_retryable = False


class StaleBlocks(HandoffFailed):
    """A block was reallocated while it was being copied; the copy was thrown away."""

    code = "stale_blocks"


class LeaseExpired(HandoffFailed):
    """The source took its blocks back before the pull was done."""

    code = "lease_expired"


class UnknownTransfer(HandoffFailed):
    """A message names a transfer that this side does not know, or knows to be over."""

    code = "unknown_transfer"


class EngineFailed(BatonError):
    """The engine process ended or raised; no token of this request can be trusted to follow."""

    code = "engine_failed"
    is_retryable = True


class StartupFailed(BatonError):
    """A process cannot start: the message gives the reason, `hint` what to do about it."""

    code = "startup_failed"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def _tree(root: type[BatonError]) -> dict[str, type[BatonError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found = _tree(child) | found  # one without a code of its own is its parent on the wire
    return found


def from_code(code: str, message: str, param: str | None = None) -> BatonError:
    """Rebuild an error that came over the wire; an unknown code gives a plain `BatonError`."""
    if code in INVALID_REQUEST_CODES:
        return InvalidRequest(message, param=param, code=code)
    cls = _tree(BatonError).get(code, BatonError)
    if cls is StartupFailed:
        return StartupFailed(message)
    return cls(message, param=param)
