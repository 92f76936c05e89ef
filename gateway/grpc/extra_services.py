"""gRPC services that are there where their stubs are installed: vLLM's, with the extra `smg`."""

from __future__ import annotations

import logging
from typing import Any

from google.protobuf.runtime_version import VersionError

from ..admission.front_door import FrontDoor
from ..engines.engine_table import EngineTable
from ..security.gate import Gate

log = logging.getLogger(__name__)


def add_extra_services(
    server: Any, door: FrontDoor, gate: Gate, table: EngineTable
) -> tuple[str, ...]:
    """Add what can be added to `server`, a gRPC server or what stands before one; their names."""
    try:
        from . import vllm_engine
    except ImportError:
        return ()
    except VersionError as error:
        log.warning("smg-grpc-proto is installed, but does not fit protobuf here: %s", error)
        return ()
    service = vllm_engine.VllmEngineService(door, gate, table)
    vllm_engine.add_to_server(service, server)
    return (vllm_engine.SERVICE_NAME,)
