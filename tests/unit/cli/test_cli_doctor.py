"""The doctor's checks, each with the problem that it must find."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from baton.cli.host import doctor
from baton.cli.host.finding import Finding, Level, exit_code, ok, problem, render, warning

GIB = 1 << 30


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level.value for finding in findings]


def test_this_host_can_serve() -> None:
    for name, check in doctor.CHECKS:
        found = check(doctor.Subject())
        assert exit_code(found) == 0, f"{name}: {found}"


def test_a_check_that_breaks_is_a_problem_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(subject: doctor.Subject) -> list[Finding]:
        raise ImportError("libcudart.so is missing")

    monkeypatch.setattr(doctor, "CHECKS", (("torch", broken), ("b", lambda s: [ok("b", "fine")])))
    assert doctor.run(doctor.Subject()) == 1
    shown = capsys.readouterr().out
    assert "ImportError: libcudart.so is missing" in shown
    assert "fine" in shown


def test_only_problems_fail() -> None:
    assert exit_code([ok("a", "b"), warning("c", "d")]) == 0
    assert exit_code([ok("a", "b"), problem("c", "d", "do it")]) == 1
    assert "do it" in render([problem("c", "d", "do it")])


def test_packages_missing_old_and_good(monkeypatch: pytest.MonkeyPatch) -> None:
    have = {"grpcio": "1.60.0", "redis": "5.2", "torch": "2.13.0+cpu", "numpy": "2.0rc1"}

    def version(name: str) -> str:
        if name not in have:
            raise importlib.metadata.PackageNotFoundError(name)
        return have[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    wanted = ["grpcio>=1.71.2", "redis>=5", 'tokenizers>=0.21; python_version > "3"']
    found = [doctor.check_requirement(line) for line in (*wanted, "torch>=2.11", "numpy>=1.26")]
    assert levels(found) == ["problem", "ok", "problem", "ok", "ok"]
    assert ">=1.71.2" in found[0].text
    assert found[2].advice == "pip install 'tokenizers>=0.21'"


def test_packages_are_the_distribution_s() -> None:
    found = doctor.check_packages(doctor.Subject())
    names = {finding.subject for finding in found}
    assert {"torch", "grpcio", "protobuf", "redis"} <= names
    assert "pytest" not in names


def test_gpus_and_the_paths_between_them() -> None:
    free = doctor.Gpu(0, "H200", 139 * GIB, 141 * GIB, frozenset({1}))
    busy = doctor.Gpu(1, "H200", 3 * GIB, 141 * GIB, frozenset({0}))
    alone = doctor.Gpu(2, "H200", 139 * GIB, 141 * GIB, frozenset())
    assert levels(doctor.judge_gpus([])) == ["ok"]
    assert levels(doctor.judge_gpus([free, busy])) == ["ok", "warning", "ok"]
    found = doctor.judge_gpus([free, busy, alone])
    assert found[-1].level is Level.WARNING
    assert "0-2, 1-2" in found[-1].text


def test_kernel_packages_matter_on_gpus_only() -> None:
    assert levels(doctor.judge_kernels(False, False, False)) == ["ok"]
    assert levels(doctor.judge_kernels(True, False, False)) == ["problem", "warning"]
    assert levels(doctor.judge_kernels(True, True, True)) == ["ok", "ok"]


@pytest.mark.parametrize(
    ("version", "level"), [("5.0.14", "problem"), ("6.2.14", "ok"), ("7.0.15", "ok"), ("6", "ok")]
)
def test_redis_versions(version: str, level: str) -> None:
    assert doctor.judge_redis("redis", version, "answers").level.value == level


def test_a_redis_that_does_not_answer_or_cannot_be_named() -> None:
    for url in ("redis://127.0.0.1:1/0", "unix:///nowhere/redis.sock", "http://x"):
        found = doctor.check_redis_url(doctor.Subject(redis_url=url))
        assert levels(found) == ["problem"], url
        assert found[0].advice


def test_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert doctor.check_port(port).level is Level.PROBLEM
    assert doctor.check_port(0).level is Level.OK
    assert doctor.check_port(1 << 20).level is Level.PROBLEM


def test_memory_and_shm(tmp_path: Path) -> None:
    assert doctor.check_available_memory(64 << 20).level is Level.WARNING
    assert doctor.check_available_memory(8 * GIB).level is Level.OK
    assert doctor.check_shm(str(tmp_path / "absent")).level is Level.WARNING


def test_models_that_cannot_be_served(tmp_path: Path) -> None:
    def check(folder: Path) -> Finding:
        (found,) = doctor.check_model(doctor.Subject(str(folder)))
        return found

    assert "no model directory" in check(tmp_path / "absent").text
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    assert check(tmp_path).level is Level.PROBLEM
    bundled = Path(__file__).resolve().parents[3] / "models" / "demo"
    (tmp_path / "config.json").write_text((bundled / "config.json").read_text())
    assert "safetensors" in check(tmp_path).text
    shutil.copy(bundled / "model.safetensors", tmp_path)
    assert "tokenizer.json" in check(tmp_path).text
    shutil.copy(bundled / "tokenizer.json", tmp_path)
    assert check(tmp_path).level is Level.OK
    os.truncate(tmp_path / "tokenizer.json", 1000)
    assert "tokenizer.json" in check(tmp_path).text
    os.truncate(tmp_path / "model.safetensors", 1_000_000)
    cut = check(tmp_path)
    assert "model.safetensors is no valid safetensors file" in cut.text
    assert "download it again" in cut.advice
    shutil.copy(bundled / "model.safetensors", tmp_path)
    spec = json.loads((bundled / "config.json").read_text()) | {"num_hidden_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(spec))
    mixed = check(tmp_path)
    assert "lacks the tensor model.layers.6" in mixed.text
    assert "do not belong together" in mixed.advice
