"""Response formats: log-probabilities, choices, and chat templates rendered as by transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from fakes.gateway.chat_models import SPECIALS, VOCABULARIES, named_tokens, write_chat_model
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from baton.core.errors import InvalidRequest
from baton.core.model_dir import resolve_model_dir
from baton.core.request.request import FinishReason, TokenLogprobs
from baton.gateway.http.chat.chat_sample import ChatSample, chat_logprobs
from baton.gateway.http.chat.chat_template import ChatTemplate
from baton.gateway.http.chat.tool_formats import HERMES
from baton.gateway.http.generate.completions import (
    CompletionSample,
    EchoedPrompt,
    TextOffsets,
    completion_logprobs,
)
from baton.gateway.http.generate.generated_answer import prompt_logprobs
from baton.gateway.http.protocol.answers import json_text
from baton.gateway.request.output_chunk import OutputChunk, RequestResult, merged
from baton.gateway.text.token_text import TokenText
from baton.gateway.text.tokenizer_file import load_tokenizer


def token_of(token_id: int) -> TokenText:
    if token_id >= 128:  # a byte that is no complete character
        return TokenText("\ufffd", bytes([token_id]))
    return TokenText(chr(token_id) * 2, (chr(token_id) * 2).encode())


def result(reason: FinishReason = FinishReason.STOP, matched: str | None = None) -> RequestResult:
    return RequestResult(reason, matched, 3, 2, 0, "p", "d", None, 1, 0, ())


def written(answer: Any) -> Any:
    """The response as parsed by a client."""
    return json.loads(json_text(answer))


A, B, C = ord("a"), ord("b"), ord("c")


def test_logprobs_of_completions() -> None:
    scores = [None, TokenLogprobs(-1.0, ((C, -0.5), (200, -0.75))), TokenLogprobs(-2.0)]
    assert msgspec.to_builtins(completion_logprobs([A, B, 200], scores, token_of, [0, 2, 4])) == {
        "tokens": ["aa", "bb", "bytes:\\xc8"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [
            None,
            {"cc": -0.5, "bytes:\\xc8": -0.75, "bb": -1.0},
            {"bytes:\\xc8": -2.0},
        ],
        "text_offset": [0, 2, 4],
    }


def test_offsets_behind_characters_of_several_tokens() -> None:
    """Offsets are right after characters of two tokens and of three, and after a byte that never
    becomes a character."""
    pieces = [b"x", b"\xc3", b"\xa9", b" =", b"\xf0\x9f", b"\x98", b"\x80", b"y", b"\xff", b"z"]
    offsets = TextOffsets()
    tokens = [TokenText(piece.decode(errors="replace"), piece) for piece in pieces]
    assert [offsets.of(token) for token in tokens] == [0, 1, 1, 2, 4, 4, 4, 5, 6, 7]
    assert b"".join(pieces).decode(errors="replace")[4:] == "\U0001f600y\ufffdz"


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("prompt", [" hello", "hello  to you", "<|user|>the <|end|>the"])
@pytest.mark.parametrize("is_text", [True, False])
async def test_offsets_are_of_the_text_that_is_shown(
    tmp_path: Path, vocabulary: str, skips: bool, prompt: str, is_text: bool
) -> None:
    """Offsets refer to the visible text, with a BOS token at the start and EOS inside the
    output."""
    library = write_chat_model(tmp_path, vocabulary, "x")
    begin, end = named_tokens(vocabulary)
    begin_id, end_id = library.token_to_id(begin), library.token_to_id(end)
    library.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, begin_id)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, [end_id])
    prompt_ids = await tokenizer.encode(prompt)
    output_ids = (
        *library.encode("the im", add_special_tokens=False).ids, end_id,
        *library.encode("<|user|>hi", add_special_tokens=False).ids,
    )  # fmt: skip
    echoed = EchoedPrompt(prompt if is_text else await tokenizer.decode(prompt_ids), prompt_ids)
    echoed.scores = (TokenLogprobs(-1.0),) * (len(prompt_ids) - 1)
    detokenizer = tokenizer.detokenizer(prompt_ids, skips_special_tokens=skips)
    chunks = [
        OutputChunk(detokenizer.step(i), (i,), at, logprobs=(TokenLogprobs(-1.0),))
        for at, i in enumerate(output_ids)
    ]
    options = {"echo": True, "logprobs": 0, "skip_special_tokens": skips}
    streamed = CompletionSample(0, options, echoed, tokenizer.token)
    pieces = [streamed.choice(chunk) for chunk in chunks]
    text = "".join(piece.text for piece in pieces)
    found = [at for piece in pieces if piece.logprobs for at in piece.logprobs.text_offset]
    whole = CompletionSample(0, options, echoed, tokenizer.token).choice(merged(chunks))
    assert whole.logprobs is not None and whole.logprobs.text_offset == found
    ids = [*prompt_ids, *output_ids]
    shown = [text[a:b] for a, b in zip(found, [*found[1:], len(text)], strict=True)]
    assert "".join(shown) == text == whole.text
    for token_id, part in zip(ids, shown, strict=True):
        token = tokenizer.token(token_id).text
        assert part in (token, token[1:] if token[0] == " " else "", ""), shown
        if part == "" and token != " ":
            assert token_id in (begin_id, end_id) or token in SPECIALS
    tokenizer.close()


def test_logprobs_of_chats_and_prompts() -> None:
    score = TokenLogprobs(-1.0, ((C, -0.5), (B, -1.0)))
    entry = {"token": "bb", "logprob": -1.0, "bytes": [98, 98]}
    other = {"token": "cc", "logprob": -0.5, "bytes": [99, 99]}
    assert msgspec.to_builtins(chat_logprobs([B], [score], token_of)) == {
        "content": [{**entry, "top_logprobs": [other, entry]}],
        "refusal": None,
    }
    found = prompt_logprobs([A, B, A], [score, TokenLogprobs(-3.0)], token_of)
    assert msgspec.to_builtins(found) == [
        None,
        {
            str(B): {"logprob": -1.0, "rank": 2, "decoded_token": "bb"},
            str(C): {"logprob": -0.5, "rank": 1, "decoded_token": "cc"},
        },
        {str(A): {"logprob": -3.0, "rank": None, "decoded_token": "aa"}},
    ]


def test_pieces_of_a_completion_add_up_to_the_whole() -> None:
    options = {"echo": True, "logprobs": 0, "return_token_ids": True}
    prompt = EchoedPrompt("aabb", (A, B), (TokenLogprobs(-9.0),))
    chunks = [
        OutputChunk("cc", (C,), 0, logprobs=(TokenLogprobs(-1.0),)),
        OutputChunk("", (200,), 1, logprobs=(TokenLogprobs(-2.0),)),
        OutputChunk("aa", (A,), 2, result(matched="x"), logprobs=(TokenLogprobs(-3.0),)),
    ]
    whole = OutputChunk(
        "ccaa", (C, 200, A), 0, chunks[-1].result,
        logprobs=tuple(TokenLogprobs(score) for score in (-1.0, -2.0, -3.0)),
    )  # fmt: skip
    streamed = CompletionSample(4, options, prompt, token_of)
    pieces = [json.loads(text) for chunk in chunks for text in streamed.events(chunk)]
    body = written(CompletionSample(4, options, prompt, token_of).choice(whole))
    assert "".join(piece["text"] for piece in pieces) == body["text"] == "aabbccaa"
    assert body["logprobs"]["token_logprobs"] == [None, -9.0, -1.0, -2.0, -3.0]
    assert body["logprobs"]["text_offset"] == [0, 2, 4, 6, 7]
    for name in body["logprobs"]:
        assert [x for p in pieces for x in p["logprobs"][name]] == body["logprobs"][name]
    assert [x for p in pieces for x in p["token_ids"]] == body["token_ids"] == [C, 200, A]
    assert (pieces[0]["prompt_token_ids"], pieces[1].get("prompt_token_ids")) == ([A, B], None)
    assert [piece["finish_reason"] for piece in pieces] == [None, None, "stop"]
    assert (body["finish_reason"], body["stop_reason"], body["index"]) == ("stop", "x", 4)


def test_a_plain_piece_is_the_same_by_the_short_way() -> None:
    prompt = EchoedPrompt("", ())
    chunk = OutputChunk('say "é"\n', (A,), 0)
    short = CompletionSample(0, {}, prompt, token_of).events(chunk)
    long = CompletionSample(0, {"return_token_ids": True}, prompt, token_of)
    wanted = json.loads(long.events(chunk)[0])
    for extra in ("token_ids", "prompt_token_ids", "stop_reason"):
        del wanted[extra]
    assert [json.loads(event) for event in short] == [wanted]
    assert CompletionSample(0, {}, prompt, token_of).events(OutputChunk("", (A,), 0)) == []
    for extra in ("logprobs", "prompt_logprobs"):
        assert CompletionSample(0, {extra: 0}, prompt, token_of).text_event is None


def chat(found: Mapping[str, Any] = MappingProxyType({}), **more: Any) -> ChatSample:
    ids = iter(range(100))
    return ChatSample(0, found, token_of, lambda: f"{next(ids):024x}", **more)


def test_a_chat_streams_its_role_first() -> None:
    choice = chat()
    events = choice.events(OutputChunk("he", (A,), 0)) + choice.events(
        OutputChunk("y", (B,), 1, result())
    )
    assert [json.loads(event) for event in events] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
         "finish_reason": None},
        {"index": 0, "delta": {"content": "he"}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"content": "y"}, "logprobs": None, "finish_reason": "stop",
         "stop_reason": None},
    ]  # fmt: skip


CALLS = (
    'Look: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)


@pytest.mark.parametrize("most", [None, 1])
def test_tool_calls_streamed_and_whole(most: int | None) -> None:
    found = {"parallel_tool_calls": most is None}
    wanted = [("f", '{"a": 1}'), ("g", "{}")][:most]
    whole = OutputChunk(CALLS, (A,), 0, result())
    message = written(chat(found, parser=HERMES.parser([])).choice(whole))
    assert message["finish_reason"] == "tool_calls"
    assert message["message"]["content"] == "Look: "
    called = [(c["function"]["name"], c["function"]["arguments"])
            for c in message["message"]["tool_calls"]]  # fmt: skip
    assert called == wanted
    choice = chat(found, parser=HERMES.parser([]))
    events: list[str] = []
    for index, letter in enumerate(CALLS):
        last = result() if index == len(CALLS) - 1 else None
        events += choice.events(OutputChunk(letter, (A,), index, last))
    calls: dict[int, dict[str, Any]] = {}
    for event in map(json.loads, events):
        for delta in event["delta"].get("tool_calls", ()):
            call = calls.setdefault(delta["index"], {"arguments": ""})
            call |= {"id": delta["id"], "name": delta["function"]["name"]} if "id" in delta else {}
            call["arguments"] += delta["function"]["arguments"]
    assert [(c["name"], c["arguments"]) for c in calls.values()] == wanted
    assert len({c["id"] for c in calls.values()}) == len(wanted)
    assert json.loads(events[-1])["finish_reason"] == "tool_calls"
    assert sum(json.loads(event)["finish_reason"] is not None for event in events) == 1


@pytest.mark.parametrize("text", [CALLS[:-24], CALLS.replace("f", "g")[:40]])
def test_a_stop_string_amid_a_call_is_no_call(text: str) -> None:
    """A stop string cuts the arguments of a call, so the fragment is not returned as a call."""
    whole = chat(parser=HERMES.parser([])).choice(OutputChunk(text, (A,), 0, result()))
    assert whole.finish_reason == "stop"
    choice = chat(parser=HERMES.parser([]))
    events = choice.events(OutputChunk(text, (A,), 0))
    events += choice.events(OutputChunk("", (A,), 1, result()))
    assert json.loads(events[-1])["finish_reason"] == "stop"


def test_a_call_is_whole_whose_last_brace_is_missing() -> None:
    for text in (CALLS[:-13], CALLS[: CALLS.index("</")][:-1]):
        whole = chat(parser=HERMES.parser([])).choice(OutputChunk(text, (A,), 0, result()))
        assert whole.finish_reason == "tool_calls"


def test_a_call_that_is_left_out_may_be_cut() -> None:
    choice = chat({"parallel_tool_calls": False}, parser=HERMES.parser([]))
    whole = choice.choice(OutputChunk(CALLS[:-24], (A,), 0, result()))
    assert whole.finish_reason == "tool_calls"


def test_a_call_that_is_cut_off_ends_by_length() -> None:
    opening = HERMES.opening("f", is_constrained=False)
    choice = chat(parser=HERMES.parser([]), opening=opening)
    whole = OutputChunk('"a": ', (A,), 0, result(FinishReason.LENGTH))
    body = written(choice.choice(whole))
    assert (body["finish_reason"], body["message"]["content"]) == ("length", None)
    assert body["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": '}


TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{{ eos_token }}"
    "{% endfor %}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endif %}{{ m.content }}{% endfor %}",
    "controls": "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 2 %}"
    "{% break %}{% endif %}{% set ns.n = ns.n + 1 %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}{{ ns.n }}{{ '-' * 5 }}",
    "blocks": "{%- for m in messages %}\n    {%- if m.role == 'user' %}\n  U {{ m.content }}\n"
    "    {% endif %}\n{% endfor %}\nend\n",
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " be <brief> & 'kind' "},
    {"role": "user", "content": "hé\n"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "<é>"}}}]},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def write_template(folder: Path, template: Any) -> ChatTemplate | None:
    config = {"chat_template": template, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTemplate.load(folder)


@pytest.mark.parametrize("name", [*TEMPLATES, "demo"])
@pytest.mark.parametrize("tools", [[], TOOLS])
async def test_templates_render_as_in_transformers(
    tmp_path: Path, name: str, tools: list[Any]
) -> None:
    demo = resolve_model_dir("demo")
    source = (demo / "chat_template.jinja").read_text() if name == "demo" else TEMPLATES[name]
    template = write_template(tmp_path, source)
    assert template is not None
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(demo / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    wanted = theirs.apply_chat_template(
        MESSAGES, tools or None, chat_template=source, add_generation_prompt=True, tokenize=False
    )
    assert (await template.render(MESSAGES, tools)).text == wanted


async def test_a_file_comes_first_and_lists_have_names(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    template = write_template(tmp_path, named)
    assert template is not None and (await template.render(MESSAGES, ())).text == "t"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate.load(tmp_path)
    assert template is not None and (await template.render(MESSAGES * 20, ())).text == "file"


@pytest.mark.parametrize("template", [None, "{% if %}", 5, "{{ x " * 5, "{% for a in" + "(" * 9999])
def test_templates_that_cannot_be_used(tmp_path: Path, template: Any) -> None:
    assert write_template(tmp_path, template) is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.nothing.at_all }}", "cannot take"),
        ("{{ 1 / 0 }}", "cannot take"),
        ("{{ messages[0].__class__.__mro__ }}", "cannot take"),
        ("{{ ''.__class__.__subclasses__() }}", "cannot take"),
        ("{% set _ = messages.append(1) %}", "cannot take"),
        ("{{ 'a' * 1000000000 }}", "cannot take"),
        ("{{ 1000000000 * 'a' }}", "cannot take"),
        ("{{ 9 ** 99999999 }}", "cannot take"),
        ("{% for a in range(10 ** 9) %}{% endfor %}", "cannot take"),
        ("{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "too much"),
    ],
)
async def test_templates_that_go_too_far(tmp_path: Path, source: str, words: str) -> None:
    template = write_template(tmp_path, source)
    assert template is not None
    with pytest.raises(InvalidRequest, match=words) as caught:
        await template.render(MESSAGES, ())
    assert caught.value.param == "messages"


async def test_tokens_alone_as_bytes() -> None:
    tokenizer = load_tokenizer(resolve_model_dir("demo"), ())
    text = "def é(): # 世界 🙂\n"
    ids = await tokenizer.encode(text)
    assert b"".join(tokenizer.token(i).data for i in ids) == text.encode()
    assert tokenizer.token(0).text == "<|endoftext|>"
    assert tokenizer.token(10**6) == TokenText("", b"")
    num_ids = tokenizer._library.get_vocab_size()
    assert len({tokenizer.token(i).name for i in range(num_ids)}) == num_ids
    tokenizer.close()
