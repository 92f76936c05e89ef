"""A worker's place among the processes of one gateway (`--workers N`), as its parent gives it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ...core.config import ClusterConfig, GatewayConfig


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """`folder` is the parent's, closed to other users: the workers' sockets lie in it. What is
    keyed with `shared_key` (hex) holds at all workers."""

    index: int
    count: int
    folder: str
    shared_key: str

    def socket_of(self, index: int) -> Path:
        """Where that worker answers the others."""
        return Path(self.folder) / f"worker-{index}.sock"

    @property
    def others(self) -> list[int]:
        return [index for index in range(self.count) if index != self.index]


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """All that a worker starts with. It comes over a pipe: no secret stands on a command line."""

    config: GatewayConfig
    cluster: ClusterConfig
    place: WorkerPlace

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerOrder:
        fields = json.loads(text)
        return cls(
            GatewayConfig(**fields["config"]),
            ClusterConfig(**fields["cluster"]),
            WorkerPlace(**fields["place"]),
        )


def share(limit: int, count: int) -> int:
    """What each of `count` workers may use of a limit: together not less, one more each at most."""
    return -(-limit // count)
