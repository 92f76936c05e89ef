"""The caller of a request, and what it may do."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from ...core.errors import ModelNotFound, PermissionDenied

INFER, METRICS, ADMIN = "infer", "metrics", "admin"
SCOPES = frozenset({INFER, METRICS, ADMIN})


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a tenant at one gateway; None: unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The maker of a call. `tenant`: the owner of its limits and its prefix cache; empty if no API
    keys are required. `front`: "grpc" or "http", empty in a key file.

    `models`: the names that it may use; None: all. `caller_id`: 64 bits; queues are fair between
    these ids. Of an API key it is the same at all gateways; without keys it is of the connection.
    """

    tenant: str
    scopes: frozenset[str]
    front: str = ""
    models: frozenset[str] | None = None
    limits: Limits = Limits()
    caller_id: int = 0

    def check_scope(self, scope: str) -> None:
        """Raise PermissionDenied unless the API key has this scope."""
        if scope not in self.scopes:
            raise PermissionDenied(f"this API key has no scope `{scope}`")

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_model(self, requested: str, model: str, adapters: Container[str] = ()) -> None:
        """Raise ModelNotFound unless the `requested` model is served and the caller may use it. It
        is `model`, also for an empty name, or one of its `adapters`."""
        served = requested if requested in adapters else model
        if requested not in ("", served) or not self.may_use(served):
            raise ModelNotFound(f"The model `{requested[:64]}` does not exist.", param="model")


def anyone(front: str, connection: str = "") -> Caller:
    """The caller in a deployment without API keys: it may do everything. `connection`: its peer
    name, which alone distinguishes callers."""
    # Python's hash of a string is keyed by process: other gateways give other ids.
    return Caller("", SCOPES, front, caller_id=hash(connection) % (1 << 64))
