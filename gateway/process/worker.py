"""One worker of a gateway: `python -m baton.gateway.process.worker`, its order a line on stdin."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any

from ...core.errors import StartupFailed
from ...core.process import event_loop
from ..security.worker_place import WorkerOrder


def main() -> int:
    """Serve until SIGTERM; returns the exit code."""

    def start() -> Coroutine[Any, Any, int]:
        from . import server

        order = WorkerOrder.from_json(sys.stdin.readline())
        return server.run(order.config, order.cluster, order.place)

    try:
        return event_loop.run(start)
    except StartupFailed as error:
        print(f"error: {error.message}\n  try: {error.hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
