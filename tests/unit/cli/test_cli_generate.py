"""`baton generate`: what is out of range is refused before anything is loaded."""

from __future__ import annotations

import pytest

from baton.cli.main import main


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
