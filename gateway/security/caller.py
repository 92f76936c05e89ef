"""Who makes a call, and what one may do."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from ...core.errors import ModelNotFound, PermissionDenied

INFER, METRICS, ADMIN = "infer", "metrics", "admin"
SCOPES = frozenset({INFER, METRICS, ADMIN})


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may use at one gateway; None: as much as there is."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call. `tenant`: whose limits and whose prefix cache; empty where no keys are
    required. `front`: "grpc" or "http", empty in a key file.

    `models`: the names that it may use; None: all. `caller_id`: 64 bits between which queues are
    fair: of the API key, the same at all gateways, or of the connection.
    """

    tenant: str
    scopes: frozenset[str]
    front: str = ""
    models: frozenset[str] | None = None
    limits: Limits = Limits()
    caller_id: int = 0

    def check_scope(self, scope: str) -> None:
        """Raise PermissionDenied unless the credential has this scope."""
        if scope not in self.scopes:
            raise PermissionDenied(f"this API key has no scope `{scope}`")

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_model(self, requested: str, model: str, adapters: Container[str] = ()) -> None:
        """Raise ModelNotFound unless what is `requested` is served, and it may use that: `model`,
        which an empty name means too, or one of its `adapters`."""
        served = requested if requested in adapters else model
        if requested not in ("", served) or not self.may_use(served):
            raise ModelNotFound(f"The model `{requested[:64]}` does not exist.", param="model")


def anyone(front: str, connection: str = "") -> Caller:
    """The caller of a deployment without API keys: everybody may do everything. `connection` names
    the one that it calls on: nothing else tells callers apart."""
    # Python's hash of a text has a key of this process: no other gateway gives the same ids.
    return Caller("", SCOPES, front, caller_id=hash(connection) % (1 << 64))
