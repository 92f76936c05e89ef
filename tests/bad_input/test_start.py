"""Bad arguments of a process at its start: flags (B93) and model directories (B94)."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.core import flags
from baton.core.config import ClusterConfig, GatewayConfig, NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.engine.model.model_config import read_model_config
from baton.engine.model.weights.checkpoint import load_weights
from baton.engine.model.weights.targets import WeightTarget
from baton.engine.model.weights.weight_files import weight_files
from baton.gateway.validation.served_model import ServedModel
from baton.node.supervisor.supervisor import _node_of_engine

_PARSER_OF = {
    "gateway": (GatewayConfig, ClusterConfig),
    "node": (EngineConfig, NodeConfig, ClusterConfig),
    "up": (UpConfig, EngineConfig, NodeConfig, GatewayConfig, ClusterConfig),
}

BAD_FLAGS = [
    ("gateway", ["--nope", "1"]), ("node", ["--kv-transfer-params", "{}"]), ("up", ["extra"]),
    ("gateway", ["--grpc-port", "x"]), ("gateway", ["--grpc-port", "70000"]),
    ("gateway", ["--http-port", "-1"]), ("gateway", ["--http-port", "65536"]),
    ("gateway", ["--http-port", "1.5"]), ("node", ["--port", "70000"]),
    ("node", ["--lease-s", "-5"]), ("node", ["--lease-s", "nan"]), ("node", ["--lease-s", "inf"]),
    ("node", ["--lease-s", "1e999"]), ("node", ["--heartbeat-s", "-0.1"]),
    ("gateway", ["--heartbeat-timeout-s", "-1"]), ("gateway", ["--max-num-requests", "0"]),
    ("gateway", ["--max-num-requests", "-1"]), ("gateway", ["--max-request-s", "soon"]),
    ("node", ["--max-num-seqs", "0"]), ("node", ["--num-kv-blocks", "-4"]),
    ("node", ["--max-model-len", "0"]), ("node", ["--device", "tpu"]),
    ("node", ["--dtype", "int3"]), ("node", ["--kv-transport", "carrier-pigeon"]),
    ("gateway", ["--tool-call-parser", "os.system"]), ("node", ["--load-format", "pickle"]),
    ("node", ["--block-size"]), ("up", ["--num-prefill-nodes", "0"]),
]  # fmt: skip


@pytest.mark.parametrize(("command", "argv"), BAD_FLAGS, ids=lambda value: " ".join(value))
def test_bad_flags(command: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The process exits with status 2 and names the flag, without a traceback."""
    parser = argparse.ArgumentParser(prog=command)
    flags.add_flags(parser, *_PARSER_OF[command])
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(argv)
    assert ended.value.code == 2
    reported = capsys.readouterr().err.rpartition("error: ")[2]
    assert argv[0] in reported and "Traceback" not in reported


@pytest.mark.parametrize("value", ["70000", "x"])
def test_bad_environment(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A default from the environment is validated like a flag."""
    monkeypatch.setenv("BATON_GRPC_PORT", value)
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, GatewayConfig)
    with pytest.raises(SystemExit):
        parser.parse_args([])


BAD_NODES: list[tuple[str, dict[str, Any]]] = [
    ("heartbeat-s", {"heartbeat_s": 0.0}), ("heartbeat-s", {"heartbeat_s": 35.0}),
    ("lease-s", {"lease_s": 0.0}), ("credit-fraction", {"credit_fraction": 7.0}),
    ("credit-fraction", {"credit_fraction": 0.0}), ("advertise foo", {"advertise": "foo"}),
    ("advertise b:", {"advertise": "a:1,b:"}), ("advertise :1", {"advertise": ":1"}),
    ("advertise  b:1", {"advertise": "a:1, b:1"}), ("advertise a:0", {"advertise": "a:0"}),
    ("advertise-engine foo", {"advertise_engine": "foo"}),
    ("advertise-engine a:65536", {"advertise_engine": "a:65536"}),
]  # fmt: skip


@pytest.mark.parametrize(("flag", "fields"), BAD_NODES, ids=str)
def test_bad_nodes(flag: str, fields: dict[str, Any]) -> None:
    """Values that parse but are invalid give a line that names the flag."""
    with pytest.raises(StartupFailed, match=f"--{flag}"):
        NodeConfig(**fields)


@pytest.mark.parametrize(
    ("flag", "fields"),
    [
        ("engine-port", {"engine_port": 65535}),
        ("advertise-engine", {"advertise_engine": "a:65535"}),
    ],
)
def test_the_last_engine_s_port_is_one(flag: str, fields: dict[str, Any]) -> None:
    node = NodeConfig(num_engines=2, **fields)
    _node_of_engine(node, "n.0", 0)
    with pytest.raises(StartupFailed, match=f"--{flag}"):
        _node_of_engine(node, "n.1", 1)


def test_addresses_may_be_several_and_ipv6() -> None:
    NodeConfig(advertise="a.example:1,[fe80::1]:65535", advertise_engine="")


def test_unknown_settings_are_named() -> None:
    with pytest.raises(StartupFailed, match="nope"):
        flags.from_json(NodeConfig, {"nope": 1, "host": "::1"})


# --- model directories ----------------------------------------------------------------------------


class _Bomb:
    """Creates a file if it is ever unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self._mark,))


def _target() -> dict[str, WeightTarget]:
    return {"w": WeightTarget(torch.empty(2, 2))}


def _safetensors(header: bytes, data: bytes = b"\0" * 16, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _header(**tensors: object) -> bytes:
    return json.dumps(tensors).encode()


_W = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
BAD_FILES = {
    "empty": b"",
    "short": b"\x01\0",
    "length-beyond-the-file": _safetensors(_header(w=_W), length=1 << 40),
    "length-of-2**64-1": _safetensors(_header(w=_W), length=(1 << 64) - 1),
    "length-0": _safetensors(_header(w=_W), length=0),
    "header-no-json": _safetensors(b"{nope"),
    "header-a-list": _safetensors(b"[]"),
    "header-deep": _safetensors(b'{"a":' * 100_000),
    "offsets-beyond": _safetensors(_header(w=_W | {"data_offsets": [0, 1 << 40]})),
    "offsets-backwards": _safetensors(_header(w=_W | {"data_offsets": [16, 0]})),
    "offsets-negative": _safetensors(_header(w=_W | {"data_offsets": [-16, 0]})),
    "offsets-overlap": _safetensors(_header(w=_W, v=_W)),
    "shape-and-size-differ": _safetensors(_header(w=_W | {"shape": [1 << 40, 2]})),
    "shape-overflows": _safetensors(_header(w=_W | {"shape": [1 << 32, 1 << 32]})),
    "type-unknown": _safetensors(_header(w=_W | {"dtype": "pickle"})),
    "pickle": pickle.dumps({"w": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_safetensors(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(BAD_FILES[name])
    with pytest.raises(StartupFailed):
        load_weights(tmp_path, _target())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    """Pickles are not opened beside the weights, nor instead of them, nor under their name."""
    mark = tmp_path / "mark"
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(_Bomb(mark)))
    for data in (pickle.dumps(_Bomb(mark)), archive.getvalue()):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(StartupFailed):
            load_weights(tmp_path, _target())
    assert not mark.exists()
    pickle.loads(pickle.dumps(_Bomb(mark)))  # noqa: S301 (it would have)
    assert mark.exists()


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "x.bin", "", 1]
)
def test_an_index_leads_nowhere_else(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.zeros(2, 2)}, tmp_path / "x.safetensors")
    index = {"weight_map": {"w": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartupFailed):
        weight_files(folder)


def test_links_are_followed_to_data_alone(tmp_path: Path) -> None:
    """Links, of which caches of models consist, must lead to safetensors, or loading fails."""
    (tmp_path / "elsewhere").mkdir()
    save_file({"w": torch.ones(2, 2)}, tmp_path / "elsewhere/blob")
    folder = tmp_path / "model"
    folder.mkdir()
    link = folder / "model.safetensors"
    link.symlink_to("../elsewhere/blob")
    targets = _target()
    load_weights(folder, targets)
    assert torch.equal(targets["w"].tensor, torch.ones(2, 2))
    for place in ("/etc/passwd", "/dev/null", "/proc/self/mem", "nowhere", "."):
        link.unlink()
        link.symlink_to(place)
        with pytest.raises(StartupFailed):
            load_weights(folder, _target())


def _config(**more: object) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, **more,
    }  # fmt: skip


BAD_CONFIGS = {
    "no-json": "{",
    "a-list": "[]",
    "deep": "[" * 100_000,
    "nan": json.dumps(_config(rms_norm_eps=float("nan"))),
    "vocab-0": json.dumps(_config(vocab_size=0)),
    "vocab-text": json.dumps(_config(vocab_size="64")),
    "vocab-negative": json.dumps(_config(vocab_size=-1)),
    "heads-0": json.dumps(_config(num_attention_heads=0)),
    "heads-uneven": json.dumps(_config(num_attention_heads=3, num_key_value_heads=2)),
    "layers-negative": json.dumps(_config(num_hidden_layers=-1)),
    "unknown-architecture": json.dumps(_config(architectures=["EvilForCausalLM"])),
    "no-architecture": json.dumps(_config(architectures=None)),
    "quantised": json.dumps(_config(quantization_config={"quant_method": "evil"})),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_bad_model_configs(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(BAD_CONFIGS[name])
    with pytest.raises(StartupFailed):
        read_model_config(tmp_path)


def test_auto_map_is_never_executed(tmp_path: Path, model_dir: Path) -> None:
    """Code in a model's directory is not executed by the engine or the gateway."""
    mark = tmp_path / "mark"
    evil = f"import pathlib; pathlib.Path({str(mark)!r}).touch()"
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model_dir.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name in ("modeling_evil.py", "tokenization_evil.py", "__init__.py", "setup.py"):
        (folder / name).write_text(evil)
    auto_map = {
        "AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model",
        "AutoTokenizer": ["tokenization_evil.T", None],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(_config(auto_map=auto_map)))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": auto_map, "tokenizer_class": "tokenization_evil.T"})
    )
    with pytest.raises(StartupFailed, match="auto_map"):
        read_model_config(folder)
    ServedModel.load(GatewayConfig(model=str(folder))).close()
    assert not mark.exists()
