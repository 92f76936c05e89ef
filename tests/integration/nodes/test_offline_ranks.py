"""LLM over two ranks on a CPU: the tokens of one rank, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from deployments import MARK

from baton import LLM, SamplingParams

PROMPTS = ["def fib(n):", "import os\n"]

_HELD = """
from baton import LLM, SamplingParams
with LLM(tp=2, device="cpu", cpu_kv_bytes=1 << 24) as llm:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    for output in llm.generate(["def fib(n):", "import os\\n"], params, use_tqdm=False):
        print(list(output.outputs[0].token_ids), flush=True)
    llm.generate("x", SamplingParams(max_tokens=1900, ignore_eos=True), use_tqdm=False)
"""


def marked(mark: str) -> list[int]:
    """Processes with the mark in their environment."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if f"{MARK}={mark}".encode() in file.read():
                    found.append(int(name))
        except OSError:
            continue
    return found


def test_two_ranks_give_the_tokens_of_one_and_end_with_ctrl_c() -> None:
    mark = f"offline-{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, "-c", _HELD],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {MARK: mark},
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in PROMPTS]
    assert len(marked(mark)) == 2
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors and "engine lost" not in errors, errors
    until_s = time.monotonic() + 10
    while marked(mark) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not marked(mark)
    with LLM(device="cpu", cpu_kv_bytes=1 << 24) as llm:
        params = SamplingParams(max_tokens=12, temperature=0.0)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert lines == [f"{list(output.outputs[0].token_ids)}\n" for output in outputs]
