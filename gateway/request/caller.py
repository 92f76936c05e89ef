"""Who makes a call, as far as the gateway has to know: set by the front that took it."""

from __future__ import annotations

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
    """`tenant`: whose limits and whose prefix cache; empty where no keys are asked for.

    `models`: the names that it may ask for; None: all. `caller_id`: 64 bits between which queues
    are fair: of the API key, the same at all gateways, or of the connection.
    """

    tenant: str
    scopes: frozenset[str]
    front: str  # "grpc" or "http"
    models: frozenset[str] | None = None
    limits: Limits = Limits()
    caller_id: int = 0

    def check_scope(self, scope: str) -> None:
        """Raise PermissionDenied unless the credential has this scope."""
        if scope not in self.scopes:
            raise PermissionDenied(f"this API key has no scope `{scope}`")

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_model(self, asked: str, served: str) -> None:
        """Raise ModelNotFound, in the words for one that is not there, unless `served` is allowed.

        `asked` is the name in the request, which may be empty.
        """
        if not self.may_use(served):
            raise ModelNotFound(f"The model `{asked[:64]}` does not exist.", param="model")


def anyone(front: str, caller_id: int = 0) -> Caller:
    """The caller of a deployment without API keys: everybody may do everything."""
    return Caller("", SCOPES, front, caller_id=caller_id)
