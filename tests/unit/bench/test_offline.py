"""nano-vllm's workload: its requests, and a small run of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.bench.offline.__main__ import main
from baton.bench.offline.engines import HostTimes
from baton.bench.offline.workload import Work


def test_the_requests_are_nano_vllms() -> None:
    work = Work.draw(256, 100, 1024)
    assert sum(work.num_outputs) == 133_966  # as in its README
    assert len(work.prompts) == 256
    assert min(map(len, work.prompts)) >= 100 and max(map(len, work.prompts)) <= 1024
    assert max(map(max, work.within(50).prompts)) == 49


def test_steps_with_all_sequences_count() -> None:
    host = HostTimes(2)
    sizes = iter([2, 2, 1, 2])
    engine = SimpleNamespace(step=lambda meanwhile: SimpleNamespace(tokens=[0] * next(sizes)))
    host.watch(engine)
    for _ in range(4):
        engine.step(lambda: False)
    found = host.summary()
    assert (found["num_steps"], found["num_full_steps"]) == (4, 2)
    assert found["host_ms"] >= 0 and found["step_ms"] >= 0


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "offline.json"
    cpu = json.dumps({"cpu_kv_bytes": 4 << 20})
    few = ["--num-seqs", "4", "--shortest", "2", "--longest", "6", "--repeats", "1"]
    flags = ["--max-model-len", "64", "--vocab-size", "4000", "--engine-args", cpu]
    for _ in range(2):
        assert main([*few, *flags, "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["engine"] == "baton" and row["tokens_per_s"] > 0
    assert row["output_tokens"] == sum(Work.draw(4, 2, 6).num_outputs)
    assert "tokens_per_s" in capsys.readouterr().out
