"""`baton keys add`: one more API key in a gateway's file."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from ..gateway.security.key_file import add_key
from ..gateway.security.tenancy import Limits


def run(arguments: argparse.Namespace) -> int:
    """Print the new key alone on stdout; raises StartupFailed if the file cannot take it."""
    given = {field.name: getattr(arguments, field.name) for field in fields(Limits)}
    key = add_key(
        Path(arguments.file),
        arguments.tenant,
        frozenset(arguments.scopes),
        models=None if arguments.models is None else frozenset(arguments.models),
        limits={name: value for name, value in given.items() if value is not None},
    )
    print(f"a key of {arguments.tenant}; it is shown only now:", file=sys.stderr)
    print(key)
    return 0
