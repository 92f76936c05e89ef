"""One gRPC request on one host, function by function: how many files are involved?

docs/one_request.md names them in order. The client, the gateway and both engines are traced, from
just before the request is sent until its last token arrives; generated code does not count.
Functions that also run while idle, such as heartbeats, are left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deployments import running

from baton.core.engine_config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
TRACER = ROOT / "tests" / "call_trace"
_CLIENT = """
import sys, time
from pathlib import Path
from baton.client import Client
folder = Path(sys.argv[2])
with Client(sys.argv[1]) as client:
    list(client.generate("once upon", max_tokens=4))
    (folder / "idle").touch()
    time.sleep(2.5)
    (folder / "start").touch()
    time.sleep(0.3)
    chunks = list(client.generate("one request", max_tokens=8))
    time.sleep(0.1)
    (folder / "stop").touch()
    time.sleep(0.3)
assert chunks
"""


Files = dict[str, set[str]]  # functions by file


def trace(folder: Path) -> tuple[Files, Files]:
    """The functions of Baton that ran for one request, and those that ran concurrently."""
    path = os.pathsep.join(filter(None, (str(TRACER), os.environ.get("PYTHONPATH"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CALL_TRACE", str(folder))
        with running(EngineConfig()) as deployment:
            client = [sys.executable, "-c", _CLIENT, deployment.address, str(folder)]
            subprocess.run(
                client,
                check=True,
                timeout=60,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
            )
            return _collect(folder)


def _collect(folder: Path) -> tuple[Files, Files]:
    deadline_s = time.monotonic() + 10
    while len(traces := [json.loads(p.read_text()) for p in folder.glob("*.json")]) < 6:
        assert time.monotonic() < deadline_s, [one["command"] for one in traces]
        time.sleep(0.05)
    passed, beside = Files(), Files()
    for one in traces:
        command = " ".join(one["command"])
        if "launch import prefill" in command or "launch import decode" in command:
            continue  # supervisors: requests do not pass through them
        for name, functions in one["request"].items():
            path = Path(name).resolve()
            if path.is_relative_to(ROOT) and ".venv" not in path.parts and path.is_file():
                relative = path.relative_to(ROOT)
                if relative.parts[0] != "tests" and relative.parts[:2] != ("proto", "v1"):
                    idle = set(one["idle"].get(name, ()))
                    passed.setdefault(str(relative), set()).update(set(functions) - idle)
                    beside.setdefault(str(relative), set()).update(set(functions) & idle)
    return {name: ran for name, ran in passed.items() if ran}, beside


def test_docs_name_every_file_of_a_request(tmp_path: Path) -> None:
    files, beside = trace(tmp_path)
    num_lines = sum(len((ROOT / name).read_text().splitlines()) for name in files)
    print(f"{len(files)} files, {num_lines} lines; beside it {len(set(beside) - set(files))}")
    page = (ROOT / "docs/one_request.md").read_text()
    unnamed = sorted({*files, *beside} - _names(page))
    assert not unnamed
    not_passed = page.split("## What it does not pass")[1].split("\n## ")[0]
    assert _names(not_passed) and not _names(not_passed) & files.keys()


def _names(text: str) -> set[str]:
    return set(re.findall(r"`([a-z0-9_/]+\.py)`", text))
