"""Stop strings, splicing and detokenising, against brute force and the tokenizer itself."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from fakes.gateway.byte_model import EOS_ID, write_byte_model
from fakes.gateway.engine_link import Letters
from hypothesis import given
from hypothesis import strategies as st
from patience import SOON_S
from tokenizers import decoders
from tokenizers.decoders import DecodeStream

from baton.core.errors import StartupFailed
from baton.core.request.sampling_params import SamplingParams
from baton.gateway.text.stop_strings import StopSearch
from baton.gateway.text.text_stream import TextStream, WholeTexts
from baton.gateway.text.tokenizer import Tokenizer
from baton.gateway.text.tokenizer_file import load_tokenizer

DEMO = Path(__file__).parents[4] / "models" / "demo"

letters = st.text("abc", max_size=30)
stops = st.lists(st.text("abc", min_size=1, max_size=5), max_size=4)


def cut_at_first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Brute force: try every end from the left, the longest stop string first."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(st.lists(letters, max_size=8), stops)
def test_stop_strings_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    search = StopSearch(stops)
    text, stop = cut_at_first_stop("".join(pieces), stops)
    shown = ""
    for piece in pieces:
        more, _, matched = search.feed([piece])
        shown += more
        assert text.startswith(shown), "never a piece of a stop string"
        if matched is not None:
            assert (shown, matched) == (text, stop)
            return
    assert (shown + search.flush(), None) == (text, stop)


@given(letters, st.text("abc", min_size=1, max_size=5))
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stop: str) -> None:
    search = StopSearch([stop])
    shown, _, matched = search.feed([text])
    if matched is None:
        assert stop.startswith(text[len(shown) :])


@given(letters, stops, st.integers(1, 9))
def test_tokens_behind_a_stop_string_do_not_count(text: str, stops: list[str], step: int) -> None:
    stream = TextStream(Letters().step, SamplingParams(stop=tuple(stops)))
    ids = list(map(ord, text))
    shown, num_tokens = "", 0
    for start in range(0, len(ids), step):
        more, num_more, stop = stream.feed(ids[start : start + step])
        shown += more
        num_tokens += num_more
        if stop is not None:
            assert (shown, stop) == cut_at_first_stop(text, stops)
            assert num_tokens == len(shown) + len(stop)
            return
    assert (shown + stream.flush(), None) == cut_at_first_stop(text, stops)


@pytest.mark.parametrize("stops", [(), ("x",), ("bc",)])
@pytest.mark.parametrize("includes", [False, True])
def test_the_token_of_a_stop_id_is_not_shown(stops: tuple[str, ...], includes: bool) -> None:
    sampling = SamplingParams(stop=stops, stop_token_ids=(ord("c"),))
    stream = TextStream(Letters().step, sampling, includes_stop=includes)
    pieces = [stream.feed([ord("a"), ord("b")]), stream.feed([ord("c")])]
    assert sum(num_tokens for _, num_tokens, _ in pieces) == 3
    matched = "bc" if includes and "bc" in stops else None  # text that is not shown is not searched
    assert pieces[-1][2] == matched
    text = "".join(text for text, _, _ in pieces) + stream.flush()
    assert text == ("abc" if includes else "ab")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_byte_model(tmp_path_factory.mktemp("m") / "demo"), [EOS_ID])


@given(st.text(max_size=20), st.text(max_size=20))
def test_detokenised_text_is_the_text(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    detokenizer = tokenizer.detokenizer(list(prompt.encode()))
    pieces = [detokenizer.step(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@given(st.binary(max_size=12), st.lists(st.integers(0, EOS_ID), max_size=30))
def test_any_tokens_after_any_prompt(tokenizer: Tokenizer, prompt: bytes, ids: list[int]) -> None:
    """Broken UTF-8 is shown as by decode(), except for a character that never ended."""
    detokenizer = tokenizer.detokenizer(list(prompt))
    text = "".join(map(detokenizer.step, ids))
    whole = bytes(i for i in ids if i != EOS_ID)
    try:
        prompt.decode()
    except UnicodeDecodeError:
        return  # a prompt that ends inside a character: no text to continue
    expected = whole.decode(errors="replace")
    assert expected.startswith(text)
    assert not expected[len(text) :].strip("\ufffd")


def byte_fallback_library() -> tokenizers.Tokenizer:
    """A SentencePiece-like tokenizer: words begin with their space, and each byte has a token."""
    words = ["▁", "▁the", "the", "▁é", "�", "a"]
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<s>"])
    return library


HIDDEN_ID = 300


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    """The library's tokenizer and ours, for one vocabulary."""
    folder = DEMO
    if request.param == "byte-fallback":
        folder = tmp_path_factory.mktemp("fallback")
        byte_fallback_library().save(str(folder / "tokenizer.json"))
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return library, load_tokenizer(folder, [HIDDEN_ID])


@given(st.data(), st.booleans())
def test_each_step_is_what_the_library_says(
    both: tuple[tokenizers.Tokenizer, Tokenizer], data: st.DataObject, skips: bool
) -> None:
    """Each step equals the library's incremental decoding, for parts of characters and special
    tokens too."""
    library, tokenizer = both
    last_id = library.get_vocab_size() + 3  # models have more ids than their tokenizers
    broken = [i for i in range(last_id) if "\ufffd" in library.decode([i])]
    any_ids = st.integers(0, last_id) | st.sampled_from([*broken, 0, HIDDEN_ID])
    prompt = data.draw(st.lists(any_ids, max_size=8))
    if library.decode(prompt).endswith("\ufffd"):
        prompt = []
    own = DecodeStream(ids=prompt, skip_special_tokens=skips)
    ours = tokenizer.detokenizer(prompt, skips_special_tokens=skips)
    for token_id in data.draw(st.lists(any_ids, max_size=30)):
        text = ours.step(token_id)
        try:
            expected = None if token_id == HIDDEN_ID else own.step(library, token_id)
        except Exception as error:  # it fails on bytes that are no UTF-8; ours restarts
            assert "Invalid prefix" in str(error)
            own = DecodeStream(ids=[], skip_special_tokens=skips)
            expected = own.step(library, token_id)
        assert text == (expected or "")


_BYTES = st.sampled_from([*b"a\x80\xbf\xc3\xe2\xed\xf0\xf4\xff", EOS_ID, EOS_ID + 3])


@given(st.lists(st.tuples(_BYTES, st.integers(1, 50)), max_size=8), st.booleans())
def test_bytes_that_are_no_text_are_shown_all_along(
    tokenizer: Tokenizer, runs: list[tuple[int, int]], skips: bool
) -> None:
    """Invalid bytes are shown as by decode(), and are not held back for long."""
    ids = [i for i, count in runs for _ in range(count)]
    detokenizer = tokenizer.detokenizer([], skips_special_tokens=skips)
    text = ""
    for place, token_id in enumerate(ids, 1):
        text += detokenizer.step(token_id)
        whole = bytes(i for i in ids[:place] if i < EOS_ID).decode(errors="replace")
        assert whole.startswith(text) and len(whole) - len(text) <= 32
    whole = tokenizer._library.decode(ids)
    assert not whole.removeprefix(text).strip("\ufffd")


@given(st.text(max_size=8))
def test_no_piece_is_too_odd_for_a_decoder_of_bytes(piece: str) -> None:
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({piece: 0}, unk_token=piece))
    library.decoder = decoders.ByteLevel()
    text = WholeTexts(library, frozenset())[0]
    assert text is None or "\ufffd" not in text


def test_tokens_that_all_end_inside_a_character(tmp_path: Path) -> None:
    """Tokens that all end inside a character, as in vocabularies of merged bytes for three-byte
    scripts, are decoded like the whole text."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE({"â": 0, "Ĥ¬â": 1, "Ĥ¬": 2}, []))
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    detokenizer = load_tokenizer(tmp_path).detokenizer([0, 2])
    pieces = [detokenizer.step(i) for i in [0, *[1] * 999, 2, 0, 2]]
    assert "".join(pieces) == "€" * 1001
    assert max(map(len, pieces)) <= 33


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("token_id", [0x80, 0xE2, EOS_ID, EOS_ID + 3])
def test_a_token_without_a_text_costs_the_same_each_time(
    tokenizer: Tokenizer, token_id: int, skips: bool
) -> None:
    """A token without text takes constant time; the library, which decodes all held tokens again,
    would take a minute for these."""
    tokenizer = replace(tokenizer, _whole_texts=WholeTexts(tokenizer._library, frozenset()))
    detokenizer = tokenizer.detokenizer([*b"so "], skips_special_tokens=skips)
    began_s = time.thread_time()
    for _ in range(20_000):
        detokenizer.step(token_id)
    assert time.thread_time() - began_s < SOON_S
    assert detokenizer.step(ord("x")).endswith("x")


def test_both_directions(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer._library.get_vocab_size() == 257
    short, long = "naïve", "naïve " * 1000
    for text in (short, long):
        assert asyncio.run(tokenizer.encode(text)) == tuple(text.encode())
    assert asyncio.run(tokenizer.decode([*b"ok", EOS_ID])) == "ok"


def test_a_leading_space_depends_on_what_comes_before(tmp_path: Path) -> None:
    """SentencePiece-like tokenizers drop the leading space of a text; a continuation must keep
    it."""
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"▁hello": 0, "▁world": 1, "?": 2}, unk_token="?")
    )
    library.decoder = tokenizers.decoders.Metaspace()
    library.save(str(tmp_path / "tokenizer.json"))
    detokenizer = load_tokenizer(tmp_path).detokenizer([0])
    assert detokenizer.step(1) == " world"


def test_what_is_wrong_with_a_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(StartupFailed, match=r"no tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.hint
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupFailed, match="cannot read"):
        load_tokenizer(tmp_path)
