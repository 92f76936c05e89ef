"""Communicators between processes: gloo between CPUs, NCCL and peer memory between GPUs.

    store     a TCPStore of rank 0 on the loopback, for the rendezvous of the ranks (loopback.py)
    gloo      only gathers; sums are computed here, in the order of the ranks
    NCCL      large sums, gathers, broadcasts; small sums go through peers' memory (peer_reduce.py)
    TCP       between stages on several hosts, which NCCL would neither authenticate nor encrypt

Process groups are used as objects, without torch's global groups. A communicator connects the ranks
of one pipeline stage; torch_stages.py connects the stages. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ...core.engine_config import EngineConfig
from ...core.errors import StartupFailed
from ...kernels.layers.ops import Ops
from ...kernels.products.weights import Activations, Fp8Weight, Sent, Summand, Weight
from ..hosts.tcp_stages import StageLink, TcpStages
from ..kv.cuda_memory import export_handle
from ..model.communicator import Communicator, RankOps
from ..model.stages import Stages
from .loopback import connect_gloo
from .torch_stages import GlooStages, NcclStages, set_up_nccl

if TYPE_CHECKING:
    from .peer_reduce import PeerReduce  # needs Triton

# Sends this rank's handle of its exchange memory (empty on a CPU) to the other ranks; returns the
# handles of all ranks in order, once all have called it. Unlike the store, other processes cannot
# read it.
Meet = Callable[[bytes], list[bytes]]


def make_communicator(
    config: EngineConfig,
    rank: int,
    store: c10d.Store,
    meet: Meet,
    link: StageLink | None = None,
) -> Communicator:
    """The communicator for this rank's device. `link`: only for an engine on several hosts, where
    `store` is that of this host. Raises StartupFailed."""
    size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    stage, rank = divmod(rank, size)
    of_stage = c10d.PrefixStore(f"stage {stage}", store)
    of_column = c10d.PrefixStore(f"column {rank}", store)

    def meet_stage(handle: bytes) -> list[bytes]:
        return meet(handle)[stage * size : (stage + 1) * size]

    stages, communicator = Stages(), Communicator()
    is_on_gpu = config.device != "cpu" and torch.cuda.is_available()
    # Rank 0 detects a hung rank; these timeouts end the collectives of ranks that outlive it.
    to_connect_s = config.rank_start_timeout_s + config.rank_timeout_s
    if link is not None:
        stages = tcp = TcpStages(link, stage, num_stages, to_connect_s, is_on_gpu=is_on_gpu)
        meet = _meet_with_addresses(tcp, meet, "GPU" if is_on_gpu else "CPU")
    if not is_on_gpu:
        timeouts_s = (to_connect_s, 2 * config.rank_timeout_s)
        if link is None and num_stages > 1:
            join = partial(connect_gloo, of_column, stage, num_stages, timeouts_s, "stages")
            stages = GlooStages(stage, num_stages, join)
        if size > 1:
            join = partial(connect_gloo, of_stage, rank, size, timeouts_s, "ranks")
            communicator = GlooCommunicator(rank, size, join, meet_stage)
    else:
        device = torch.device("cuda", torch.device(config.device).index or 0)
        if link is None and num_stages > 1:
            stages = NcclStages(of_column, stage, num_stages, device)
        if size > 1:
            communicator = NcclCommunicator(of_stage, rank, size, device, meet_stage)
    if size == 1:
        communicator = StageOfOne(meet_stage)
    communicator.stages = stages
    return communicator


def _meet_with_addresses(stages: TcpStages, meet: Meet, kind: str) -> Meet:
    """`meet` that also exchanges the address at which each rank listens for the next stage, and the
    `kind` of its device, which must be the same on all ranks."""

    def meet_all(handle: bytes) -> list[bytes]:
        packed = meet(msgspec.msgpack.encode((stages.address, kind, handle)))
        infos = [msgspec.msgpack.decode(each, type=tuple[str, str, bytes]) for each in packed]
        stages.addresses = [address for address, _, _ in infos]
        for rank, (_, other, _) in enumerate(infos):
            if other != infos[0][1]:
                raise StartupFailed(
                    f"--device: rank {rank} computes on a {other}, rank 0 on a {infos[0][1]}",
                    hint="--gpus on each host, or --device cpu on all",
                )
        return [handle for _, _, handle in infos]

    return meet_all


class StageOfOne(Communicator):
    """The only rank of its stage."""

    def __init__(self, meet: Meet) -> None:
        self._meet = meet

    def connect(self) -> None:
        self._meet(b"")
        self.stages.connect()

    def close(self) -> None:
        self.stages.close()


class GlooCommunicator(Communicator):
    """Ranks on CPUs. Every sum adds the ranks in order, whatever the shape: a row's sum does not
    depend on the rows around it."""

    def __init__(self, rank: int, size: int, join: Callable[[], Any], meet: Meet) -> None:
        """`join` makes the group of this rank."""
        self.rank, self.size = rank, size
        self._join, self._meet = join, meet
        self._group: Any = None

    def connect(self) -> None:
        self._meet(b"")
        self._group = self._join()
        self.stages.connect()

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._gather(x).unbind()
        for other in others:
            first += other
        return first

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._gather(x).unbind(), dim=1)

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._gather(x)[0])

    def least(self, value: int) -> int:
        return int(self._gather(torch.tensor([value])).min())

    def _gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]"""
        parts = x.new_empty(self.size * len(x), *x.shape[1:])
        self._group._allgather_base(parts, x.contiguous()).wait()
        gathered: Tensor = parts.view(self.size, *x.shape)
        return gathered

    def close(self) -> None:
        self.stages.close()
        self._group = None


class NcclCommunicator(Communicator):
    """Ranks on GPUs of one host. Operations are launched on the current stream without waiting, and
    can be captured in CUDA graphs. Sums of small tensors do not depend on their shape."""

    def __init__(
        self, store: c10d.Store, rank: int, size: int, device: torch.device, meet: Meet
    ) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._device = device
        self._meet = meet
        self._group: Any = None
        self.peers: PeerReduce | None = None

    def connect(self) -> None:
        from .peer_reduce import allocate_exchange, connect_peers

        own = allocate_exchange(self.size, self._device)
        handle = b"" if own is None else export_handle(own.address, self._device)
        handles = self._meet(handle)
        set_up_nccl(self._device)
        options = c10d.ProcessGroupNCCL.Options()
        try:
            self._group = c10d.ProcessGroupNCCL(self._store, self.rank, self.size, options)
            self.least(0)  # connects now, before any capture
        except RuntimeError as error:
            raise StartupFailed(f"NCCL does not connect the GPUs: {error}") from error
        self.peers = connect_peers(own, handles, self.rank, self._device)
        self.stages.connect()

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.peers is not None and self.peers.can_reduce(x):
            return self.peers.all_reduce(x)
        return self.sum_by_nccl(x)

    def rank_ops(self, ops: Ops) -> RankOps:
        return _PeerOps(ops, self)

    def sum_by_nccl(self, x: Tensor) -> Tensor:
        """`all_reduce` of any size, in place."""
        options = c10d.AllreduceOptions()
        options.asyncOp = False
        self._group.allreduce([x], options)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        num_rows, num_columns = x.shape
        parts = x.new_empty(self.size * num_rows, num_columns)
        options = c10d.AllgatherOptions()
        options.asyncOp = False
        self._group._allgather_base(parts, x.contiguous(), options)
        by_row = parts.view(self.size, num_rows, num_columns).transpose(0, 1)
        return by_row.reshape(num_rows, self.size * num_columns)

    def broadcast(self, x: Tensor) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, False
        self._group.broadcast([x], options)

    def least(self, value: int) -> int:
        values = self.all_gather(torch.tensor([[value]], device=self._device))
        return int(values.min())

    def close(self) -> None:
        self.stages.close()
        if self.peers is not None:
            self.peers.close()
        if self._group is not None:
            self._group.abort()
        self._group = self.peers = None


class _PeerOps(RankOps):
    """RankOps that send products to peers' memory, and add up small summands there."""

    def __init__(self, ops: Ops, communicator: NcclCommunicator) -> None:
        super().__init__(ops, communicator)
        self._ranks = communicator

    def summand(self, x: Activations, weight: Weight, bias: Tensor | None) -> Summand:
        peers = self._ranks.peers
        # No kernel sends a product with an FP8 weight.
        if (
            peers is not None
            and isinstance(x, Tensor)
            and isinstance(weight, Tensor)
            and peers.send_product(x, weight, bias)
        ):
            return Sent()
        return self.linear(x, weight, bias)

    def add_rms_norm(
        self,
        x: Summand,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        reader: Fp8Weight | None = None,
    ) -> Activations:
        peers = self._ranks.peers
        if isinstance(x, Sent):
            assert peers is not None
            return peers.add_rms_norm(None, residual, weight, eps)
        if peers is not None and isinstance(x, Tensor) and peers.can_reduce_rows(x):
            return peers.add_rms_norm(x, residual, weight, eps)
        return super().add_rms_norm(x, residual, weight, eps, reader)
