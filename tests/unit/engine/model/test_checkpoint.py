"""Loading safetensors, refusing everything else, and distinguishing checkpoints."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from safetensors.torch import load_file, save_file

from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.core.model_dir import resolve_model_dir
from baton.engine.model.weights.checkpoint import load_weights
from baton.engine.model.weights.dummy_weights import fill_dummy_weights
from baton.engine.model.weights.targets import TensorCut, WeightTarget
from baton.engine.model.weights.weight_files import weight_files, weights_bytes, weights_identity

DEMO = resolve_model_dir("demo")
TENSORS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "b.weight": torch.arange(5.0),
    "c.bias": torch.ones(2, dtype=torch.bfloat16),
}


def targets() -> dict[str, WeightTarget]:
    """A view into a merged matrix, a bfloat16 tensor and a bias."""
    merged = torch.empty(9, 4)
    return {
        "a.weight": WeightTarget(merged[3:6]),
        "b.weight": WeightTarget(torch.empty(5, dtype=torch.bfloat16)),
        "c.bias": WeightTarget(torch.empty(2)),
    }


def save(folder: Path, **changes: torch.Tensor | None) -> Path:
    tensors = {k: v for k, v in (TENSORS | changes).items() if v is not None}
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_sharded(folder: Path) -> Path:
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        file_name = f"model-{number}.safetensors"
        save_file({name: tensor}, folder / file_name)
        weight_map[name] = file_name
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("write", [save, save_sharded])
def test_fills_targets_and_reports_each(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    ours, seen = targets(), list[tuple[int, int]]()
    load_weights(write(tmp_path), ours, on_progress=lambda *progress: seen.append(progress))
    for name, tensor in TENSORS.items():
        assert torch.equal(ours[name].tensor.float(), tensor.float())
    num_bytes = 3 * 4 * 4 + 5 * 2 + 2 * 4
    assert len(seen) == 3
    assert seen[-1] == (num_bytes, num_bytes)


@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 1, 3), (1, 1, 3), (0, 3, 3), (0, 0, 3)])
def test_reads_the_part_that_is_asked_for(tmp_path: Path, dim: int, start: int, stop: int) -> None:
    whole = TENSORS["a.weight"]
    wanted = whole.narrow(dim, start, stop - start)
    target = WeightTarget(torch.empty(wanted.shape), TensorCut(dim, start, whole.shape[dim]))
    load_weights(save(tmp_path), targets() | {"a.weight": target})
    assert torch.equal(target.tensor, wanted)
    wrong = WeightTarget(torch.empty(wanted.shape), TensorCut(dim, start, whole.shape[dim] + 1))
    with pytest.raises(StartupFailed, match="has shape"):
        load_weights(tmp_path, targets() | {"a.weight": wrong})


def test_refuses_a_missing_an_extra_and_a_mis_shaped_tensor(tmp_path: Path) -> None:
    with pytest.raises(StartupFailed, match=r"lacks the tensor b\.weight"):
        load_weights(save(tmp_path, **{"b.weight": None}), targets())
    with pytest.raises(StartupFailed, match=r"has the tensor d\.weight"):
        load_weights(save(tmp_path, **{"d.weight": torch.ones(1)}), targets())
    with pytest.raises(StartupFailed, match=r"a\.weight .* shape \[4, 3\].* \[3, 4\]"):
        load_weights(save(tmp_path, **{"a.weight": torch.ones(4, 3)}), targets())
    with pytest.raises(StartupFailed, match=r"b\.weight .* type I8"):
        load_weights(save(tmp_path, **{"b.weight": torch.ones(5, dtype=torch.int8)}), targets())


def test_reads_over_what_is_ignored_or_derived(tmp_path: Path) -> None:
    extra = {"lm_head.weight": torch.ones(1), "layers.0.rotary_emb.inv_freq": torch.ones(1)}
    load_weights(save(tmp_path, **extra), targets(), ignored=frozenset({"lm_head.weight"}))


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[:20],
        lambda raw: b"",
        lambda raw: (1 << 62).to_bytes(8, "little") + raw[8:],
        lambda raw: raw[:8] + b"x" + raw[9:],
        lambda raw: raw.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1),
        lambda raw: pickle.dumps({"a.weight": [1.0]}),
    ],
    ids=["cut", "cut header", "empty", "header length", "not JSON", "offsets", "pickle"],
)
def test_refuses_damaged_files(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = save(tmp_path) / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StartupFailed, match="no valid safetensors file"):
        load_weights(tmp_path, targets())


def test_never_opens_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(StartupFailed) as caught:
        weight_files(tmp_path)
    assert "pytorch_model.bin is a pickle" in caught.value.hint
    assert "convert" in caught.value.hint


def test_a_directory_without_weights_hints_at_dummy_ones(tmp_path: Path) -> None:
    with pytest.raises(StartupFailed) as caught:
        weight_files(tmp_path)
    assert "--load-format dummy" in caught.value.hint


@pytest.mark.parametrize(
    "weight_map",
    [{"a": "../x.safetensors"}, {"a": "/etc/passwd"}, {"a": "x.bin"}, {"a": [1]}, {}, None],
)
def test_an_index_may_name_files_beside_it_only(tmp_path: Path, weight_map: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(StartupFailed, match="weight_map"):
        weight_files(tmp_path)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    (save_sharded(tmp_path) / "model-1.safetensors").unlink()
    with pytest.raises(StartupFailed, match=r"model-1\.safetensors"):
        load_weights(tmp_path, targets())


def test_identity_changes_with_name_type_shape_and_content(tmp_path: Path) -> None:
    big = torch.randn(600, 1000, generator=torch.Generator().manual_seed(0))
    variants = {
        "base": {"w": big},
        "renamed": {"v": big},
        "reshaped": {"w": big.view(1000, 600).contiguous()},
        "other type": {"w": big.bfloat16()},
        "other content": {"w": big + 1e-3},
        "last value": {"w": torch.cat((big.view(-1)[:-1], torch.zeros(1))).view(600, 1000)},
    }
    identities = set()
    for name, tensors in variants.items():
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        identities.add(weights_identity(folder))
        assert weights_identity(folder) in identities
    assert len(identities) == len(variants)


def test_identity_does_not_depend_on_where_the_directory_lies(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        save(tmp_path / name)
    assert weights_identity(tmp_path / "x") == weights_identity(tmp_path / "y")


def test_dummy_weights_are_seeded_by_name() -> None:
    def fill(seed: int, names: list[str]) -> dict[str, torch.Tensor]:
        weights = {name: torch.empty(300, 200) for name in names}
        fill_dummy_weights({k: WeightTarget(v) for k, v in weights.items()}, std=0.1, seed=seed)
        return weights

    one, other_order = fill(1, ["a", "b"]), fill(1, ["b", "a"])
    assert torch.equal(one["a"], other_order["a"])
    assert not torch.equal(one["a"], one["b"])
    assert not torch.equal(one["a"], fill(2, ["a"])["a"])
    assert one["a"].std().item() == pytest.approx(0.1, rel=0.02)
    assert one["a"].mean().item() == pytest.approx(0, abs=0.002)
    part = WeightTarget(torch.empty(300, 50), TensorCut(1, 120, 200))
    fill_dummy_weights({"a": part}, std=0.1, seed=1)
    assert torch.equal(part.tensor, one["a"][:, 120:170])
    vectors = {"norm.weight": torch.empty(7), "q.bias": torch.empty(7)}
    fill_dummy_weights({k: WeightTarget(v) for k, v in vectors.items()}, std=0.1, seed=0)
    assert vectors["norm.weight"].eq(1).all() and vectors["q.bias"].eq(0).all()


def test_transformers_shards_are_read(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, max_shard_size="200KB")
    assert len(weight_files(tmp_path)) > 2
    state = model.state_dict()
    ours = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    load_weights(tmp_path, {name: WeightTarget(tensor) for name, tensor in ours.items()})
    assert all(torch.equal(ours[name], state[name]) for name in state)
    assert set(load_file(weight_files(tmp_path)[0])) < set(state)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("auto", 2), ("float16", 2), ("float32", 4)])
def test_the_bytes_of_weights_are_known_before_they_are_read(dtype: str, num_bytes: int) -> None:
    config = EngineConfig(model="demo", dtype=dtype)
    count = sum(tensor.numel() for tensor in load_file(weight_files(DEMO)[0]).values())
    assert weights_bytes(config) == count * num_bytes
    dummy = weights_bytes(replace(config, load_format="dummy"))
    assert dummy == pytest.approx(count * num_bytes, rel=1e-3)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 8, b"\2" + bytes(7) + b"[]", b"\7" + bytes(7) + b'{"a":1}', b"[" * 100_000],
)
def test_a_broken_header_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text((DEMO / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(StartupFailed, match=r"cannot read .*model.safetensors"):
        weights_bytes(EngineConfig(model=str(tmp_path)))
