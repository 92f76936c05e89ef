"""How large a constraint may be, for whoever judges one without compiling it."""

from __future__ import annotations

MAX_SOURCE_BYTES = 64 << 10
MAX_CHOICES = 1024
