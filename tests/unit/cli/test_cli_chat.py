"""The chat shell: what it sends, its commands, the end of a generation. No terminal, no network."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from transformers import AutoTokenizer

from baton.cli import chat
from baton.cli.chat import (
    Conversation,
    Shell,
    TemplatedChat,
    TextConversation,
    _ended_by_signals,
    conversation_with,
    describe,
)
from baton.cli.deployment.deployment import running_in_background
from baton.client import Chunk, Client, FinishReason, Result
from baton.client.messages import GenerateParams
from baton.core.config import UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import (
    BatonError,
    Cancelled,
    ContextLengthExceeded,
    InvalidRequest,
    StartupFailed,
    Unauthenticated,
    Unavailable,
)
from baton.core.metrics import TokenTimes
from baton.core.model_dir import resolve_model_dir


def result_of(text: str) -> Result:
    return Result(
        id="0" * 32,
        text=text,
        token_ids=(1, 2, 3),
        finish_reason=FinishReason.LENGTH,
        matched_stop=None,
        prompt_tokens=7,
        completion_tokens=3,
        cached_tokens=0,
        prefill_node="prefill-0",
        decode_node="decode-0",
        transfer_bytes=2048,
        transfer_cached_tokens=0,
        transport="shm",
        attempts=1,
        seed=0,
        timeline=(),
        times=TokenTimes(10.0, (10.02, 10.05, 10.06)),
    )


@dataclass
class FakeGeneration:
    """Yields texts, then ends well or with `error`, after a Ctrl-C if it `sends_ctrl_c`."""

    texts: Sequence[str]
    error: BatonError | None = None
    sends_ctrl_c: bool = False
    is_cancelled: bool = False

    @property
    def result(self) -> Result:
        return result_of("".join(self.texts))

    def __iter__(self) -> Iterator[Chunk]:
        for index, text in enumerate(self.texts):
            yield Chunk(text, (1,), index, None)
        if self.sends_ctrl_c:
            os.kill(os.getpid(), signal.SIGINT)
        if self.is_cancelled:
            raise Cancelled("the request was cancelled")
        if self.error:
            raise self.error

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class World:
    """A shell whose input is a list; an exception in the list is raised."""

    answers: list[FakeGeneration] = field(default_factory=list)
    requested: list[tuple[str, GenerateParams]] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    conversation: Conversation = field(default_factory=TextConversation)

    def run(self, *entries: str | BaseException) -> str:
        lines = iter(entries)

        def read(prompt: str) -> str:
            entry = next(lines, EOFError())
            if isinstance(entry, BaseException):
                raise entry
            return entry

        def generate(text: str, params: GenerateParams) -> FakeGeneration:
            self.requested.append((text, params))
            return self.answers.pop(0) if self.answers else FakeGeneration([" ok"])

        Shell(self.conversation, generate, read, self.written.append, {"max_tokens": 4}).run()
        return "".join(self.written)

    @property
    def texts(self) -> list[str]:
        return [text for text, _ in self.requested]


def test_text_is_streamed_and_the_end_of_input_ends() -> None:
    world = World([FakeGeneration(["a", "b"])])
    assert world.run("hello") == "ab\n\n"
    assert world.requested == [("hello", {"max_tokens": 4})]


def test_later_prompts_follow_the_text_so_far() -> None:
    world = World([FakeGeneration([" one"]), FakeGeneration([" two\n"])])
    world.run("first", "second", "third")
    assert world.texts == ["first", "first one\nsecond", "first one\nsecond two\nthird"]


def test_reset_forgets_the_text() -> None:
    world = World()
    world.run("first", "/reset", "second")
    assert world.texts == ["first", "second"]


def test_a_chat_follows_the_template_of_the_model() -> None:
    """Prompts equal transformers' own rendering of the same messages."""
    chat = conversation_with("demo", "demo", None)
    assert isinstance(chat, TemplatedChat)
    world = World([FakeGeneration([" one"]), FakeGeneration([" two"])], conversation=chat)
    world.run("first", "second", "/reset", "third")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_dir("demo"))
    turns = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": " one"},
        {"role": "user", "content": "second"},
    ]
    chats = [turns[:1], turns, [{"role": "user", "content": "third"}]]
    assert world.texts == [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for chat in chats
    ]
    assert all(params["add_special_tokens"] is False for _, params in world.requested)


@pytest.mark.parametrize(("served", "model"), [("other", "demo"), ("demo", "no/such")])
def test_of_a_model_that_is_not_at_hand_the_text_is_continued(served: str, model: str) -> None:
    assert isinstance(conversation_with(served, model, None), TextConversation)


def test_without_a_template_the_text_is_continued(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert isinstance(conversation_with(tmp_path.name, str(tmp_path), None), TextConversation)


def test_a_model_is_known_by_the_name_it_is_served_under() -> None:
    assert isinstance(conversation_with("mine", "demo", "mine"), TemplatedChat)


def test_a_backslash_continues_the_line() -> None:
    world = World()
    world.run("class A:\\", "    def f(self):\\", "        pass", "/quit", "never read")
    assert world.texts == ["class A:\n    def f(self):\n        pass"]


def test_settings_are_sent() -> None:
    world = World()
    printed = world.run("/set temperature 0.7", "/set max_tokens 100", "/set", "go")
    assert world.requested == [("go", {"max_tokens": 100, "temperature": 0.7})]
    assert "max_tokens 100, temperature 0.7\n" in printed


@pytest.mark.parametrize("entry", ["/set temperature hot", "/set colour red", "/set seed", "/what"])
def test_wrong_commands_are_explained_and_change_nothing(entry: str) -> None:
    world = World()
    assert world.run(entry).strip()
    world.run("go")
    assert world.requested == [("go", {"max_tokens": 4})]


def test_info_tells_path_and_times() -> None:
    printed = World().run("/info", "go", "/info")
    assert "no request has finished yet" in printed
    assert "prefill-0 -> decode-0, 2 KiB of KV by shm; 7 prompt tokens, 0 cached; 3 out" in printed
    assert "TTFT 20.0 ms, hand-off gap 30.0 ms, TBT p50 10.0 ms, 50 tokens/s" in printed


def test_a_result_without_tokens_can_be_described() -> None:
    import dataclasses

    nothing = dataclasses.replace(result_of(""), times=TokenTimes(0.0, ()), decode_node=None)
    assert "TTFT -, hand-off gap -" in describe(nothing)


def test_ctrl_c_cancels_the_generation_alone() -> None:
    answer = FakeGeneration([" so", " far"], sends_ctrl_c=True)
    world = World([answer])
    printed = world.run("start", "next")
    assert answer.is_cancelled
    assert "[cancelled]" in printed
    assert world.texts == ["start", "start so far\nnext"]  # the text already shown is kept
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_at_the_prompt_ends_nothing() -> None:
    world = World()
    world.run(KeyboardInterrupt(), "go")
    assert world.texts == ["go"]


def test_errors_are_shown_and_their_prompt_is_forgotten() -> None:
    world = World([FakeGeneration([], InvalidRequest("temperature must lie in [0, 2]"))])
    printed = world.run("bad", "good")
    assert "invalid_request: temperature must lie in [0, 2]" in printed
    assert world.texts == ["bad", "good"]


def test_a_full_context_says_how_to_go_on() -> None:
    world = World([FakeGeneration([" x"]), FakeGeneration([], ContextLengthExceeded("too long"))])
    assert "/reset" in world.run("a", "b")


class DyingDeployment:
    """`Deployment` with a process that keeps ending."""

    address = "127.0.0.1:1"
    is_stopped = False

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None:
        self.is_stopped = True

    async def keep(self) -> str:
        return "decode-0"


@pytest.fixture
def sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
def test_a_deployment_that_gives_up_ends_the_chat(capsys: pytest.CaptureFixture[str]) -> None:
    """The chat ends whatever it is waiting for, and after all processes have ended."""
    deployment: Any = DyingDeployment()
    with (
        pytest.raises(SystemExit) as ended,
        running_in_background(deployment, _ended_by_signals()) as address,
    ):
        assert address == "127.0.0.1:1"
        time.sleep(10)
    assert ended.value.code == 1 and deployment.is_stopped
    assert "error: decode-0 exits repeatedly" in capsys.readouterr().err


@pytest.mark.usefixtures("sigterm")
def test_a_chat_that_is_to_end_ends() -> None:
    _ended_by_signals()
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143


@pytest.mark.parametrize(
    ("address", "ca", "words"),
    [
        ("nowhere", None, "'nowhere' is not HOST:PORT"),
        ("http://a:1", None, "gRPC port"),
        ("a:1", "missing", "--ca-file .*missing: No such file"),
        ("a:1", "junk", "junk has no certificate in PEM"),
    ],
)
def test_where_no_gateway_can_be_is_no_traceback(
    address: str, ca: str | None, words: str, tmp_path: Path
) -> None:
    (tmp_path / "junk").write_text("no certificate")
    ca_file = None if ca is None else str(tmp_path / ca)
    with pytest.raises(StartupFailed, match=words):
        chat.run(address, ca_file, UpConfig(), EngineConfig(), {}, is_completion=True)


@pytest.mark.parametrize(
    ("error", "what", "hint"),
    [
        (
            Unauthenticated("the API key is wrong"),
            "the gateway at a:1 refused the call",
            "BATON_API_KEY",
        ),
        (Unavailable("Socket closed"), "no gateway answers at a:1", "--ca-file"),
    ],
)
def test_a_gateway_that_refuses_is_told_from_none(
    error: BatonError, what: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(Client):
        def model_info(self) -> NoReturn:
            raise error

    monkeypatch.setattr(chat, "Client", Refused)
    with pytest.raises(StartupFailed, match=f"{what}: {error.message}") as caught:
        chat.run("a:1", None, UpConfig(), EngineConfig(), {}, is_completion=True)
    assert hint in caught.value.hint
