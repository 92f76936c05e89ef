"""The version of this package, as servers report it."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Empty where the source tree was never installed."""
    try:
        return metadata.version("baton-serve")
    except metadata.PackageNotFoundError:
        return ""
