"""The `baton` command and its subcommands. A subcommand's module is imported when it is called."""

from __future__ import annotations

import argparse
from typing import Any

from ..core import flags
from ..core.config import ClusterConfig, EngineConfig, GatewayConfig, NodeConfig, UpConfig
from .launch import run_reporting

_Commands = Any  # argparse has no public name for what add_subparsers returns


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; `run` in the parsed arguments is the subcommand's function."""
    parser = argparse.ArgumentParser(
        prog="baton", description="Serve large language models, prefill and decode apart."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_up, _add_demo, _add_generate, _add_chat, _add_doctor, _add_fsck):
        add(commands)
    return parser


def main() -> int:
    """Console script `baton`."""
    arguments = build_parser().parse_args()
    code: int = arguments.run(arguments)
    return code


def _add(commands: _Commands, name: str, what: str) -> argparse.ArgumentParser:
    sentence = f"{what[0].upper()}{what[1:]}{'' if what.endswith('?') else '.'}"
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=sentence)
    return parser


def _add_up(commands: _Commands) -> None:
    parser = _add(commands, "up", "start everything on this host, until Ctrl-C")
    flags.add_flags(parser, UpConfig, EngineConfig, NodeConfig, GatewayConfig, ClusterConfig)
    parser.set_defaults(run=_up)


def _up(arguments: argparse.Namespace) -> int:
    from . import up

    return run_reporting(
        lambda: up.run(
            flags.parse(UpConfig, arguments),
            flags.parse(EngineConfig, arguments),
            flags.parse(NodeConfig, arguments),
            flags.parse(GatewayConfig, arguments),
            flags.parse(ClusterConfig, arguments),
        )
    )


def _add_demo(commands: _Commands) -> None:
    parser = _add(commands, "demo", "a deployment on this CPU, several prompts, a table")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per prompt (64)")
    parser.add_argument("--verbose", action="store_true", help="show every process's output")
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from . import demo

    return run_reporting(lambda: demo.run(arguments.max_tokens, verbose=arguments.verbose))


def _add_generate(commands: _Commands) -> None:
    parser = _add(commands, "generate", "one process, no roles: the baseline")
    parser.add_argument("prompt", nargs="+", help="text to continue")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per prompt (64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument("--sampling-seed", type=int, default=0, help="seed of sampling (0)")
    flags.add_flags(parser, EngineConfig)
    parser.set_defaults(run=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    from . import generate

    return run_reporting(
        lambda: generate.run(
            flags.parse(EngineConfig, arguments),
            arguments.prompt,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            seed=arguments.sampling_seed,
        )
    )


def _add_chat(commands: _Commands) -> None:
    parser = _add(commands, "chat", "a completion shell on this terminal")
    parser.add_argument("--address", help="a running gateway; without one, --model is started here")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per answer (128)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (0.7)")
    flags.add_flags(parser, UpConfig, EngineConfig)
    parser.set_defaults(run=_chat)


def _chat(arguments: argparse.Namespace) -> int:
    from . import chat

    return chat.run(
        arguments.address,
        flags.parse(UpConfig, arguments),
        flags.parse(EngineConfig, arguments),
        {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature},
    )


def _add_doctor(commands: _Commands) -> None:
    parser = _add(commands, "doctor", "look over this host: can it serve?")
    parser.add_argument("--model", default="demo", help="model directory to look at (demo)")
    parser.add_argument("--redis-url", help="a Redis that should answer")
    parser.add_argument(
        "--ports", type=_ports, default=(50051,), help="ports that should be free (50051)"
    )
    parser.set_defaults(run=_doctor)


def _ports(text: str) -> tuple[int, ...]:
    """argparse reports the ValueError of what is no list of numbers."""
    return tuple(int(port) for port in text.split(","))


def _doctor(arguments: argparse.Namespace) -> int:
    from . import doctor

    return doctor.run(doctor.Subject(arguments.model, arguments.redis_url, arguments.ports))


def _add_fsck(commands: _Commands) -> None:
    parser = _add(commands, "fsck", "do all nodes of a cluster agree on who holds what?")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    flags.add_flags(parser, ClusterConfig)
    parser.set_defaults(run=_fsck)


def _fsck(arguments: argparse.Namespace) -> int:
    from . import fsck

    cluster = flags.parse(ClusterConfig, arguments)
    return run_reporting(lambda: fsck.run(cluster, as_json=arguments.json))
