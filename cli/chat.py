"""`baton chat`: a completion shell. Lines in, the model's continuation out, as it comes.

`Shell` owns the conversation's text and the commands; it sees the terminal as two functions and the
gateway as a small Protocol. `run` joins it to the real ones.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from ..client import Chunk, Client, Result
from ..client.messages import GenerateParams
from ..core.config import EngineConfig, GatewayConfig, NodeConfig, UpConfig
from ..core.errors import BatonError, Cancelled, ContextLengthExceeded, StartupFailed
from ..core.metrics import percentile
from .background import running_in_background
from .deployment import Deployment
from .launch import report_failure

HELP = """\
/set NAME VALUE   temperature, max_tokens, top_p, top_k or seed; /set alone shows them
/info             who served the last request, and how fast
/reset            forget the text so far
/quit             end (so does Ctrl-D); Ctrl-C cancels a running generation
A line that ends in \\ goes on in the next one.
"""

_SETTINGS: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "max_tokens": int,
    "top_p": float,
    "top_k": int,
    "seed": int,
}


class RunningGeneration(Protocol):
    """client.Generation, as far as the shell uses it."""

    @property
    def result(self) -> Result: ...

    def __iter__(self) -> Iterator[Chunk]: ...

    def cancel(self) -> None: ...


Generate = Callable[[str, GenerateParams], RunningGeneration]


class Shell:
    """One conversation. Later prompts are appended to the text so far."""

    def __init__(
        self,
        generate: Generate,
        read: Callable[[str], str],
        write: Callable[[str], None],
        params: GenerateParams,
    ) -> None:
        """`read` is given what to show before the line; it raises EOFError at the end of input."""
        self._generate = generate
        self._read = read
        self._write = write
        self._params = params
        self._text = ""
        self._last: Result | None = None

    def run(self) -> None:
        """Until /quit or the end of input."""
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
                self._continue(entry)

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
                self._text = ""
                self._write("forgotten\n")
            case ["/info"]:
                self._write(describe(self._last) if self._last else "no request has finished yet\n")
            case ["/set", *arguments]:
                self._set(arguments)
            case [command, *_]:
                self._write(f"there is no {command}; /help names the commands\n")

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
        # Ranges are the gateway's to judge: it says what is allowed.
        self._params = {**self._params, arguments[0]: value}  # type: ignore[misc]

    def _continue(self, entry: str) -> None:
        """Send the whole text; what was shown becomes part of it, unless the request failed."""
        gap = "\n" if self._text and not self._text.endswith("\n") else ""
        text = self._text + gap + entry
        try:
            stream = self._generate(text, self._params)
            with _ctrl_c(stream.cancel):
                for chunk in stream:
                    self._write(chunk.text)
                    text += chunk.text
            self._last = stream.result
            self._text = text
            self._write("\n")
        except Cancelled:
            self._text = text
            self._write("\n[cancelled]\n")
        except BatonError as error:
            self._write(f"\n[{error.code}: {error.message}]\n")
            if isinstance(error, ContextLengthExceeded) and self._text:
                self._write("/reset forgets the text so far\n")


@contextmanager
def _ctrl_c(action: Callable[[], None]) -> Iterator[None]:
    """Meanwhile Ctrl-C does this instead of interrupting whatever line happens to run."""
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


def run(address: str | None, up: UpConfig, engine: EngineConfig, params: GenerateParams) -> int:
    """The shell on this terminal, at `address` or at a deployment of its own. The exit code."""
    try:
        if address is not None:
            return _talk(address, params)
        print(f"starting {engine.model} on this host", flush=True)
        gateway = GatewayConfig(
            grpc_port=0, model=engine.model, served_model_name=engine.served_model_name
        )
        with running_in_background(Deployment(up, engine, NodeConfig(), gateway, _ignore)) as own:
            return _talk(own, params)
    except StartupFailed as error:
        report_failure(error)
        return 1
    except KeyboardInterrupt:
        return 130


def _talk(address: str, params: GenerateParams) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines and remembers them)

    with Client(address) as client:
        try:
            info = client.model_info()
        except BatonError as error:
            raise StartupFailed(
                f"no gateway answers at {address}: {error.message}",
                hint="baton up starts one; without --address, baton chat does",
            ) from error
        _write(
            f"{info.model}, context {info.max_model_len} tokens. A plain completion shell: the "
            "model continues the text so far, no chat template is applied. /help\n"
        )
        Shell(lambda text, given: client.generate(text, **given), input, _write, params).run()
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(name: str, line: str) -> None:
    """Children's lines would run into the conversation; a failure to start quotes them."""
