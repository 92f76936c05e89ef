"""The `baton` command and its subcommands. A subcommand's module is imported when it is called."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..core import flags
from ..core.config import ClusterConfig, GatewayConfig, NodeConfig, UpConfig
from ..core.engine_config import EngineConfig
from ..core.version import version
from .launch import reporting, run_reporting

_Commands = Any  # argparse has no public name for what add_subparsers returns
_Run = Callable[[argparse.Namespace], int]
_UP = (UpConfig, EngineConfig, NodeConfig, GatewayConfig, ClusterConfig)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; `run` in the parsed arguments is the subcommand's function."""
    parser = argparse.ArgumentParser(
        prog="baton",
        description="Serve large language models with prefill and decode on different GPUs.",
    )
    parser.add_argument("--version", action="version", version=f"baton {version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (
        *(_add_up, _add_demo, _add_generate, _add_run_batch, _add_bench, _add_chat),
        *(_add_doctor, _add_fsck, _add_index, _add_keys, _add_certs),
    ):
        add(commands)
    return parser


def main() -> int:
    arguments = build_parser().parse_args()
    code: int = arguments.run(arguments)
    return code


def _add(commands: _Commands, name: str, run: _Run, what: str) -> argparse.ArgumentParser:
    sentence = f"{what[0].upper()}{what[1:]}{'' if what.endswith('?') else '.'}"
    parser: argparse.ArgumentParser = commands.add_parser(name, help=what, description=sentence)
    parser.set_defaults(run=run)
    return parser


def _add_up(commands: _Commands) -> None:
    parser = _add(commands, "up", _up, "start everything on this host, until Ctrl-C")
    flags.add_flags(parser, *_UP)


def _up(arguments: argparse.Namespace) -> int:
    from .deployment import up

    return run_reporting(lambda: up.start(*flags.parse_all(arguments, *_UP)))


def _add_demo(commands: _Commands) -> None:
    parser = _add(
        commands,
        "demo",
        _demo,
        "start a deployment on this CPU, run several prompts, print a table",
    )
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per prompt (64)")
    parser.add_argument("--verbose", action="store_true", help="show every process's output")


def _demo(arguments: argparse.Namespace) -> int:
    from .deployment import demo

    return run_reporting(lambda: demo.run(arguments.max_tokens, verbose=arguments.verbose))


def _add_generate(commands: _Commands) -> None:
    parser = _add(
        commands,
        "generate",
        _generate,
        "continue prompts in one process without roles, as a baseline",
    )
    parser.add_argument("prompt", nargs="+", help="text to continue")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per prompt (64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument("--sampling-seed", type=int, default=0, help="seed of sampling (0)")
    flags.add_flags(parser, EngineConfig)


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


def _add_run_batch(commands: _Commands) -> None:
    parser = _add(
        commands, "run-batch", _run_batch, "run the requests of a file in OpenAI's batch format"
    )
    parser.add_argument("-i", "--input", required=True, help="file of requests, one per line")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        help="file of results, one per line; requests with a result in it are skipped",
    )
    parser.add_argument(
        "--url",
        help="HTTP URL of a deployment, with or without /v1, its key in BATON_API_KEY; default: "
        "run --model in this process",
    )
    parser.add_argument(
        "--max-concurrent", type=int, default=256, help="most requests in flight (256)"
    )
    flags.add_flags(parser, EngineConfig)


def _run_batch(arguments: argparse.Namespace) -> int:
    from ..offline import batch

    if arguments.max_concurrent < 1:
        print("error: --max-concurrent must be at least 1", file=sys.stderr)
        return 2
    try:
        root = None if arguments.url is None else _root_of(arguments.url)
    except ValueError:
        print(f"error: --url {arguments.url!r} is no http:// or https:// URL", file=sys.stderr)
        return 2
    config = batch.BatchConfig(
        Path(arguments.input),
        Path(arguments.output),
        root,
        os.environ.get("BATON_API_KEY"),
        arguments.max_concurrent,
    )
    return run_reporting(lambda: batch.run(config, flags.parse(EngineConfig, arguments)))


def _root_of(url: str) -> str:
    """The URL without a /v1 at its end. Raises ValueError if it is not one of HTTP."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(url)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _add_bench(commands: _Commands) -> None:
    from .bench_flags import add_flags

    add_flags(_add(commands, "bench", _bench, "measure any server of OpenAI's API under load"))


def _bench(arguments: argparse.Namespace) -> int:
    async def run() -> int:
        from ..loadgen import benchmark
        from .bench_flags import plan_of

        return await benchmark.run(plan_of(arguments))

    return run_reporting(run)


def _add_chat(commands: _Commands) -> None:
    parser = _add(commands, "chat", _chat, "chat on this terminal, with the model's chat template")
    parser.add_argument(
        "--address", help="gRPC address of a running gateway; default: start --model here"
    )
    parser.add_argument(
        "--completion", action="store_true", help="no chat template: continue the text so far"
    )
    parser.add_argument("--ca-file", help="CA of the gateway's certificate, PEM; enables TLS")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens per answer (128)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (0.7)")
    flags.add_flags(parser, UpConfig, EngineConfig)


def _chat(arguments: argparse.Namespace) -> int:
    from . import chat

    return reporting(
        lambda: chat.run(
            arguments.address,
            arguments.ca_file,
            flags.parse(UpConfig, arguments),
            flags.parse(EngineConfig, arguments),
            {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature},
            is_completion=arguments.completion,
        )
    )


def _add_doctor(commands: _Commands) -> None:
    parser = _add(commands, "doctor", _doctor, "check whether this host can serve")
    parser.add_argument("--model", default="demo", help="model directory to check (demo)")
    parser.add_argument(
        "--redis-url",
        action=flags.UrlWithoutPassword,
        default=os.environ.get("BATON_REDIS_URL"),
        help="Redis to check; for a URL with a password use BATON_REDIS_URL",
    )
    parser.add_argument(
        "--ports",
        type=_ports,
        default=(50051, 8000),
        help="ports that should be free (50051,8000)",
    )


def _ports(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(port) for port in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of ports, such as 50051,8000"
        ) from error


def _doctor(arguments: argparse.Namespace) -> int:
    from .host import doctor

    return doctor.run(doctor.Subject(arguments.model, arguments.redis_url, arguments.ports))


def _add_fsck(commands: _Commands) -> None:
    parser = _add(
        commands,
        "fsck",
        _fsck,
        "check that all nodes of a cluster agree on KV blocks, requests and transfers",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    flags.add_flags(parser, ClusterConfig)


def _fsck(arguments: argparse.Namespace) -> int:
    from .cluster import fsck

    return run_reporting(
        lambda: fsck.run(flags.parse(ClusterConfig, arguments), as_json=arguments.json)
    )


def _add_index(commands: _Commands) -> None:
    parser = _add(commands, "index", _index, "show what each engine has cached, by tenant and tier")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--api-keys", help="key file of the gateways; shows the names of tenants")
    flags.add_flags(parser, ClusterConfig)


def _index(arguments: argparse.Namespace) -> int:
    from .cluster import index

    return run_reporting(
        lambda: index.run(
            flags.parse(ClusterConfig, arguments), arguments.api_keys, as_json=arguments.json
        )
    )


def _add_keys(commands: _Commands) -> None:
    parser = _add(
        commands, "keys", _keys, "make an API key: store its hash in a file and print the key once"
    )
    parser.add_argument("action", choices=("add",), help="what to do")
    parser.add_argument("file", help="the key file of --api-keys; created if it does not exist")
    parser.add_argument(
        "--tenant", required=True, help="tenant of the key: 1 to 64 of A-Z a-z 0-9 _ . -"
    )
    parser.add_argument(
        "--scopes",
        type=_names,
        default=("infer",),
        help="any of infer, metrics, admin, separated by commas (infer)",
    )
    parser.add_argument(
        "--models",
        type=_names,
        help="model names that the tenant may use, separated by commas; default: all",
    )
    for limit, unit in (
        ("requests-per-minute", "requests"),
        ("tokens-per-minute", "prompt and output tokens"),
        ("max-concurrent-requests", "requests in flight"),
    ):
        parser.add_argument(f"--{limit}", type=int, help=f"limit of the tenant: {unit}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _keys(arguments: argparse.Namespace) -> int:
    from ..gateway.security.caller import Limits
    from ..gateway.security.key_file import add_key

    def run() -> int:
        given = {field.name: getattr(arguments, field.name) for field in fields(Limits)}
        key = add_key(
            Path(arguments.file),
            arguments.tenant,
            frozenset(arguments.scopes),
            models=None if arguments.models is None else frozenset(arguments.models),
            limits={name: value for name, value in given.items() if value is not None},
        )
        print(f"a key of {arguments.tenant}; it is shown only now:", file=sys.stderr)
        print(key)  # alone on stdout
        return 0

    return reporting(run)


def _add_certs(commands: _Commands) -> None:
    parser = _add(
        commands, "certs", _certs, "make a CA and certificates of all roles, for trying TLS"
    )
    parser.add_argument("folder", help="folder to write to; for `baton up --certs`")
    parser.add_argument(
        "--hosts",
        type=_names,
        default=(),
        help="further names and addresses of the gateway, separated by commas",
    )
    parser.add_argument(
        "--days", type=int, default=90, help="days that the certificates are valid (90)"
    )


def _certs(arguments: argparse.Namespace) -> int:
    from .host import certs

    folder = Path(arguments.folder)
    return reporting(lambda: certs.run(folder, arguments.hosts, arguments.days))
