"""LLM over the bundled model: tokens equal those of a LocalEngine, for all forms of the call."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines.generation import outputs_of
from engines.integrity import check_integrity

import baton
from baton import LLM, BeamSearchParams, SamplingParams
from baton.core.engine_config import EngineConfig
from baton.core.errors import (
    BatonError,
    ContextLengthExceeded,
    EngineFailed,
    InvalidRequest,
    StartupFailed,
)
from baton.core.request.constraint import ConstraintKind
from baton.core.request.request import Request
from baton.core.request.sampling_params import OPTIONS, SAMPLING
from baton.core.request.sampling_params import SamplingParams as EngineSampling
from baton.engine.local import LocalEngine
from baton.offline.loop_thread import LoopThread

POOL = 16 << 20
PROMPTS = ["def fib(n):", "import os\n", "class Reader:\n    def __init__(self"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(cpu_kv_bytes=POOL) as llm:
        yield llm


@pytest.fixture(scope="module")
def local() -> Iterator[LocalEngine]:
    lines: list[str] = []
    local = LocalEngine.load(EngineConfig(cpu_kv_bytes=POOL), lines.append)
    assert f": {local.engine.limits.capacity} KV blocks = " in lines[-1]
    yield local
    local.close()


def tokens_of(local: LocalEngine, prompt: list[int], sampling: EngineSampling) -> tuple[int, ...]:
    request = Request(f"{random.getrandbits(128):032x}", 0, tuple(prompt), sampling)
    return tuple(outputs_of(local, [request])[request.key])


def test_greedy_and_seeded_tokens_are_the_engines(llm: LLM, local: LocalEngine) -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=0.0),
        SamplingParams(max_tokens=9, seed=3, top_k=20, temperature=0.9),
        SamplingParams(max_tokens=5, seed=4, top_k=-1),
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == PROMPTS
    samplings = [
        EngineSampling(max_tokens=12, temperature=0.0),
        EngineSampling(max_tokens=9, seed=3, top_k=20, temperature=0.9),
        EngineSampling(max_tokens=5, seed=4),
    ]
    for output, sampling in zip(outputs, samplings, strict=True):
        (sample,) = output.outputs
        assert sample.token_ids == tokens_of(local, output.prompt_token_ids, sampling)
        assert sample.finish_reason == "length" and sample.logprobs is None


def test_all_shapes_of_a_prompt_are_the_same(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    (first,) = llm.generate(PROMPTS[0], greedy, use_tqdm=False)
    ids = first.prompt_token_ids
    shapes = [ids, [ids], {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}, tuple(ids)]
    for shape in shapes:
        (output,) = llm.generate(shape, greedy, use_tqdm=False)
        assert output.outputs[0].token_ids == first.outputs[0].token_ids
        assert output.prompt_token_ids == ids
    assert llm.generate([], use_tqdm=False) == []


def test_samples_scores_and_stops(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=8, seed=1, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert len({sample.token_ids for sample in output.outputs}) == 3
    for sample in output.outputs:
        assert sample.logprobs is not None and len(sample.logprobs) == len(sample.token_ids)
        own = [found[i].logprob for found, i in zip(sample.logprobs, sample.token_ids, strict=True)]
        assert sample.cumulative_logprob is not None
        assert math.isclose(sample.cumulative_logprob, sum(own))
        assert all(1 in {one.rank for one in found.values()} for found in sample.logprobs)
    scores = output.prompt_logprobs
    assert scores is not None and scores[0] is None and len(scores) == len(output.prompt_token_ids)

    (whole,) = llm.generate("def f(", SamplingParams(max_tokens=20, temperature=0), use_tqdm=False)
    text, ids = whole.outputs[0].text, whole.outputs[0].token_ids
    stop = text[5:9]
    cut = SamplingParams(max_tokens=20, temperature=0, stop=stop)
    (sample,) = llm.generate("def f(", cut, use_tqdm=False)[0].outputs
    assert sample.text == text[: text.index(stop)]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    by_id = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=[ids[2]])
    (sample,) = llm.generate("def f(", by_id, use_tqdm=False)[0].outputs
    assert sample.token_ids[-1] == sample.stop_reason == ids[2]
    by_id = dataclasses.replace(by_id, include_stop_str_in_output=True)
    (shown,) = llm.generate("def f(", by_id, use_tqdm=False)[0].outputs
    for length, stopped in ((2, sample), (3, shown)):
        cut = SamplingParams(max_tokens=length, temperature=0)
        assert llm.generate("def f(", cut, use_tqdm=False)[0].outputs[0].text == stopped.text
    assert sample.text != shown.text


def test_a_constrained_output_matches(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=8, temperature=0.0, choice=["yes", "no"])
    (output,) = llm.generate("Is it? ", params, use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")


def test_chats_by_the_models_template(llm: LLM) -> None:
    chat = [{"role": "user", "content": "Write a function that adds."}]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    (one,) = llm.chat(chat, params, use_tqdm=False)
    two = llm.chat([chat, chat], params, use_tqdm=False)
    assert one.prompt is not None and "Write a function" in one.prompt
    assert [output.outputs[0].token_ids for output in two] == [one.outputs[0].token_ids] * 2
    begun = [*chat, {"role": "assistant", "content": "def add("}]
    (one,) = llm.chat(begun, params, continue_final_message=True, use_tqdm=False)
    assert one.prompt is not None and one.prompt.endswith("def add(")
    (two,) = llm.chat(chat, params, add_generation_prompt=False, use_tqdm=False)
    assert two.prompt is not None and one.prompt.startswith(two.prompt)
    with pytest.raises(InvalidRequest, match="is not a text of the assistant"):
        llm.chat(chat, params, continue_final_message=True, use_tqdm=False)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param"),
    [
        ("", SamplingParams(), InvalidRequest, "prompt"),
        ("x", SamplingParams(temperature=3.0), InvalidRequest, "temperature"),
        ("x", SamplingParams(max_tokens="12"), InvalidRequest, "max_tokens"),  # type: ignore[arg-type]
        ([10**6], SamplingParams(), InvalidRequest, "prompt[0]"),
        ("x", SamplingParams(max_tokens=10**6), ContextLengthExceeded, "max_tokens"),
        ({"text": "x"}, SamplingParams(), InvalidRequest, "prompt"),
        ("x", [SamplingParams()] * 2, InvalidRequest, "sampling_params"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    llm: LLM, prompt: object, params: object, error: type[BatonError], param: str
) -> None:
    with pytest.raises(error) as refused:
        llm.generate(prompt, params, use_tqdm=False)  # type: ignore[arg-type]
    assert refused.value.param == param
    check_integrity(llm._calls._local.engine)


def test_flags_have_the_names_of_the_command_line() -> None:
    with pytest.raises(StartupFailed, match="enforce_eager"):
        LLM(enforce_eager=True)
    with pytest.raises(StartupFailed, match="tensor-parallel-size"):
        LLM(tp=0)
    with pytest.raises(StartupFailed):
        LLM(model="/nowhere")
    assert not [t for t in threading.enumerate() if t.name == "baton-engine" and t.is_alive()][1:]


def test_without_a_tokenizer_ids_are_served() -> None:
    with LLM(skip_tokenizer_init=True, cpu_kv_bytes=POOL) as llm:
        params = SamplingParams(max_tokens=3)
        (output,) = llm.generate([5, 6], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].text == ""
        with pytest.raises(InvalidRequest):
            llm.generate("text", params, use_tqdm=False)
    with pytest.raises(BatonError, match="closed"):
        llm.generate([5, 6], use_tqdm=False)


def test_an_engine_that_fails_ends_the_call_and_all_later_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM(cpu_kv_bytes=POOL) as llm:

        def step(_: object) -> None:
            raise EngineFailed("the device is lost")

        monkeypatch.setattr(llm._calls._local.engine, "step", step)
        for _ in range(2):
            with pytest.raises(EngineFailed, match="the device is lost"):
                llm.generate(["a", "b"], use_tqdm=False)


def test_a_ctrl_c_ends_the_call_and_the_llm_goes_on(llm: LLM) -> None:
    interrupt = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    interrupt.start()
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    try:
        with pytest.raises(KeyboardInterrupt):
            while True:  # until the context is full
                llm.generate("def f(", endless, use_tqdm=False)
    finally:
        interrupt.join()
    assert len(llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)) == 1
    check_integrity(llm._calls._local.engine)
    assert llm._calls._local.engine.stats.load().num_running == 0


def test_a_ctrl_c_ends_the_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[BaseException] = []
    has_begun, has_ended = threading.Event(), threading.Event()

    def load(*_: object) -> LocalEngine:
        until_s = time.monotonic() + 20
        try:
            has_begun.set()
            while time.monotonic() < until_s:
                time.sleep(0.01)
        except BaseException as error:
            ended.append(error)
            has_ended.set()
            raise
        raise StartupFailed("nobody ended it")

    def press() -> None:
        """Press again if it had no effect: Python drops a KeyboardInterrupt raised in the callback
        of a weak reference."""
        has_begun.wait(20)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            if has_ended.wait(4):
                return

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "load", load)
        interrupt = threading.Thread(target=press)
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            LLM(cpu_kv_bytes=POOL)
        interrupt.join()
    assert [type(error) for error in ended] == [asyncio.CancelledError]
    with LLM(cpu_kv_bytes=POOL) as llm:
        assert llm.generate(PROMPTS[0], use_tqdm=False)[0].outputs


def test_the_package_has_what_it_names() -> None:
    assert all(getattr(baton, name).__name__ == name for name in baton.__all__)
    with pytest.raises(AttributeError):
        _ = baton.nothing
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_every_parameter_of_a_request_is_one_here() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == {*SAMPLING, *OPTIONS} | {kind.value for kind in ConstraintKind}


def test_beam_search_finds_the_engines_beams(llm: LLM, local: LocalEngine) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0.5)
    found = llm.beam_search([PROMPTS[0], {"prompt": PROMPTS[1]}], params)
    for prompt, output in zip(PROMPTS, found, strict=False):
        ids = list(llm.generate(prompt, use_tqdm=False)[0].prompt_token_ids)
        sampling = EngineSampling(
            max_tokens=8, temperature=0.0, use_beam_search=True, best_of=3, length_penalty=0.5
        )
        request = Request(f"{random.getrandbits(128):032x}", 0, tuple(ids), sampling, (), "", 0)
        request = dataclasses.replace(request, fork_ids=("a" * 32, "b" * 32))
        wanted = outputs_of(local, [request])
        assert [one.tokens for one in output.sequences] == [[*ids, *t] for t in wanted.values()]
        scores = [one.cum_logprob / len(one.logprobs) ** 0.5 for one in output.sequences]
        assert scores == sorted(scores, reverse=True)
        assert all(one.text.startswith(prompt) for one in output.sequences)


def test_a_sample_that_is_given_its_tokens_together_is_as_one_by_one(llm: LLM) -> None:
    """Text is the same if a session gets several tokens at once or, with log-probabilities, one."""
    shared = {"max_tokens": 70, "seed": 5, "temperature": 1.0, "ignore_eos": True, "n": 2}
    (together,) = llm.generate(PROMPTS[0], SamplingParams(**shared), use_tqdm=False)
    (alone,) = llm.generate(PROMPTS[0], SamplingParams(logprobs=0, **shared), use_tqdm=False)
    for one, other in zip(together.outputs, alone.outputs, strict=True):
        assert len(one.token_ids) == 70
        assert (one.token_ids, one.text) == (other.token_ids, other.text)


def test_the_best_of_several_samples_are_the_likeliest(llm: LLM) -> None:
    shared = {"max_tokens": 6, "seed": 5, "temperature": 1.0}
    (every,) = llm.generate(PROMPTS[0], SamplingParams(n=6, logprobs=0, **shared), use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda one: one.cumulative_logprob or 0.0, reverse=True)
    (best,) = llm.generate(PROMPTS[0], SamplingParams(n=2, best_of=6, **shared), use_tqdm=False)
    assert [one.text for one in best.outputs] == [one.text for one in ranked[:2]]
    assert [one.index for one in best.outputs] == [0, 1] and best.outputs[0].logprobs is None


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"use_beam_search": True}, "best_of"),
        ({"use_beam_search": True, "n": 4, "best_of": 2}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "n": 2, "seed": 1}, "seed"),
        ({"use_beam_search": True, "n": 2, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "n": 2, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "n": 2, "top_k": 5}, "top_k"),
        ({"use_beam_search": True, "n": 2, "min_p": 0.1}, "min_p"),
        ({"use_beam_search": True, "n": 2, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "n": 2, "regex": "a+"}, "constraint"),
        ({"use_beam_search": True, "n": 2, "num_beam_groups": 3}, "num_beam_groups"),
        ({"use_beam_search": True, "n": 2, "num_beam_groups": 2}, "diversity_penalty"),
        ({"use_beam_search": True, "n": 2, "diversity_penalty": 1.0}, "diversity_penalty"),
        ({"use_beam_search": True, "n": 2, "early_stopping": "soon"}, "early_stopping"),
        ({"early_stopping": True}, "early_stopping"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"num_beam_groups": 2}, "num_beam_groups"),
        ({"diversity_penalty": 1.0}, "diversity_penalty"),
    ],
)
def test_what_beams_cannot_go_with_is_refused_by_name(
    llm: LLM, params: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llm.generate(PROMPTS[0], SamplingParams(**params), use_tqdm=False)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantization", "awq"),
        ("dtype", "half"),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("device", "tpu"),
        ("max_model_len", "1024"),
        ("max_num_seqs", 1.5),
        ("max_num_seqs", 0),
        ("tensor_parallel_size", "1"),
        ("enable_prefix_caching", "no"),
        ("gpu_memory_utilization", True),
        ("model", None),
    ],
)
def test_settings_that_cannot_be_are_named(name: str, value: object) -> None:
    with pytest.raises(StartupFailed, match=f"{name} cannot be"):
        LLM(**{"model": "demo", name: value})  # type: ignore[arg-type]


def test_settings_as_python_has_them() -> None:
    demo = Path(baton.__file__).parent / "models" / "demo"
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    more = {"seed": None, "max_model_len": np.int64(128), "swap_space": np.float32(0)}
    with LLM(demo, cpu_kv_bytes=POOL, speculative_config=drafts, **more) as llm:  # type: ignore[arg-type]
        assert llm.generate(PROMPTS[0], use_tqdm=False)[0].outputs


@pytest.mark.parametrize("wrong", [{"temperature": 0}, [{"temperature": 0}] * 3, ["x"] * 3])
def test_parameters_that_are_none(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="are SamplingParams"):
        llm.generate(PROMPTS, wrong, use_tqdm=False)


@pytest.mark.parametrize("wrong", ["hi", ["hi"], [["hi"]], [{"role": "user"}, "hi"]])
def test_chats_that_are_none(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="a chat is a list"):
        llm.chat(wrong, use_tqdm=False)


def test_bytes_are_no_prompt_and_an_array_is_one(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="bytes"):
        llm.generate(b"abc", use_tqdm=False)
    with pytest.raises(InvalidRequest, match="bytes"):
        llm.generate([{"prompt_token_ids": b"abc"}], use_tqdm=False)
    greedy = SamplingParams(max_tokens=3, temperature=0.0)
    (by_text,) = llm.generate(PROMPTS[0], greedy, use_tqdm=False)
    (by_array,) = llm.generate(np.array(by_text.prompt_token_ids), greedy, use_tqdm=False)  # type: ignore[arg-type]
    assert by_array.outputs[0].token_ids == by_text.outputs[0].token_ids


def test_two_constraints_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="one constraint"):
        llm.generate(PROMPTS[0], SamplingParams(choice=["a", "b"], regex="a"), use_tqdm=False)
    for empty in ({"choice": []}, {"grammar": ""}, {"json_schema": ""}):
        one = SamplingParams(regex="a", **empty)
        assert llm.generate(PROMPTS[0], one, use_tqdm=False)[0].outputs[0].text == "a"


def test_an_llm_that_a_failed_call_left_behind_is_no_obstacle() -> None:
    """The exception's frames keep the failed LLM in a cycle until the next one is created."""

    def fail() -> None:
        LLM(cpu_kv_bytes=POOL).generate("", use_tqdm=False)

    before = threading.active_count()
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            fail()
    with LLM(cpu_kv_bytes=POOL):
        assert threading.active_count() <= before + 1


def test_a_closed_one_says_so_to_a_chat() -> None:
    llm = LLM(cpu_kv_bytes=POOL)
    llm.close()
    with pytest.raises(BatonError, match="closed"):
        llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)


def test_what_to_do_about_a_failed_start_is_in_its_traceback() -> None:
    with pytest.raises(StartupFailed) as caught:
        LLM("nowhere")
    assert caught.value.__notes__ == [f"try: {caught.value.hint}"]


_FORKED = """
import os, signal, sys
from baton.core.errors import BatonError
from baton.offline.loop_thread import LoopThread

async def work():
    return 5

thread = LoopThread("own")
if (pid := os.fork()) == 0:
    signal.alarm(10)  # else whoever hangs stays behind
    try:
        thread.run(work())
    except BatonError as error:
        assert "fork" in str(error)
    else:
        sys.exit("ran")
    thread.close(lambda: os._exit(3))
    sys.exit()
assert os.waitpid(pid, 0)[1] == 0
assert thread.run(work()) == 5
thread.close()
"""


def test_a_process_that_is_forked_off_is_told_and_can_end() -> None:
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKED], timeout=60, check=False)
    assert ran.returncode == 0


def test_one_that_its_own_thread_collects_leaves_nothing_open() -> None:
    """A LoopThread closed in its own thread (by the garbage collector) leaves nothing open."""
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        thread = LoopThread("own")

        async def close(thread: LoopThread = thread) -> None:
            thread.close()

        thread.run(close())
        thread._thread.join(10)
        assert not thread._thread.is_alive()
    assert len(os.listdir("/proc/self/fd")) <= num_open
