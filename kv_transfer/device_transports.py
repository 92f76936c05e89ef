"""The transports of one rank's device, best first, and what it serves to other hosts."""

from __future__ import annotations

from functools import partial

from ..core.channels.engine_tls import EngineTls, WrapSocket
from ..core.config import NodeConfig
from ..core.errors import StartupFailed
from ..engine.kv.kv_memory import CpuKvMemory, CudaKvMemory
from .network.data_server import MakeOutlet
from .network.data_wire import Mode
from .network.tcp import CudaBlockBytes, HostBlockBytes, MakeBytes, TcpOutlet, TcpTransport
from .shm.shm import ShmTransport
from .window.transport import Transport


def transports(
    kv: CpuKvMemory | CudaKvMemory,
    config: NodeConfig,
    tls: EngineTls | None,
    *,
    is_spread: bool = False,
) -> list[Transport]:
    """The transports that can copy blocks to the pool `kv`, best first; without NCCL for an engine
    that `is_spread` over several hosts, since its peers would have to search each host.

    Raises StartupFailed if `--kv-transport` names one that this device does not have.
    """
    wanted = config.kv_transport
    tcp = TcpTransport(
        _make_bytes(kv), kv.block_bytes, anywhere=wanted == TcpTransport.name, wrap=wrapping(tls)
    )
    if isinstance(kv, CpuKvMemory):
        found: list[Transport] = [ShmTransport(kv), tcp]
    else:
        from .cuda_ipc.cuda_ipc import CudaIpcTransport, CudaStagedTransport  # needs Triton

        method = None if config.kv_copy == "auto" else config.kv_copy
        nccl = [] if is_spread else [_nccl(kv, wrapping(tls))]
        found = [CudaIpcTransport(kv, method), *nccl, CudaStagedTransport(kv), tcp]
    chosen = [transport for transport in found if wanted in ("auto", transport.name)]
    if not chosen:
        names = ", ".join(transport.name for transport in found)
        raise StartupFailed(f"--kv-transport {wanted} is not for this device", hint=names)
    return chosen


def wrapping(tls: EngineTls | None) -> WrapSocket:
    """How a puller wraps a new data connection: in TLS, or not at all."""
    return tls.puller_wrap() if tls is not None else lambda connection: connection


def outlets(kv: CpuKvMemory | CudaKvMemory, *, is_spread: bool = False) -> dict[Mode, MakeOutlet]:
    """The outlets that can send blocks of `kv` to other hosts; `is_spread`: see `transports`."""
    ways: dict[Mode, MakeOutlet] = {Mode.BYTES: partial(TcpOutlet, _make_bytes(kv))}
    if not (isinstance(kv, CpuKvMemory) or is_spread):
        from .nccl.nccl import NcclOutlet
        from .nccl.nccl_lane import open_source_lane

        ways[Mode.NCCL] = partial(NcclOutlet, partial(open_source_lane, kv))
    return ways


def _nccl(kv: CudaKvMemory, wrap: WrapSocket) -> Transport:
    from .nccl.nccl import NcclTransport
    from .nccl.nccl_lane import open_puller_lane
    from .nccl.nccl_pair import new_unique_id

    return NcclTransport(partial(open_puller_lane, kv), kv.block_bytes, new_unique_id, wrap)


def _make_bytes(kv: CpuKvMemory | CudaKvMemory) -> MakeBytes:
    if isinstance(kv, CpuKvMemory):
        return partial(HostBlockBytes, kv)
    return partial(CudaBlockBytes, kv)
