"""The prompts that `baton bench` sends."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import StartupFailed
from baton.loadgen.generator import PlannedRequest
from baton.loadgen.prompts import PromptShape, requests, tokenizer_count

DEMO = str(Path(__file__).resolve().parents[3] / "models" / "demo")


def first(num: int, *shape: Any, **more: Any) -> list[PlannedRequest]:
    return list(islice(requests(PromptShape(*shape, **more)), num))


def test_words_are_drawn_and_repeat_themselves() -> None:
    drawn = first(20, "words", 50, 10, range_ratio=0.2, seed=3)
    assert drawn == first(20, "words", 50, 10, range_ratio=0.2, seed=3)
    assert drawn != first(20, "words", 50, 10, range_ratio=0.2, seed=4)
    lengths = [len(str(one.content).split()) for one in drawn]
    assert lengths == [one.num_prompt_tokens for one in drawn]
    assert set(lengths) <= set(range(40, 61)) and len(set(lengths)) > 5
    assert {one.num_output_tokens for one in drawn} <= set(range(8, 13))


def test_words_by_a_tokenizer_are_as_many_tokens() -> None:
    count = tokenizer_count(DEMO)
    for one in first(5, "words", 100, 10, count=count):
        assert 90 <= count(str(one.content)) <= 100


def test_no_tokenizer_keeps_a_load_waiting() -> None:
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text)

    drawn = requests(PromptShape("words", 1000, 10, shared_prefix_len=50, count=count))
    num_before = len(counted)
    lengths = [len(str(one.content)) for one in islice(drawn, 20)]
    assert len(counted) == num_before
    assert all(1030 <= length <= 1051 for length in lengths)


def test_what_all_prompts_share() -> None:
    for dataset, more in (("words", {}), ("token-ids", {"vocab_size": 99})):
        a, b = first(2, dataset, 5, 1, shared_prefix_len=20, **more)
        a_parts, b_parts = (
            one.content.split() if isinstance(one.content, str) else one.content for one in (a, b)
        )
        assert len(a_parts) == a.num_prompt_tokens == 25
        assert a_parts[:20] == b_parts[:20] and a_parts[20:] != b_parts[20:]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "f"
    turns = [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d e"}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    assert first(2, "sharegpt", 9, 9, path=path) == [PlannedRequest("a b", 2, 3)] * 2
    lines = [{"input_length": 7, "output_length": 2, "timestamp": 5}]
    path.write_text("\n".join(map(json.dumps, lines)))
    (one,) = first(1, "lengths", 9, 9, path=path)
    assert (len(str(one.content).split()), one.num_output_tokens) == (7, 2)
    messages = [{"role": "user", "content": "x"}]
    path.write_text(
        f'{{"prompt": "a b c"}}\n\n{json.dumps({"messages": messages, "max_tokens": 4})}'
    )
    found = sorted(first(2, "jsonl", 9, 9, path=path), key=lambda one: one.num_output_tokens)
    assert found[0].content == messages and found[0].num_output_tokens == 4
    assert found[1] == PlannedRequest("a b c", 3, 9)


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text('{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}\r\n', encoding="utf-8")
    assert {one.content for one in first(2, "jsonl", 9, 9, path=path)} == {"a\u2028b\x85c", "d"}


@pytest.mark.parametrize(
    ("dataset", "text", "words"),
    [
        ("jsonl", "nope", "no JSON"),
        ("jsonl", "", "nothing"),
        ("jsonl", '{"a": 1}', "entry 1: no 'prompt'"),
        ("jsonl", '{"prompt": ""}', "entry 1"),
        ("jsonl", '{"prompt": 5}', "entry 1"),
        ("jsonl", '{"prompt": "a", "max_tokens": 0}', "entry 1"),
        ("jsonl", "5", "entry 1"),
        ("sharegpt", '[{"conversations": []}]', "nothing"),
        ("sharegpt", '[{"conversations": 5}]', "entry 1"),
        ("lengths", '{"input_length": "7", "output_length": 2}', "entry 1"),
    ],
)
def test_bad_files(tmp_path: Path, dataset: str, text: str, words: str) -> None:
    path = tmp_path / "f"
    path.write_text(text)
    with pytest.raises(StartupFailed, match=words):
        first(1, dataset, 9, 9, path=path)
    with pytest.raises(StartupFailed, match="cannot be read"):
        first(1, dataset, 9, 9, path=tmp_path / "none")


def test_a_bad_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(StartupFailed, match="no tokenizer"):
            tokenizer_count(str(path))
