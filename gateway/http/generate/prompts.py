"""The prompt of /v1/completions in its four forms: a text, token ids, a list of either."""

from __future__ import annotations

from typing import Any

from ....core.errors import InvalidRequest
from ....core.request.json_fields import STRING, TOKEN_IDS, FieldKind, invalid, list_of

MAX_PROMPTS = 64

Prompt = str | list[int]


def _prompts(value: Any, name: str) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid(name, "a text, token ids, or a list of either")
    if not value:
        raise InvalidRequest(f"{name} is empty", name, "empty_prompt")
    if not isinstance(value[0], str | list):
        return [TOKEN_IDS.read(value, name)]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"{name} has more than {MAX_PROMPTS} prompts", name, "array_too_long")
    if isinstance(value[0], str):
        return [_text(item, f"{name}[{i}]") for i, item in enumerate(value)]
    return [TOKEN_IDS.read(item, f"{name}[{i}]") for i, item in enumerate(value)]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise invalid(name, "a text, like the first of the list")
    return value


_TEXT = STRING.within(minLength=1)
_IDS = TOKEN_IDS.within(minItems=1)
PROMPTS = FieldKind(
    {
        "anyOf": [
            _TEXT.schema,
            _IDS.schema,
            *(list_of(one, MAX_PROMPTS).within(minItems=1).schema for one in (_TEXT, _IDS)),
        ]
    },
    _prompts,
)


def prompt_name(index: int, num_prompts: int) -> str:
    """What the client calls the prompt at this place."""
    return "prompt" if num_prompts == 1 else f"prompt[{index}]"
