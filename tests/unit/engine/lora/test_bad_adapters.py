"""Errors in an adapter are reported with its file, before memory is allocated."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VARIANTS, write_checkpoint
from fakes.adapters import PREFIX, write_adapter
from torch import Tensor

from baton.core.errors import AdapterRefused
from baton.engine.lora import adapter_files
from baton.engine.lora.adapter_files import read_adapter
from baton.engine.lora.layout import AdapterLayout
from baton.engine.model.construction.decoder import make_decoder
from baton.engine.model.model_config import read_model_config
from baton.engine.model.weights.placement import Placement

Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(folder)
    return folder


def layout_of(base: Path) -> AdapterLayout:
    placement = Placement(torch.device("meta"), torch.float32)
    return AdapterLayout.of(make_decoder(read_model_config(base, None), placement))


def read(folder: Path, base: Path) -> int:
    return read_adapter(folder, layout_of(base), 8, torch.float32).rank


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return change


def changed(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = value(tensors[name]).contiguous()

    return change


def without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def number(value: float) -> Callable[[Tensor], Tensor]:
    def put(tensor: Tensor) -> Tensor:
        tensor[0, 0] = value
        return tensor

    return put


CONFIGS: dict[str, Any] = {
    "peft_type": "LOHA",
    "r": 9,
    "lora_alpha": 0,
    "use_rslora": "yes",
    "use_dora": True,
    "bias": "lora_only",
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"q_proj": 2},
    "fan_in_fan_out": True,
    "target_modules": ["q_proj", "embed_tokens"],
}


@pytest.mark.parametrize("field", CONFIGS)
def test_fields_of_the_configuration(tmp_path: Path, base: Path, field: str) -> None:
    folder = write_adapter(tmp_path / "bad", base, seed=0)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: CONFIGS[field]}))
    with pytest.raises(AdapterRefused, match=rf"adapter_config\.json: {field} "):
        read(folder, base)


TENSORS: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "half is missing": (without(f"{Q}.lora_B.weight"), r"q_proj\.lora_B"),
    "shape": (changed(f"{Q}.lora_A.weight", lambda t: t[:, :-1]), r"q_proj\.lora_A.* is \[4, 95\]"),
    "rank": (changed(f"{Q}.lora_A.weight", lambda t: t[:3]), r"q_proj\.lora_A.* is \[3, 96\]"),
    "type": (changed(f"{Q}.lora_A.weight", lambda t: t.double()), r"q_proj\.lora_A.* is in F64"),
    "not a number": (
        changed(f"{Q}.lora_B.weight", number(float("nan"))),
        r"lora_B.*finite",
    ),
    "infinite": (changed(f"{Q}.lora_A.weight", number(float("inf"))), r"q_proj\.lora_A.*finite"),
    "another base": (
        renamed(f"{Q}.lora_A.weight", f"{PREFIX}model.layers.7.self_attn.q_proj.lora_A.weight"),
        r"model\.layers\.7",
    ),
    "embeddings": (
        renamed(f"{Q}.lora_A.weight", f"{PREFIX}model.embed_tokens.lora_embedding_A"),
        "lora_embedding_A",
    ),
    "DoRA": (
        renamed(f"{Q}.lora_A.weight", f"{Q}.lora_magnitude_vector"),
        "lora_magnitude_vector",
    ),
    "nothing": (lambda t: t.clear(), "no tensors"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(tmp_path: Path, base: Path, name: str) -> None:
    change, text = TENSORS[name]
    folder = write_adapter(tmp_path / "bad", base, seed=0, change=change)
    with pytest.raises(AdapterRefused, match=rf"(?s)adapter_model\.safetensors.*{text}"):
        read(folder, base)


def test_files(tmp_path: Path, base: Path) -> None:
    with pytest.raises(AdapterRefused, match="no folder"):
        read(tmp_path / "nowhere", base)
    folder = write_adapter(tmp_path / "one", base, seed=0)
    assert read(folder, base) == 4
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    with pytest.raises(AdapterRefused, match=r"cannot read .*adapter_model\.safetensors"):
        read(folder, base)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterRefused, match="pickle"):
        read(folder, base)
    weights.write_bytes(whole)
    config.write_text("[")
    with pytest.raises(AdapterRefused, match=r"adapter_config\.json"):
        read(folder, base)


def replaced(path: Path, other: Path) -> None:
    other.rename(path)


def overwritten(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def removed(path: Path, other: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [replaced, overwritten, removed])
def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, Path], None],
) -> None:
    """A file changed while it is read is refused: old tensors would get the new file's digest."""
    folder = write_adapter(tmp_path / "one", base, seed=1)
    other = write_adapter(tmp_path / "two", base, seed=2) / adapter_files.FILE
    os.utime(folder / adapter_files.FILE, (1e9, 1e9))
    digest = adapter_files._digest

    def digest_of_changed(path: Path, *more: Any) -> str:
        change(path, other)
        return digest(path, *more)

    monkeypatch.setattr(adapter_files, "_digest", digest_of_changed)
    with pytest.raises(AdapterRefused, match=r"adapter_model\.safetensors"):
        read(folder, base)


def test_adapters_of_experts(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_checkpoint(base, **VARIANTS["qwen3-moe, a dense layer"])
    expert = f"{PREFIX}model.layers.0.mlp.experts.3.up_proj.lora_A.weight"
    q = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
    folder = write_adapter(tmp_path / "bad", base, seed=0, change=renamed(q, expert))
    with pytest.raises(AdapterRefused, match=r"experts\.3\.up_proj.*experts are not served"):
        read(folder, base)


def test_a_digest_is_of_all_that_is_computed(tmp_path: Path, base: Path) -> None:
    layout = layout_of(base)
    folders = [
        write_adapter(tmp_path / "a", base, seed=1),
        write_adapter(tmp_path / "b", base, seed=1),
        write_adapter(tmp_path / "c", base, seed=2),
        write_adapter(tmp_path / "d", base, seed=1, alpha=9.0),
        write_adapter(tmp_path / "e", base, seed=1, use_rslora=True),
    ]
    digests = [read_adapter(each, layout, 8, torch.float32).digest for each in folders]
    assert digests[0] == digests[1] and len({*digests}) == 4
