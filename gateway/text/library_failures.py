"""What compiled libraries raise (tokenizers, llguidance), where it is one caller's error."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

import tokenizers

from ...core.errors import BatonError, InvalidRequest

log = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"
_PANIC = "PanicException"  # pyo3's for a panic of Rust: made at run time, and no Exception


def is_failure(error: BaseException) -> bool:
    """A library's own: not the end of a task or of the process."""
    return isinstance(error, Exception) or type(error).__name__ == _PANIC


def refuse(error: BaseException, what: str, param: str) -> NoReturn:
    """Raise InvalidRequest(`what`) for a library's failure: the same input fails again, any other
    may not. Other errors go on as they are."""
    if isinstance(error, BatonError) or not is_failure(error):
        raise error
    log.error("%s: %s: %s", what, type(error).__name__, error)
    raise InvalidRequest(what, param, "invalid_value") from None


def decode_few(
    library: tokenizers.Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """The text of a few tokens; U+FFFD for those that the library fails at."""
    try:
        text: str = library.decode(token_ids, skip_special_tokens=skip_special_tokens)
    except BaseException as error:
        if not is_failure(error):
            raise
        return REPLACEMENT
    return text
