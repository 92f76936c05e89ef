"""The whole system from a user's side: wrong requests, clients that disconnect, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployments import MARK, Running, marked_processes, running
from patience import AT_ONCE_S, SOON_S

from baton.client import Client
from baton.core import errors
from baton.core.engine_config import EngineConfig

MODEL = str(Path(__file__).resolve().parents[3] / "models" / "demo")
OUR_MARK = f"system-{os.getpid()}"
BATON = str(Path(sys.executable).parent / "baton")


@pytest.fixture(scope="module")
def system() -> Iterator[Running]:
    # A pool of 63 blocks = 1008 tokens, smaller than the context of 2048; prefill 64 at a time.
    engine = EngineConfig(
        model=MODEL, device="cpu", max_num_batched_tokens=64, num_kv_blocks=65, max_model_len=1000
    )
    with running(engine) as system:
        yield system


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"prompt_token_ids": []}, errors.InvalidRequest, "prompt"),
        ({"prompt": ""}, errors.InvalidRequest, "prompt"),
        ({"prompt_token_ids": [4096]}, errors.InvalidRequest, "4096"),
        ({"prompt_token_ids": [5] * 1000}, errors.ContextLengthExceeded, "1000"),
        ({"prompt": "x", "max_tokens": 1000}, errors.ContextLengthExceeded, "1000"),
        ({"prompt": "x", "max_tokens": 0}, errors.InvalidRequest, "max_tokens"),
        ({"prompt": "x", "temperature": -1.0}, errors.InvalidRequest, "temperature"),
        ({"prompt": "x", "top_p": 0.0}, errors.InvalidRequest, "top_p"),
        ({"prompt": "x", "stop": [""]}, errors.InvalidRequest, "stop"),
        ({"prompt": "x", "model": "gpt-5"}, errors.ModelNotFound, "gpt-5"),
        ({"prompt": "x", "timeout_s": 0.0001}, errors.DeadlineExceeded, "deadline"),
    ],
)
def test_wrong_requests_get_a_typed_error_at_once(
    system: Running, wrong: dict[str, object], error: type[errors.BatonError], words: str
) -> None:
    began_s = time.monotonic()
    with Client(system.address) as client, pytest.raises(error) as raised:
        for _ in client.generate(**wrong):  # type: ignore[arg-type]
            pass
    assert time.monotonic() - began_s < SOON_S
    assert words.lower() in str(raised.value).lower()


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 9])
@pytest.mark.parametrize("prompt_length", [5, 700])
def test_a_client_that_leaves_frees_its_blocks(
    system: Running, prompt_length: int, num_chunks: int
) -> None:
    """A disconnect before, during or after the hand-off leaves both nodes idle at once."""
    with Client(system.address) as client:
        prompt = [7 + num_chunks, *range(100, 99 + prompt_length)]
        stream = client.generate(prompt_token_ids=prompt, max_tokens=200, ignore_eos=True)
        if num_chunks == 0:
            time.sleep(0.02)  # during the prefill
        for _ in range(num_chunks):
            next(stream)
        stream.close()
        left_s = time.monotonic()
        system.wait_idle(timeout_s=SOON_S)
    assert time.monotonic() - left_s < AT_ONCE_S


def test_abort_by_label_ends_the_stream(system: Running) -> None:
    with Client(system.address) as client:
        stream = client.generate("x = 1", max_tokens=500, ignore_eos=True, request_id="mine")
        next(stream)
        assert client.abort("mine") == 1
        with pytest.raises(errors.Cancelled):
            list(stream)
        assert client.abort("mine", "never was") == 0
    system.wait_idle()


def test_stop_strings_never_show(system: Running) -> None:
    with Client(system.address) as client:
        prompt = "def read_file(path):\n"
        plain = client.generate(prompt, max_tokens=40, temperature=0).result.text
        stop = plain[12:15]
        result = client.generate(prompt, max_tokens=40, temperature=0, stop=[stop]).result
    assert result.matched_stop == stop
    assert result.text == plain[: plain.index(stop)]
    system.wait_idle()


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [BATON, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {MARK: OUR_MARK},
    )


BEFORE_IT_RUNS_S = 0.05
UP = ["up", "--device", "cpu", "--grpc-port", "0", "--http-port", "0", "--cpu-kv-bytes", "30000000"]


@pytest.mark.parametrize(
    "after_s", [BEFORE_IT_RUNS_S, 0.8, pytest.param(2.0, marks=pytest.mark.slow), None]
)
def test_ctrl_c_leaves_nothing_behind(after_s: float | None) -> None:
    """Ctrl-C at once, during start-up, or while serving leaves no process."""
    process = start(*UP)
    assert process.stdout is not None
    if after_s is None:
        for line in process.stdout:
            if "Ctrl-C" in line:
                break
    else:
        time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    if after_s == BEFORE_IT_RUNS_S:
        # While the interpreter starts, it prints messages of its own and may lose an interrupt.
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=15)
    else:
        output, _ = process.communicate(timeout=15)
        assert process.returncode in (0, 130), output
        assert "Traceback" not in output
    assert not marked_processes(OUR_MARK)


def test_kill_9_of_the_parent_ends_everything() -> None:
    process = start(*UP)
    assert process.stdout is not None
    for line in process.stdout:
        if "Ctrl-C" in line:
            break
    process.kill()
    process.communicate(timeout=15)
    deadline_s = time.monotonic() + 10
    while marked_processes(OUR_MARK) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not marked_processes(OUR_MARK)


@pytest.mark.slow
def test_demo_twice_in_a_row() -> None:
    """`make demo` can run twice in a row; CI covers one run."""
    for _ in range(2):
        process = start("demo", "--max-tokens", "8")
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        assert "tokens/s" in output
        assert not marked_processes(OUR_MARK)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--cpu-kv-bytes", "1000000"], "--max-model-len", marks=pytest.mark.slow),
        pytest.param(["--gpus", "0"], "--gpus", marks=pytest.mark.slow),
        pytest.param(["--model", "/nowhere"], "/nowhere", marks=pytest.mark.slow),
        pytest.param(["--max-model-len", "5000"], "2048", marks=pytest.mark.slow),
        pytest.param(["--tp", "3", "--device", "cpu"], "--tp", marks=pytest.mark.slow),
    ],
)
def test_a_node_that_cannot_start_says_why(arguments: list[str], words: str) -> None:
    """The reason of a failed start is printed. See also test_node_pair.py and
    test_tensor_parallel.py."""
    launch = str(Path(sys.executable).parent / "launch_prefill")
    began_s = time.monotonic()
    result = subprocess.run([launch, *arguments], capture_output=True, text=True, timeout=30)
    assert result.returncode == 1, result.stdout + result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert time.monotonic() - began_s < 25
