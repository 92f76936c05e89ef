"""The effect of --kv-cache-dtype: the pool's size, compatibility of engines, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from fakes.handoff.pieces import of_heads

from baton.core.engine_config import EngineConfig
from baton.core.errors import FingerprintMismatch, StartupFailed
from baton.engine.execution.device import choose_kv_dtype
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.kv_memory import CpuKvMemory, KvLayout
from baton.engine.model.fingerprint import short
from baton.engine.model.model_config import read_model_config
from baton.engine.model.weights.placement import Placement
from baton.kernels.kv.kv_8bit import dequantize, store_kv_8bit
from baton.kv_transfer.protocol.messages import Hello
from baton.kv_transfer.protocol.pairing import require_equal
from baton.kv_transfer.window.block_pieces import BlockCut

KINDS = ("fp8", "int8")


def config_of(folder: Path, **changes: object) -> EngineConfig:
    write_checkpoint(folder, seed=3)
    fields: dict[str, object] = {"model": str(folder), "device": "cpu", "cpu_kv_bytes": 4 << 20}
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_block_takes_a_byte_a_value_and_four_a_scale(dtype: torch.dtype) -> None:
    layout = KvLayout(32, 8, 16, 128, dtype)
    assert layout.block_bytes == 32 * 2 * 8 * 16 * (128 + 4)
    assert layout.head_bytes == 16 * (128 + 4)
    in_16 = KvLayout(32, 8, 16, 128, torch.bfloat16)
    assert in_16.block_bytes / layout.block_bytes == pytest.approx(1.94, abs=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_holds_more_tokens(kind: str, tmp_path: Path) -> None:
    whole, halves = (
        ModelRunner(config_of(tmp_path, dtype="bfloat16", kv_cache_dtype=each))
        for each in ("auto", kind)
    )
    dim = whole.model_config.head_dim
    assert halves.kv.num_blocks == (4 << 20) // halves.kv.block_bytes
    in_blocks_of_32 = int(whole.kv.num_blocks * 2 * dim / (dim + 4)) // 2
    assert halves.kv.num_blocks >= in_blocks_of_32
    for runner in (whole, halves):
        runner.close()


def test_engines_that_store_otherwise_refuse_each_other(tmp_path: Path) -> None:
    runners = [
        ModelRunner(config_of(tmp_path, kv_cache_dtype=kind, block_size=16))
        for kind in ("auto", *KINDS)
    ]
    fingerprints = [runner.fingerprint for runner in runners]
    assert len({short(fields) for fields in fingerprints}) == 3
    for fields, kind in zip(fingerprints, ("auto", *KINDS), strict=True):
        assert fields == {**fingerprints[0], "kv_cache_dtype": kind}
    there, here = (Hello(str(i) * 32, fields) for i, fields in enumerate(fingerprints[:2]))
    with pytest.raises(FingerprintMismatch, match="kv_cache_dtype: 'fp8' here, 'auto' there"):
        require_equal(here, there)
    for runner in runners:
        runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_heads_whose_scales_would_not_be_aligned_are_refused(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, head_dim=6)
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_cache_dtype=kind)
    with pytest.raises(StartupFailed, match=f"--kv-cache-dtype {kind} with heads of 6 dimensions"):
        ModelRunner(config)


def test_a_gpu_without_the_type_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    placement = Placement(torch.device("cuda"), torch.bfloat16)
    model = read_model_config(tmp_path)
    config = EngineConfig(model=str(tmp_path), kv_cache_dtype="fp8")
    with pytest.raises(StartupFailed, match="--kv-cache-dtype fp8 on an A100") as refused:
        choose_kv_dtype(config, model, placement)
    assert refused.value.hint == "--kv-cache-dtype int8"
    config = EngineConfig(model=str(tmp_path), kv_cache_dtype="int8")
    assert choose_kv_dtype(config, model, placement) == torch.int8


def test_some_heads_of_a_block_take_their_scales_along() -> None:
    """Rank 1 of two pulls the second head, with its scales, from an engine that holds both."""
    layout = KvLayout(3, 2, 4, 8, torch.float8_e4m3fn)
    source = CpuKvMemory(layout, 4)
    k, v = torch.randn(2, 4, 2, 8)
    for layer in range(3):
        store_kv_8bit(source.tensor, layer, k, v, torch.full((4,), 2), torch.arange(4))
    piece = of_heads(1, 0, 1, 2, 1, num_layers=3)
    mine = KvLayout(3, 1, 4, 8, torch.float8_e4m3fn)
    cut = BlockCut.of(piece, mine.block_bytes)
    assert cut.source_block_bytes == layout.block_bytes
    size = layout.block_bytes
    pulled = bytearray(cut.there(source.view[2 * size : 3 * size]).tobytes())
    block = torch.frombuffer(pulled, dtype=mine.dtype).view(mine.block_shape)
    expected = dequantize(source.tensor[2, :, :, 1].flatten(0, 1), torch.float32)
    assert torch.equal(dequantize(block[:, :, 0].flatten(0, 1), torch.float32), expected)
    assert (expected[0] - k[:, 1]).abs().max() < 0.3
    source.close()
