"""OpenAI's own client against a real deployment: texts and scores equal those of one process.

Each feature is tested over HTTP with a hand-off, and with a LocalEngine and the same tokenizer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from deployments import Running
from e2e.oracle import GreedyOracle
from engines.generation import outputs_of
from tokenizers import Tokenizer

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
CODE = "def read_file(path):\n    with open(path) as file:\n        return"
LONG = CODE + "\n\n\nclass Reader:\n    def __init__(self, path):\n        self._path = path\n" * 4


@dataclass
class Subject:
    """A deployment's HTTP client, and its references."""

    system: Running
    client: openai.OpenAI
    local: LocalEngine
    tokenizer: Tokenizer
    model: str

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def local_tokens(self, prompt: list[int], sampling: SamplingParams, n: int = 1) -> list[Any]:
        """The tokens of each sample, by the engine in this process."""
        request = Request(f"{random.getrandbits(128):032x}", 0, tuple(prompt), sampling)
        forks = tuple(f"{random.getrandbits(128):032x}" for _ in range(n - 1))
        request = replace(request, fork_ids=forks)
        found = outputs_of(self.local, [request])
        return [found[sample.key] for sample in (request, *request.forks)]


def http_address(system: Running) -> str:
    (line,) = [line for line in system.lines if line.startswith("gateway | ready:")]
    return line.split()[-2]


@pytest.fixture(scope="module")
def demo(demo_system: tuple[Running, LocalEngine]) -> Iterator[Subject]:
    global openai  # here: its import takes 0.7 s, and each process imports each test file
    import openai

    system, local = demo_system
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    address = http_address(system)
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield Subject(system, client, local, tokenizer, client.models.list().data[0].id)
    system.wait_idle()


def test_completions_streamed_and_whole(demo: Subject) -> None:
    create = demo.client.completions.create
    whole = create(model="demo", prompt=CODE, max_tokens=24, temperature=0)
    stream = create(
        model="demo", prompt=CODE, max_tokens=24, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, last = list(stream)
    (tokens,) = demo.local_tokens(demo.ids(CODE), SamplingParams(max_tokens=24, temperature=0.0))
    assert whole.choices[0].text == demo.tokenizer.decode(tokens)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 24
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens == len(demo.ids(CODE))


def test_cached_tokens_are_told(demo: Subject) -> None:
    for _ in range(2):
        answer = demo.client.completions.with_raw_response.create(
            model="demo", prompt=LONG + "x", max_tokens=4, temperature=0
        )
    usage = answer.parse().usage
    assert usage is not None and usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached >= 16
    assert answer.headers["x-cached-tokens"] == str(cached)
    assert answer.headers["x-prefill-node"] == "prefill-0"
    assert answer.headers["x-decode-node"] in ("decode-0", "decode-1")


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seed": {"seed": 7},
    "temperature": {"seed": 1, "temperature": 1.7},
    "top_p": {"seed": 2, "top_p": 0.5},
    "top_k": {"seed": 3, "top_k": 3},
    "min_p": {"seed": 4, "min_p": 0.2},
    "repetition": {"seed": 5, "repetition_penalty": 1.9},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 1.5},
    "logit_bias": {"temperature": 0.0, "logit_bias": {300: 100.0}},
    "min_tokens": {"temperature": 0.0, "min_tokens": 20, "logit_bias": {0: 100.0}},
    "ignore_eos": {"temperature": 0.0, "ignore_eos": True, "logit_bias": {0: 100.0}},
    "allowed ids": {"seed": 3, "allowed_token_ids": (300, 301, 302, 40), "min_tokens": 3},
    "stop ids": {"temperature": 0.0, "stop_token_ids": (300,), "logit_bias": {300: 15.0}},
    "all": {
        "seed": 8, "temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01,
        "repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": 0.5,
        "min_tokens": 10,
    },
}  # fmt: skip
OPENAIS = {"temperature", "top_p", "seed", "presence_penalty", "frequency_penalty"}


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_gives_the_tokens_of_one_process(demo: Subject, name: str) -> None:
    feature = dict(FEATURES[name])
    bias = feature.pop("logit_bias", {})
    sampling = SamplingParams(max_tokens=24, logit_bias=tuple(bias.items()), **feature)
    (wanted,) = demo.local_tokens(demo.ids(LONG), sampling)
    own = {key: value for key, value in feature.items() if key in OPENAIS}
    extra = {key: value for key, value in feature.items() if key not in OPENAIS}
    answer = demo.client.completions.create(
        model="demo",
        prompt=LONG,
        max_tokens=24,
        logit_bias={str(token_id): value for token_id, value in bias.items()},
        extra_body={"return_token_ids": True, **extra},
        **own,
    )
    choice = answer.choices[0]
    assert choice.token_ids == wanted  # type: ignore[attr-defined]
    shown = wanted[:-1] if wanted[-1] in sampling.stop_token_ids else wanted
    assert choice.text == demo.tokenizer.decode(shown)
    assert choice.finish_reason == ("length" if len(wanted) == 24 else "stop")


def test_samples_and_their_scores(demo: Subject) -> None:
    sampling = SamplingParams(max_tokens=12, seed=5)
    wanted = demo.local_tokens(demo.ids(LONG), sampling, n=3)
    answer = demo.client.completions.create(
        model="demo", prompt=LONG, max_tokens=12, seed=5, n=3, logprobs=2,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert [choice.token_ids for choice in answer.choices] == wanted  # type: ignore[attr-defined]
    scores = GreedyOracle(DEMO).logprobs([*demo.ids(LONG), *wanted[1]])[-12:]
    reported = answer.choices[1].logprobs
    assert reported is not None and reported.token_logprobs == pytest.approx(scores, abs=1e-3)
    assert reported.tokens is not None and "".join(reported.tokens) == answer.choices[1].text
    assert answer.usage is not None and answer.usage.completion_tokens == 36


def test_stop_strings(demo: Subject) -> None:
    (tokens,) = demo.local_tokens(demo.ids(CODE), SamplingParams(max_tokens=24, temperature=0.0))
    whole = demo.tokenizer.decode(tokens)
    stop = whole[9:12]
    cut = whole[: whole.index(stop)]
    for extra, wanted in (({}, cut), ({"include_stop_str_in_output": True}, cut + stop)):
        answer = demo.client.completions.create(
            model="demo", prompt=CODE, max_tokens=24, temperature=0, stop=[stop, "@@"],
            extra_body=extra,
        )  # fmt: skip
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (wanted, "stop")


def test_special_tokens_are_shown_on_demand(demo: Subject) -> None:
    """Special tokens appear in the text except EOS, which the bias makes the likeliest token
    here."""
    answer = demo.client.completions.create(
        model="demo", prompt=CODE, max_tokens=3, logit_bias={"0": 100},
        extra_body={"skip_special_tokens": False, "return_token_ids": True},
    )  # fmt: skip
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.choices[0].token_ids == [0]  # type: ignore[attr-defined]


MESSAGES: list[Any] = [
    {"role": "system", "content": "Write Python."},
    {"role": "user", "content": [{"type": "text", "text": "read a file"}]},
]
CHAT_PROMPT = "# system: Write Python.\n# user: read a file\n# assistant:"


def test_chats_streamed_and_whole(demo: Subject) -> None:
    create = demo.client.chat.completions.create
    (tokens,) = demo.local_tokens(
        demo.ids(CHAT_PROMPT), SamplingParams(max_tokens=16, temperature=0.0)
    )
    whole = create(
        model="demo", messages=MESSAGES, max_completion_tokens=16, temperature=0, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    assert whole.choices[0].message.content == demo.tokenizer.decode(tokens)
    scores = whole.choices[0].logprobs
    assert scores is not None and scores.content is not None and len(scores.content) == 16
    for token_id, score in zip(tokens, scores.content, strict=True):
        assert bytes(score.bytes or ()) == demo.tokenizer.decode([token_id]).encode()
        assert score.top_logprobs[0].logprob == score.logprob, "greedy takes the likeliest"
    stream = create(model="demo", messages=MESSAGES, max_tokens=16, temperature=0, stream=True)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content


def tool(name: str) -> Any:
    function = {"name": name, "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}


def test_tools(demo: Subject) -> None:
    named: Any = {"type": "function", "function": {"name": "now"}}
    options: Any = {
        "model": "demo", "messages": MESSAGES, "tools": [tool("now"), tool("then")],
        "tool_choice": named, "max_tokens": 12, "temperature": 0,
    }  # fmt: skip
    whole = demo.client.chat.completions.create(**options)
    calls = whole.choices[0].message.tool_calls
    assert calls is not None and [call.function.name for call in calls] == ["now"]
    assert calls[0].function.arguments.startswith("{")
    stream = demo.client.chat.completions.create(**options, stream=True)
    deltas = [call for c in stream for call in c.choices[0].delta.tool_calls or ()]
    assert (deltas[0].function.name, deltas[0].id[:5]) == ("now", "call_")
    assert "".join(d.function.arguments or "" for d in deltas) == calls[0].function.arguments
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    answered = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    options |= {"messages": answered, "tool_choice": "auto"}
    assert demo.client.chat.completions.create(**options).choices[0].message.role == "assistant"
    options["tool_choice"] = "none"
    assert demo.client.chat.completions.create(**options).choices[0].message.tool_calls is None


def test_errors_are_openais_exceptions(demo: Subject) -> None:
    create = demo.client.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-9", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        demo.client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError):
        demo.client.embeddings.create(model="demo", input="x")
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="demo", prompt="x", temperature=3)
    assert (bad.value.code, bad.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.BadRequestError) as long:
        create(model="demo", prompt="x " * 2100)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    assert "2048" in long.value.message
    assert demo.client.models.retrieve("demo").id == "demo"


def test_log_likelihoods_are_those_of_transformers(demo: Subject) -> None:
    """Scores are right in the request of evaluation harnesses: ids, echo, logprobs of the prompt,
    one token."""
    oracle = GreedyOracle(demo.local.model_dir)
    generator = random.Random(1)
    prompts = [[generator.randrange(1, 4096) for _ in range(size)] for size in (2, 17, 100)]
    answer = demo.client.completions.create(
        model=demo.model, prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        reported = choice.logprobs
        assert (
            reported is not None
            and reported.token_logprobs is not None
            and reported.tokens is not None
        )
        assert reported.token_logprobs[0] is None and len(reported.tokens) == len(prompt) + 1
        (next_token,) = oracle.continuation(prompt, 1)
        wanted = oracle.logprobs([*prompt, next_token])
        assert reported.token_logprobs[1:] == pytest.approx(wanted, abs=1e-3)
        assert reported.top_logprobs is not None
        for name, own, top in list(
            zip(reported.tokens, reported.token_logprobs, reported.top_logprobs, strict=True)
        )[1:]:
            assert top[name] == own and max(top.values()) >= own


def test_prompt_logprobs_by_token_id(demo: Subject) -> None:
    prompt = [5, 6, 7, 8]
    answer = demo.client.completions.create(
        model=demo.model, prompt=prompt, max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    reported = answer.choices[0].prompt_logprobs  # type: ignore[attr-defined]
    wanted = GreedyOracle(demo.local.model_dir).logprobs(prompt)
    assert reported[0] is None
    own = [
        place[str(token)]["logprob"] for place, token in zip(reported[1:], prompt[1:], strict=True)
    ]
    assert own == pytest.approx(wanted, abs=1e-3)
    assert json.dumps(reported)


def test_beams_over_http(demo: Subject) -> None:
    """Beams work, streamed too: each of the best is one event, at the end."""
    extra = {"use_beam_search": True, "best_of": 3, "length_penalty": 0.0, "early_stopping": True}
    create = demo.client.completions.create
    whole = create(model="demo", prompt=CODE, max_tokens=10, n=2, extra_body=extra)
    stream = create(model="demo", prompt=CODE, max_tokens=10, n=2, stream=True, extra_body=extra)
    texts = {choice.index: choice.text for chunk in stream for choice in chunk.choices}
    sampling = SamplingParams(
        max_tokens=10,
        temperature=0.0,
        use_beam_search=True,
        best_of=3,
        length_penalty=0.0,
        early_stopping="true",
    )
    wanted = [
        demo.tokenizer.decode(tokens) for tokens in demo.local_tokens(demo.ids(CODE), sampling, n=2)
    ]
    assert [choice.text for choice in whole.choices] == wanted
    assert [texts[index] for index in sorted(texts)] == wanted
    chat = demo.client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=6,
        n=2,
        extra_body={"use_beam_search": True},
    )
    assert len({choice.message.content for choice in chat.choices}) == 2
    with pytest.raises(openai.BadRequestError) as refused:
        create(model="demo", prompt=CODE, seed=1, n=2, extra_body=extra)
    assert refused.value.param == "seed"


def test_the_best_of_several_samples_over_http(demo: Subject) -> None:
    create = demo.client.completions.create
    shared: Any = {"model": "demo", "prompt": CODE, "max_tokens": 5, "seed": 3}
    every = create(n=4, logprobs=0, **shared)

    def likelihood(choice: Any) -> float:
        return float(sum(choice.logprobs.token_logprobs))

    ranked = [choice.text for choice in sorted(every.choices, key=likelihood, reverse=True)]
    best = create(n=2, best_of=4, **shared)
    assert [choice.text for choice in best.choices] == ranked[:2]
    assert best.choices[0].logprobs is None
