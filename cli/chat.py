"""`baton chat`: a shell. It reads lines and streams the model's output.

`Shell` has the commands and the settings; terminal and gateway are functions to it, which `run`
connects. The prompt is the text so far, or a chat rendered by the model's template:

    entry ── prompt ──► prompt's text ── the model ──► output ── answered ──► conversation
An entry whose request failed is not `answered`, and so not part of the conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..client import Client, Result
from ..client.client import Generation
from ..client.messages import GenerateParams
from ..core.config import GatewayConfig, NodeConfig, UpConfig
from ..core.engine_config import EngineConfig
from ..core.errors import (
    BatonError,
    Cancelled,
    ContextLengthExceeded,
    InvalidRequest,
    PermissionDenied,
    StartupFailed,
    Unauthenticated,
)
from ..core.metrics import percentile
from ..core.model_dir import resolve_model_dir
from ..gateway.http.chat.chat_template import ChatTemplate
from ..gateway.http.chat.messages import Message
from .deployment.deployment import Deployment, running_in_background
from .host.certs import ca_of
from .host.gpu_choice import choose_here

HELP = """\
/set NAME VALUE   temperature, max_tokens, top_p, top_k or seed; /set alone shows them
/info             nodes and latencies of the last request
/reset            clear the conversation
/quit             quit (so does Ctrl-D); Ctrl-C cancels a running generation
A line that ends in \\ continues on the next line.
"""

_SETTINGS: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "max_tokens": int,
    "top_p": float,
    "top_k": int,
    "seed": int,
}


Generate = Callable[[str, GenerateParams], Generation]


class TextConversation:
    """A text that the model continues; later entries are appended to it.

    `params` are set in every request; `manner` describes the conversation for people.
    """

    def __init__(self) -> None:
        self.params: GenerateParams = {}
        self.manner = "A plain completion shell: the model continues the text so far."
        self._text = ""

    def prompt(self, entry: str) -> str:
        gap = "\n" if self._text and not self._text.endswith("\n") else ""
        return self._text + gap + entry

    def answered(self, entry: str, answer: str) -> None:
        self._text = self.prompt(entry) + answer

    def reset(self) -> None:
        self._text = ""


class TemplatedChat:
    """Messages in turn, rendered by the model's own chat template."""

    def __init__(self, template: ChatTemplate) -> None:
        # The template writes the special tokens itself.
        self.params: GenerateParams = {"add_special_tokens": False}
        self.manner = "A chat with the model's chat template."
        self._template = template
        self._messages: list[Message] = []

    def prompt(self, entry: str) -> str:
        """Raises InvalidRequest if the template refuses the messages."""
        asked = [*self._messages, {"role": "user", "content": entry}]
        return asyncio.run(self._template.render(asked, ())).text

    def answered(self, entry: str, answer: str) -> None:
        self._messages.append({"role": "user", "content": entry})
        self._messages.append({"role": "assistant", "content": answer})

    def reset(self) -> None:
        self._messages.clear()


Conversation: TypeAlias = TextConversation | TemplatedChat


def conversation_with(served: str, model: str, served_model_name: str | None) -> Conversation:
    """A chat, if `model` is on this host, is the one `served`, and has a template."""
    try:
        model_dir = resolve_model_dir(model)
    except StartupFailed:
        return TextConversation()
    if (served_model_name or model_dir.resolve().name) != served:
        return TextConversation()
    template = ChatTemplate.load(model_dir)
    return TextConversation() if template is None else TemplatedChat(template)


@dataclass(eq=False)
class Shell:
    """One conversation at a terminal. `_read` takes the text to show before the line, and raises
    EOFError at the end of input."""

    _conversation: Conversation
    _generate: Generate
    _read: Callable[[str], str]
    _write: Callable[[str], None]
    _params: GenerateParams
    _last: Result | None = None

    def run(self) -> None:
        """Run until /quit or the end of input."""
        while True:
            try:
                entry = self._read_entry()
            except EOFError:
                self._write("\n")
                return
            except KeyboardInterrupt:
                self._write("\n/quit or Ctrl-D ends\n")
                continue
            if entry.strip() == "/quit":
                return
            if entry.startswith("/"):
                self._command(entry)
            elif entry.strip():
                self._send(entry)

    def _read_entry(self) -> str:
        lines = [self._read("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read("... "))
        return "\n".join(lines)

    def _command(self, entry: str) -> None:
        match entry.split():
            case ["/help"]:
                self._write(HELP)
            case ["/reset"]:
                self._conversation.reset()
                self._write("forgotten\n")
            case ["/info"]:
                self._write(describe(self._last) if self._last else "no request has finished yet\n")
            case ["/set", *arguments]:
                self._set(arguments)
            case [command, *_]:
                self._write(f"unknown command {command}; /help lists the commands\n")

    def _set(self, arguments: list[str]) -> None:
        if not arguments:
            shown = ", ".join(f"{name} {value}" for name, value in self._params.items())
            self._write(f"{shown}\n")
            return
        parse = _SETTINGS.get(arguments[0])
        if parse is None or len(arguments) != 2:
            self._write(f"/set takes one of {', '.join(_SETTINGS)} and a value\n")
            return
        try:
            value = parse(arguments[1])
        except ValueError:
            self._write(f"{arguments[1]!r} is no {parse.__name__}\n")
            return
        # The gateway checks ranges: its error contains the allowed one.
        self._params = {**self._params, arguments[0]: value}  # type: ignore[misc]

    def _send(self, entry: str) -> None:
        """Generate and show. The output joins the conversation unless the request fails."""
        history = self._conversation
        answer = ""
        try:
            stream = self._generate(history.prompt(entry), {**self._params, **history.params})
            with _ctrl_c(stream.cancel):
                for chunk in stream:
                    self._write(chunk.text)
                    answer += chunk.text
            self._last = stream.result
            history.answered(entry, answer)
            self._write("\n")
        except Cancelled:
            history.answered(entry, answer)
            self._write("\n[cancelled]\n")
        except BatonError as error:
            self._write(f"\n[{error.code}: {error.message}]\n")
            if isinstance(error, ContextLengthExceeded):
                self._write("/reset clears the conversation\n")


@contextmanager
def _ctrl_c(action: Callable[[], None]) -> Iterator[None]:
    """Within the context, Ctrl-C calls `action` instead of raising KeyboardInterrupt."""
    previous = signal.signal(signal.SIGINT, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def describe(result: Result) -> str:
    """Two lines on a finished request: its path, and its times on the client's clock."""
    path = result.prefill_node
    if result.decode_node:
        path += f" -> {result.decode_node}, {result.transfer_bytes / 1024:.0f} KiB of KV"
        path += f" by {result.transport}" if result.transport else ""
    again = f", {result.attempts} attempts" if result.attempts > 1 else ""
    times, e2e_s = result.times, result.times.e2e_s
    rate = f"{result.completion_tokens / e2e_s:.0f}" if e2e_s else "-"
    return (
        f"{path}{again}; {result.prompt_tokens} prompt tokens, {result.cached_tokens} cached; "
        f"{result.completion_tokens} out, {result.finish_reason.value}\n"
        f"TTFT {_ms(times.ttft_s)}, hand-off gap {_ms(times.handoff_gap_s)}, "
        f"TBT p50 {_ms(percentile(times.gaps_s, 50))}, {rate} tokens/s\n"
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def run(
    address: str | None,
    ca_file: str | None,
    up: UpConfig,
    engine: EngineConfig,
    params: GenerateParams,
    *,
    is_completion: bool,
) -> int:
    """Run the shell on this terminal, with the gateway at `address` or a deployment of its own.
    Returns the exit code.

    It is a chat if `engine.model` is the served one and has a chat template, unless
    `is_completion`. The API key, if the gateway requires one, is BATON_API_KEY. Raises
    StartupFailed.
    """

    def conversation(served: str) -> Conversation:
        if is_completion:
            return TextConversation()
        return conversation_with(served, engine.model, engine.served_model_name)

    if address is not None:
        key = os.environ.get("BATON_API_KEY")
        return _talk(address, conversation, params, key, ca_file)
    choice = choose_here(up, engine, NodeConfig())
    print(f"starting {engine.model}: {choice.line}", flush=True)
    gateway = GatewayConfig(
        grpc_port=0, http_port=0, model=engine.model, served_model_name=engine.served_model_name
    )
    give_up = _ended_by_signals()
    deployment = Deployment(choice.up, choice.engine, NodeConfig(), gateway, _ignore)
    with running_in_background(deployment, give_up) as own:
        return _talk(own, conversation, params, None, ca_of(up.certs))


def _ended_by_signals() -> Callable[[str], None]:
    """Let SIGTERM end this thread, whatever it waits for, by SystemExit, so that the parts are
    stopped. The returned function does the same from any thread, given the name of a part that
    keeps ending."""
    ended: list[str] = []
    thread = threading.get_ident()

    def end(*_: object) -> None:
        if not ended:
            sys.exit(143)
        print(f"\nerror: {ended[0]} exits repeatedly: giving up", file=sys.stderr)
        sys.exit(1)

    def give_up(name: str) -> None:
        ended.append(name)
        signal.pthread_kill(thread, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    return give_up


def _talk(
    address: str,
    conversation_about: Callable[[str], Conversation],
    params: GenerateParams,
    api_key: str | None,
    ca_file: str | Path | None,
) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines and remembers them)

    try:
        client = Client(address, api_key=api_key, ca_file=ca_file)
    except InvalidRequest as error:
        raise StartupFailed(error.message) from error
    except OSError as error:
        raise StartupFailed(f"--ca-file {ca_file}: {error.strerror}") from error
    with client:
        try:
            info = client.model_info()
        except (Unauthenticated, PermissionDenied) as error:
            raise StartupFailed(
                f"the gateway at {address} refused the call: {error.message}",
                hint="set BATON_API_KEY to one of its keys (`baton keys` makes one)",
            ) from error
        except BatonError as error:
            raise StartupFailed(
                f"no gateway answers at {address}: {error.message}",
                hint="start one with baton up, or leave --address out; if it uses TLS: --ca-file",
            ) from error
        conversation = conversation_about(info.model)
        _write(f"{info.model}, context {info.max_model_len} tokens. {conversation.manner} /help\n")

        def generate(text: str, given: GenerateParams) -> Generation:
            return client.generate(text, **given)

        Shell(conversation, generate, input, _write, params).run()
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(name: str, line: str) -> None:
    """Drop a child's line: it would disturb the conversation. A failure to start quotes the last
    ones."""
