"""The memory that the GPUs of one engine share; no GPU is used, allocations are simulated."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from baton.core.errors import StartupFailed
from baton.engine.kv.cuda_memory import MappingFailed
from baton.engine.parallel import peer_reduce
from baton.engine.parallel.peer_reduce import allocate_exchange, connect_peers
from baton.kernels import peer_reduce_triton

CPU = torch.device("cpu")


class Allocation:
    """Simulated memory; `frees` has an entry for each call of `free`."""

    def __init__(self, num_bytes: int = 8, device: torch.device = CPU) -> None:
        self.address, self.frees, self.num_bytes = 1000, [], num_bytes
        self._memory = torch.ones(num_bytes, dtype=torch.uint8)

    def tensor(self) -> torch.Tensor:
        return self._memory

    def free(self) -> None:
        self.frees.append("free")


class Mapped:
    def __init__(self, handle: bytes, log: list[str]) -> None:
        self.address = int.from_bytes(handle, "little")
        self._log = log

    def close(self) -> None:
        self._log.append(f"unmap {self.address}")


def test_each_rank_maps_the_memory_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Allocation()
    monkeypatch.setattr(peer_reduce, "map_handle", lambda handle, _: Mapped(handle, own.frees))
    peers = connect_peers(own, [b"\7", b"our own", b"\5", b"\6"], 1, CPU)
    assert peers is not None
    assert peers.exchange.bases.tolist() == [7, 1000, 5, 6]
    assert own.frees == []
    peers.close()
    assert own.frees == ["unmap 7", "unmap 5", "unmap 6", "free"]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("dim", [2304, 4096, 5120, 8192])
def test_what_is_sent_is_added_up_the_way_it_went(
    monkeypatch: pytest.MonkeyPatch, dim: int, num_ranks: int
) -> None:
    monkeypatch.setattr(peer_reduce, "map_handle", lambda handle, _: Mapped(handle, []))
    ways: list[bool] = []

    def record(*_: object, in_parts: bool) -> bool:
        ways.append(in_parts)
        return True

    for name in ("send_product", "peer_add_rms_norm", "peer_sum"):
        monkeypatch.setattr(peer_reduce, name, record)
    peers = connect_peers(Allocation(), [b"1"] * num_ranks, 0, CPU)
    assert peers is not None
    weight = torch.empty(dim, 16, dtype=torch.bfloat16)
    for num_rows in (33, 40, 64):
        x, residual = (torch.empty(num_rows, n, dtype=torch.bfloat16) for n in (16, dim))
        assert peers.send_product(x, weight, None)
        if __debug__:  # only assertions check this
            with pytest.raises(AssertionError):
                peers.send_product(x, weight, None)
            with pytest.raises(AssertionError):
                peers.all_reduce(residual)
            for summand, other in ((residual, residual), (None, residual.float())):
                with pytest.raises(AssertionError):
                    peers.add_rms_norm(summand, other, weight, 1e-5)
        assert peers.add_rms_norm(None, residual, weight, 1e-5)
        assert ways.pop() == ways.pop() and not ways
    assert not peers.send_product(x, torch.empty(8200, 16, dtype=torch.bfloat16), None)
    assert peers.add_rms_norm(residual, residual, weight, 1e-5)


@pytest.mark.parametrize("handles", [[b"1", b""], [b"", b"1"]])
def test_where_one_rank_has_none_no_rank_maps_any(handles: list[bytes]) -> None:
    own = [Allocation() if handle else None for handle in handles]
    assert [connect_peers(each, handles, rank, CPU) for rank, each in enumerate(own)] == [None] * 2
    assert [each.frees for each in own if each is not None] == [["free"]]


def test_what_cannot_be_mapped_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: bytes, device: torch.device) -> None:
        raise MappingFailed("invalid argument")

    monkeypatch.setattr(peer_reduce, "map_handle", refuse)
    with pytest.raises(StartupFailed, match="memory: invalid argument"):
        connect_peers(Allocation(), [b"1", b"2"], 0, CPU)


def test_memory_is_prepared_before_its_handle_is_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_reduce, "CudaAllocation", Allocation)
    monkeypatch.setattr(peer_reduce, "_reads_all_peers", lambda device: True)
    own = allocate_exchange(4, CPU)
    assert own is not None and own.num_bytes == peer_reduce_triton.EXCHANGE_BYTES
    memory = own.tensor()
    assert not memory[: peer_reduce_triton.SLOTS_AT].any(), "the first buffer's turn"
    words = memory[peer_reduce_triton.SLOTS_AT :].view(torch.bfloat16)
    assert torch.signbit(words).all() and not words.any(), "minus zeros: nothing is there yet"
    assert allocate_exchange(3, CPU) is None and allocate_exchange(16, CPU) is None
    monkeypatch.setattr(peer_reduce, "_reads_all_peers", lambda device: False)
    assert allocate_exchange(4, CPU) is None
