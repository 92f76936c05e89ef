"""The version of this package, as servers report it."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Empty if the package is not installed."""
    try:
        return metadata.version("baton-serve")
    except metadata.PackageNotFoundError:
        return ""
