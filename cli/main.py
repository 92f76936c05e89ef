"""The `baton` command and its subcommands."""

from __future__ import annotations

import argparse

from ..core import flags
from ..core.config import ClusterConfig, EngineConfig, GatewayConfig, NodeConfig, UpConfig
from .launch import run_reporting


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="baton", description="Serve large language models, prefill and decode apart."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start everything on this host, until Ctrl-C")
    flags.add_flags(up, UpConfig, EngineConfig, NodeConfig, GatewayConfig, ClusterConfig)
    demo = commands.add_parser("demo", help="a deployment on this CPU, several prompts, a table")
    demo.add_argument("--max-tokens", type=int, default=64, help="tokens per prompt (64)")
    demo.add_argument("--verbose", action="store_true", help="show every process's output")
    generate = commands.add_parser("generate", help="one process, no roles: the baseline")
    generate.add_argument("prompt", nargs="+", help="text to continue")
    generate.add_argument("--max-tokens", type=int, default=64, help="tokens per prompt (64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    generate.add_argument("--sampling-seed", type=int, default=0, help="seed of sampling (0)")
    flags.add_flags(generate, EngineConfig)
    return parser


def main() -> int:
    """Console script `baton`."""
    arguments = build_parser().parse_args()
    if arguments.command == "up":
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
    if arguments.command == "demo":
        from . import demo

        return run_reporting(lambda: demo.run(arguments.max_tokens, verbose=arguments.verbose))
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
