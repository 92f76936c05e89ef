"""The page's own files, read once. Whatever is not among them does not exist: no path is joined."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """`etag` changes with the content."""

    body: bytes
    content_type: str
    etag: str


@cache
def static_files() -> dict[str, StaticFile]:
    """By path below static/, with forward slashes."""
    return {
        path.relative_to(_FOLDER).as_posix(): _load(path)
        for path in sorted(_FOLDER.rglob("*"))
        if path.suffix in _TYPES
    }


def _load(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(body, _TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:32])
