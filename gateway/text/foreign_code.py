"""Calls of compiled libraries (tokenizers, llguidance): what they raise becomes one typed error.

A panic of Rust arrives as pyo3's PanicException, which is no Exception: left alone it passes every
`except Exception`, ends the task that made the call, and its caller never gets an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ...core.errors import BatonError, InvalidRequest

log = logging.getLogger(__name__)

_PANIC = "PanicException"  # made at run time: there is nothing to import


def is_failure(error: BaseException) -> bool:
    """A library's own: not the end of a task or of the process."""
    return isinstance(error, Exception) or type(error).__name__ == _PANIC


@contextmanager
def refusing(what: str, param: str) -> Iterator[None]:
    """Raise InvalidRequest(`what`) for a library's failure inside: the same input fails again, any
    other may not. Typed errors pass."""
    try:
        yield
    except BatonError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        log.error("%s: %s: %s", what, type(error).__name__, error)
        raise InvalidRequest(what, param, "invalid_value") from None
