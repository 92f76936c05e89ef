"""The directory of a model, and small values in its JSON files: stdlib only.

Knows no tensor: weights are engine/model/weights/checkpoint.py, the architecture is
engine/model/model_config.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import StartupFailed

BUNDLED_MODELS = ("demo", "demo-draft")
_BUNDLED_ROOT = Path(__file__).resolve().parent.parent / "models"


def resolve_model_dir(name: str) -> Path:
    """The directory of `--model name`: a bundled model's or a path.

    Raises StartupFailed if it is no directory with a config.json.
    """
    path = _BUNDLED_ROOT / name if name in BUNDLED_MODELS else Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    if path.is_dir():
        raise StartupFailed(
            f"{path} has no config.json",
            hint="--model takes a Hugging Face model directory with config.json and *.safetensors",
        )
    if path.exists():
        raise StartupFailed(
            f"{path} is a file", hint="--model takes the directory that contains it"
        )
    raise StartupFailed(f"there is no model directory {path}", hint=_hint_for_missing(name))


def _hint_for_missing(name: str) -> str:
    if name in BUNDLED_MODELS:
        return "this installation lacks its bundled models: install it again"
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return (
            f"Baton downloads nothing; if {name} is a Hugging Face id: "
            f"hf download {name} --local-dir DIR, then --model DIR"
        )
    return f"give a path, or one of {', '.join(BUNDLED_MODELS)}"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises StartupFailed if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupFailed(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise StartupFailed(f"{path} has no JSON object")
    return value


def eos_token_ids(model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a generation: generation_config.json's, or else config.json's.

    Ids outside the vocabulary are left out: they cannot be sampled. Empty if neither file names
    any. Raises StartupFailed on anything but an id or a list of ids.
    """
    for file_name in ("generation_config.json", "config.json"):
        path = model_dir / file_name
        value = read_json(path).get("eos_token_id") if path.is_file() else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise StartupFailed(f"eos_token_id in {path} is not a token id or a list of them")
        return tuple(i for i in ids if i < vocab_size)
    return ()
