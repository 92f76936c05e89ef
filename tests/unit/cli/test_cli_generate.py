"""`baton generate`: out-of-range values are refused before anything is loaded (by `baton demo`,
too); a prompt that cannot be served beside others; the end of the context is reported.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from baton.cli.main import main

DEMO = Path(__file__).parents[3] / "models" / "demo"
SMALL = ("--device", "cpu", "--cpu-kv-bytes", str(16 << 20), "--max-model-len", "32")


def test_a_demo_of_no_tokens_is_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["baton", "demo", "--max-tokens", "0"])
    assert main() == 1
    assert capsys.readouterr() == ("", "error: max_tokens must be at least 1\n")


@pytest.mark.parametrize(
    ("flag", "value", "refusal"),
    [
        ("--temperature", "9", "temperature must lie in [0, 2], not 9"),
        ("--max-tokens", "0", "max_tokens must be at least 1"),
        ("--sampling-seed", "-1", "seed must lie in [0, 2**63)"),
    ],
)
def test_sampling_out_of_range(
    flag: str,
    value: str,
    refusal: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["baton", "generate", "--model", "/nowhere", flag, value, "def f("]
    monkeypatch.setattr("sys.argv", command)
    assert main() == 1
    assert capsys.readouterr().err == f"error: {refusal}\n"


def test_prompts_that_are_refused_and_one_that_fills_its_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(DEMO, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    beyond = tokenizer["added_tokens"][0] | {"id": 4096, "content": "<beyond>", "special": False}
    tokenizer["added_tokens"].append(beyond)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    prompts = ["def read_file(path):", "import <beyond>", "", "import os"]
    options = ["--model", str(model), "--max-tokens", "28", *SMALL]
    monkeypatch.setattr("sys.argv", ["baton", "generate", *prompts, *options])
    assert main() == 1
    captured = capsys.readouterr()
    assert "def read_file(path):\n" in captured.out and "import os\n" in captured.out
    assert "<beyond>" not in captured.out
    assert captured.err.splitlines()[1:-1] == [
        "error: prompt 2: it has token 4096; the vocabulary has 4096 ids",
        "error: prompt 3: the prompt is empty",
        "prompt 1: the context of 32 tokens is full",
    ]
