"""Every error Baton raises on purpose: BatonError and its subclasses, for callers in
docs/errors.md.

Each error has a gRPC status (by name: this module imports no grpc), an HTTP status, a stable `code`
that is sent between processes, and a flag whether a retry can help. An InvalidRequest may have one
of INVALID_REQUEST_CODES in place of its class's code.
"""

from __future__ import annotations

from typing import ClassVar

# What exactly is wrong with a request, for programs.
INVALID_REQUEST_CODES = frozenset(
    {
        *("array_too_long", "duplicate_field", "empty_array", "empty_prompt", "invalid_encoding"),
        *("invalid_json", "invalid_number", "invalid_schema", "invalid_token_id", "invalid_value"),
        *("json_too_deep", "missing_required", "unknown_parameter", "unsupported_content"),
        "unsupported_parameter",
    }
)


class BatonError(Exception):
    """Base of all errors. `param`: the request field at fault, if any.

    A class inherits from its parent what its class statement does not set.
    """

    code: str = "internal"
    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: int = 500
    is_retryable: ClassVar[bool] = False
    public_text: ClassVar[str] = ""  # shown to callers instead of the message
    retry_after_s: float = 1.0  # if a retry can help

    def __init_subclass__(
        cls,
        *,
        code: str | None = None,
        grpc: str | None = None,
        http: int | None = None,
        is_retryable: bool | None = None,
        public_text: str | None = None,
    ) -> None:
        named: dict[str, object] = {"code": code, "grpc_status": grpc, "http_status": http}
        named |= {"is_retryable": is_retryable, "public_text": public_text}
        for name, value in named.items():
            if value is not None:
                setattr(cls, name, value)

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(BatonError, code="invalid_request", grpc="INVALID_ARGUMENT", http=400):
    """The request cannot be served as it is written."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param)
        if code is not None:
            assert code in INVALID_REQUEST_CODES, code
            self.code = code


class AdapterRefused(InvalidRequest, code="adapter_refused"):
    """A LoRA adapter that does not fit the model, or is of a kind that is not served; names the
    file and the tensor."""


class ContextLengthExceeded(InvalidRequest, code="context_length_exceeded"):
    """prompt + max_tokens is longer than the model's context."""


class PromptTooLarge(
    InvalidRequest, code="prompt_too_large_for_deployment", grpc="FAILED_PRECONDITION"
):
    """The prompt fits the context but not the KV pool of any node: never retryable."""


class ModelNotFound(BatonError, code="model_not_found", grpc="NOT_FOUND", http=404):
    """This deployment does not serve the requested model."""


class ResponseNotFound(BatonError, code="previous_response_not_found", grpc="NOT_FOUND", http=404):
    """No such response is kept for this caller: unknown, expired, or kept by another gateway."""


class Unauthenticated(BatonError, code="unauthenticated", grpc="UNAUTHENTICATED", http=401):
    """The cluster secret or API key is absent or wrong."""


class PermissionDenied(BatonError, code="permission_denied", grpc="PERMISSION_DENIED", http=403):
    """The credential is valid, but does not permit the call."""


class Overloaded(
    BatonError, code="overloaded", grpc="RESOURCE_EXHAUSTED", http=429, is_retryable=True
):
    """A bounded queue is full or a credit is used up."""

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded, code="rate_limit_exceeded"):
    """The caller's tenant exceeds its own limit."""


class Unavailable(BatonError, code="unavailable", grpc="UNAVAILABLE", http=503, is_retryable=True):
    """No node can take the request now."""


class NodeLost(Unavailable, code="node_lost", public_text="a node was lost during the request"):
    """A node that processed the request was lost; the gateway retries."""


class PromiseRefused(
    Unavailable, code="would_break_promise", public_text="no engine has room for the request"
):
    """With one more decode the engine's steps would take longer than its promise; the gateway
    routes again."""


class TrialRefused(Unavailable, code="on_trial", public_text="no engine is free for the request"):
    """The engine runs another gateway's suspect request, one during which an engine failed; the
    gateway retries."""


class DeadlineExceeded(BatonError, code="deadline_exceeded", grpc="DEADLINE_EXCEEDED", http=504):
    """The request's deadline passed."""


class Cancelled(BatonError, code="cancelled", grpc="CANCELLED", http=499):
    """The client cancelled, disconnected or called Abort."""


class HandoffFailed(
    BatonError,
    code="handoff_failed",
    grpc="UNAVAILABLE",
    http=503,
    is_retryable=True,
    public_text="the KV cache could not be transferred",
):
    """The KV could not be transferred from source to puller; the gateway retries elsewhere."""


class FingerprintMismatch(
    HandoffFailed, code="fingerprint_mismatch", grpc="FAILED_PRECONDITION", is_retryable=False
):
    """Source and puller are incompatible; the message names the first field that differs."""


class StaleBlocks(HandoffFailed, code="stale_blocks"):
    """A block was reallocated while it was being copied; the copy was discarded."""


class LeaseExpired(HandoffFailed, code="lease_expired"):
    """The source released its blocks before the pull was complete."""


class UnknownTransfer(HandoffFailed, code="unknown_transfer"):
    """A message names a transfer that is unknown on this side, or over."""


class EngineFailed(
    BatonError,
    code="engine_failed",
    is_retryable=True,
    public_text="an engine failed during the request",
):
    """The engine process ended or raised: no further token of the request can be trusted. Its
    supervisor restarts it."""


class HostLost(
    EngineFailed,
    code="host_lost",
    grpc="UNAVAILABLE",
    http=503,
    public_text="a host of an engine was lost during the request",
):
    """The engine ended because another of its hosts is unreachable: no request is the cause."""


class StartupFailed(BatonError, code="startup_failed"):
    """A process cannot start, and exits with 1: the message gives the reason, `hint` what to do
    about it."""

    def __init__(self, message: str, *, param: str | None = None, hint: str = "") -> None:
        super().__init__(message, param=param)
        self.hint = hint
        if hint:
            self.add_note(f"try: {hint}")  # shown with a traceback


def _tree(root: type[BatonError]) -> dict[str, type[BatonError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found = _tree(child) | found  # a code that a class inherits stands for its parent
    return found


def from_code(code: str, message: str, param: str | None = None) -> BatonError:
    """Rebuild an error from another process; an unknown code gives a plain `BatonError`."""
    if code in INVALID_REQUEST_CODES:
        return InvalidRequest(message, param=param, code=code)
    return _tree(BatonError).get(code, BatonError)(message, param=param)


def public_error(error: BatonError) -> BatonError:
    """The error as callers see it: itself, or one of its class without the internal message, which
    may contain a path, an address or a library's text. The original is for logs and operators.
    """
    if error.public_text:
        return type(error)(error.public_text)
    return BatonError("internal error") if error.code == BatonError.code else error


def from_grpc_status(status: str, message: str) -> BatonError:
    """The error for a gRPC status that came without a `code`: the first of BatonError and its
    direct subclasses with that status, or a plain `BatonError`."""
    classes: list[type[BatonError]] = [BatonError, *BatonError.__subclasses__()]
    return next((cls for cls in classes if cls.grpc_status == status), BatonError)(message)
