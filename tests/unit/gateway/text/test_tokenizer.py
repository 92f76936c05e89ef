"""Where texts are tokenised, which are refused before, and how a failing library is handled."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
from effort import examples
from fakes.gateway.chat_models import VOCABULARIES
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from baton.core.errors import ContextLengthExceeded, InvalidRequest
from baton.core.request.constraint import Constraint, ConstraintKind
from baton.gateway.text.least_tokens import least_tokens
from baton.gateway.text.tokenizer import INLINE_CHARS, LONG_CHARS, Tokenizer
from baton.gateway.text.tokenizer_file import load_tokenizer
from baton.gateway.validation.constraints import ConstraintCheck

DEMO = Path(__file__).parents[4] / "models" / "demo"
LONG, MIDDLE, SHORT = "x" * (LONG_CHARS + 1), "y" * (INLINE_CHARS + 1), "z"


class SlowLibrary:
    """A tokenizer that takes a given time for long texts, and counts the running ones."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.has_begun = threading.Event()
        self.num_running = 0
        self.most_running = 0
        self.seen: list[str] = []

    def encode_batch_fast(self, texts: list[str], **_: Any) -> list[tokenizers.Encoding]:
        self.seen += texts
        if texts[0][0] == LONG[0]:
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
            self.has_begun.set()
            assert self.may_end.wait(10)
            self.num_running -= 1
        return [tokenizers.Encoding() for _ in texts]


@pytest.fixture
def slow() -> SlowLibrary:
    return SlowLibrary()


def with_library(library: Any) -> Tokenizer:
    return replace(load_tokenizer(DEMO), _library=library, _least=None)


async def test_short_texts_pass_long_ones_that_wait_for_each_other(slow: SlowLibrary) -> None:
    tokenizer = with_library(slow)
    longs = [asyncio.create_task(tokenizer.encode(LONG)) for _ in range(4)]
    await asyncio.to_thread(slow.has_begun.wait, 10)
    for text in (SHORT, MIDDLE, MIDDLE, SHORT):  # the loop and the short texts' thread are free
        assert await tokenizer.encode(text) == ()
    assert slow.seen == [LONG, SHORT, MIDDLE, MIDDLE, SHORT]
    gone = longs.pop()  # its caller leaves while it is queued
    gone.cancel()
    await asyncio.wait([gone])
    slow.may_end.set()
    await asyncio.gather(*longs)
    assert (slow.seen.count(LONG), slow.most_running) == (3, 1)
    tokenizer.close()


class PanicException(BaseException):
    """An exception as raised by pyo3."""


class Panicking:
    def encode_batch_fast(self, texts: list[str], **_: Any) -> Any:
        raise PanicException("index out of bounds")

    decode_batch = encode_batch_fast


@pytest.mark.parametrize("length", [1, INLINE_CHARS + 1, LONG_CHARS + 1])
async def test_a_panic_is_one_callers_error(length: int) -> None:
    tokenizer = with_library(Panicking())
    with pytest.raises(InvalidRequest) as refused:
        await tokenizer.encode("a" * length)
    assert (refused.value.param, refused.value.code) == ("prompt", "invalid_value")
    with pytest.raises(InvalidRequest) as refused:
        await tokenizer.decode([1] * length, param="tokens")
    assert refused.value.param == "tokens"
    tokenizer.close()


class PanickingGrammars:
    refusal = None

    def is_kept(self, constraint: Constraint) -> bool:
        return False

    def compile(self, constraint: Constraint) -> None:
        raise PanicException("unreachable")


async def test_a_panic_of_the_grammars_compiler() -> None:
    check = ConstraintCheck(cast(Any, PanickingGrammars()))
    with pytest.raises(InvalidRequest) as refused:
        await check.check(Constraint(ConstraintKind.REGEX, "a"))
    assert refused.value.param == "constraint"
    check.close()


async def test_the_librarys_own_panic(tmp_path: Path) -> None:
    """The library panics on short tokens with this decoder; the output continues with a replacement
    character."""
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "bcd": 1, "b": 2}, []))
    library.decoder = decoders.Strip("a", 1, 2)
    with pytest.raises(BaseException, match="index out of bounds") as panic:
        library.decode([0])
    assert not isinstance(panic.value, Exception), "the reason for this test is gone"
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="cannot decode"):
        await tokenizer.decode([0])
    detokenizer = tokenizer.detokenizer([0])
    assert detokenizer.step(0) == "\ufffd"
    assert tokenizer.token(0).text == "\ufffd"


# --- bounds ---------------------------------------------------------------------------------------


def spec_of(library: tokenizers.Tokenizer) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(library.to_str())
    return found


LIBRARIES = {kind: make() for kind, make in VOCABULARIES.items()}
PIECES = {
    kind: sorted({library.decode([i]) for i in range(library.get_vocab_size())})
    for kind, library in LIBRARIES.items()
}


@pytest.mark.parametrize("kind", [kind for kind in VOCABULARIES if kind != "unigram"])
@examples(25, 50)
@given(data=st.data())
def test_what_fits_is_never_refused(kind: str, data: st.DataObject) -> None:
    """Texts of the longest tokens, and arbitrary text, are accepted if their tokens fit."""
    library = LIBRARIES[kind]
    least = least_tokens(spec_of(library))
    assert least is not None
    piece = st.sampled_from(PIECES[kind]) | st.text(max_size=3) | st.sampled_from([" ", "\u2581"])
    text = "".join(data.draw(st.lists(st.tuples(piece, st.integers(1, 40)).map(
        lambda run: run[0] * run[1]), max_size=8)))  # fmt: skip
    num_tokens = len(library.encode(text, add_special_tokens=False).ids)
    assert not least.exceed(text, num_tokens)


def test_the_bound_is_each_characters_own() -> None:
    """The bound is per character: long tokens of spaces do not raise the limit for newlines."""
    least = least_tokens(spec_of(LIBRARIES["byte-level"]))
    assert least is not None
    assert least.exceed("\n" * 2**20, 2**20 - 9) and not least.exceed("\n" * 2**20, 2**20)
    longest = max(len(piece) for piece in LIBRARIES["byte-level"].get_vocab() if "\u0120" in piece)
    fitting = " " * longest * 1000
    assert longest > 30 and not least.exceed(fitting, 1000) and least.exceed(fitting, 990)
    assert not least.exceed("", 0)


def lossy() -> Sequence[tokenizers.Tokenizer]:
    collapsing, stripping, cutting = (VOCABULARIES["byte-level"]() for _ in range(3))
    collapsing.normalizer = normalizers.Replace(tokenizers.Regex(" +"), " ")
    stripping.normalizer = normalizers.Strip()
    cutting.pre_tokenizer = pre_tokenizers.Whitespace()
    words = tokenizers.Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    skipping = tokenizers.Tokenizer(models.BPE({"a": 0}, []))  # no token for unknown text
    return collapsing, stripping, cutting, words, skipping, VOCABULARIES["unigram"]()


@pytest.mark.parametrize("library", lossy())
def test_no_bound_where_texts_lose_characters(library: tokenizers.Tokenizer) -> None:
    assert least_tokens(spec_of(library)) is None


def test_spaces_that_a_token_takes_with_it_weigh_nothing() -> None:
    library = VOCABULARIES["byte-level"]()
    library.add_special_tokens([tokenizers.AddedToken("<|end|>", rstrip=True)])
    text = "<|end|>" + "\n" * 100_000
    assert len(library.encode(text).ids) == 1
    least = least_tokens(spec_of(library))
    assert least is not None and not least.exceed(text, 1) and least.exceed("a" * 10**5, 1000)


async def test_too_long_texts_are_refused_untouched(slow: SlowLibrary) -> None:
    """Texts are refused by their bytes before tokenisation, and by their tokens after it."""
    tokenizer = replace(with_library(slow), _least=least_tokens(spec_of(LIBRARIES["byte-level"])))
    with pytest.raises(ContextLengthExceeded, match="3000 characters") as refused:
        await tokenizer.encode("\n" * 3000, max_tokens=2048, param="text")
    assert refused.value.param == "text" and not slow.seen
    plain = load_tokenizer(DEMO)
    assert len(await plain.encode("\n" * 2048, max_tokens=2048)) == 2048
    with pytest.raises(ContextLengthExceeded, match="6 tokens"):
        await plain.encode("q " * 5, max_tokens=4)
    with pytest.raises(ContextLengthExceeded, match="5 tokens"):
        await plain.decode([1] * 5, max_tokens=4)
