"""Rows of the table for endpoints that do not generate, and for bodies that no endpoint accepts.
Ids begin with the kind of error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bad_input.cases.fronts import GOOD, GOOD_OF
from bad_input.cases.table import ABSENT, VOCAB_SIZE, Row, rows

_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_TOKENIZE, _DETOKENIZE = "/tokenize", "/detokenize"
PATHS = ("/v1/completions", *GOOD_OF)  # all paths that take JSON
HTTP_ALONE = "an endpoint of HTTP's: gRPC has calls of its own, with types"
_NAMES = ("a b", "é", "a\0", "x" * 257, "x" * 1_000_000, "a\n", "\u202e")


def _name_of(path: str) -> str:
    return path.removeprefix("/v1/").replace("/", "-")


def _of(
    path: str, kind: str, changes: Sequence[Mapping[str, Any]], code: str, param: str | None,
    **more: Any,
) -> list[Row]:  # fmt: skip
    number, _, name = kind.partition("-")
    more = {"over_grpc": HTTP_ALONE, "path": path} | more
    return rows(f"{number}-{_name_of(path)}-{name}", changes, code, param=param, **more)


def _values(path: str, kind: str, name: str, values: Sequence[Any], code: str = "invalid_value",
            **more: Any) -> list[Row]:  # fmt: skip
    return _of(path, f"{kind}-{name}", [{name: value} for value in values], code, name, **more)


def _bodies(path: str) -> list[Row]:
    """Bodies that are no JSON object, or lack its content type."""
    good = json.dumps(GOOD_OF.get(path, GOOD)).encode()
    twice = good[:-1] + b", " + good[1:]
    wrong: Sequence[tuple[str, bytes, str, str | None]] = (
        ("B1-empty", b"", "invalid_json", None),
        ("B2-cut", good[:-2], "invalid_json", None),
        ("B2-behind", good + b"}", "invalid_json", None),
        ("B3-deep", b"[" * 100_000, "json_too_deep", None),
        ("B3-list", b"[" + good + b"]", "invalid_value", None),
        ("B3-null", b"null", "invalid_value", None),
        ("B6-latin", good[:-1] + b', "user": "\xe9"}', "invalid_encoding", None),
        ("B6-mark", b"\xef\xbb\xbf" + good, "invalid_encoding", None),
        ("B7-surrogate", good[:-1] + b', "user": "\\ud800"}', "invalid_encoding", None),
        ("B8-twice", twice, "duplicate_field", next(iter(GOOD_OF.get(path, GOOD)))),
        ("B9-nan", good[:-1] + b', "user": NaN}', "invalid_number", None),
    )
    name, more = _name_of(path), {"path": path, "over_grpc": HTTP_ALONE}
    types = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
    codings = ({"Content-Encoding": "gzip"}, {"Content-Type": "application/json; charset=latin1"})
    return [
        *(Row(id=f"{kind}-{name}", raw=raw, code=code, param=param, **more)
          for kind, raw, code, param in wrong),
        *(Row(id=f"B4-{name}-type-{i}", raw=good, headers={"Content-Type": given}, status=415,
              code="unsupported_media_type", **more) for i, given in enumerate(types)),
        *(Row(id=f"B5-{name}-coding-{i}", raw=good, headers=given, status=415,
              code="unsupported_encoding", **more) for i, given in enumerate(codings)),
        Row(id=f"B4-{name}-large", raw=b" " * (5 << 20), code="request_too_large", status=413,
            **more),
        *(row for field in ("ticket", "kv_transfer_params", "tenant")
          for row in _values(path, "B13", field, [1], "unknown_parameter")),
    ]  # fmt: skip


ENDPOINTS: list[Row] = [
    *(row for path in PATHS for row in _bodies(path)),
    *(row for path in (_LOAD, _UNLOAD) for row in (
        *_values(path, "B19", "lora_name", [ABSENT, None, ""], "missing_required"),
        *_values(path, "B12", "lora_name", [1, True, [], {}]),
    )),
    *_values(_LOAD, "B15", "lora_name", [*_NAMES, "demo"]),
    *_values(_LOAD, "B19", "lora_path", [ABSENT, None, ""], "missing_required"),
    *_values(_LOAD, "B12", "lora_path", [1, True, [], {"path": "/"}, "a\0b", "x" * 5000,
                                         "../" * 500_000]),
    *_of(_LOAD, "B94-path", [{"lora_path": path} for path in (
        "/etc/passwd", "../../..", "/proc/self/mem", "http://169.254.169.254/x", "\\\\host\\x")],
        "adapter_refused", "lora_path"),
    *_values(_UNLOAD, "B15", "lora_name", ["fluent", "demo", "../demo", *_NAMES],
             "model_not_found", status=404),
    *_of(_TOKENIZE, "B19-nothing", [{"prompt": ABSENT}, {"prompt": None}], "missing_required",
         "prompt"),
    *_values(_TOKENIZE, "B12", "prompt", [1, [1], [], {}]),
    *_of(_TOKENIZE, "B12-both", [{"messages": [{"role": "user", "content": "x"}]}],
         "invalid_value", "prompt"),
    *_of(_TOKENIZE, "B16-empty", [{"messages": [], "prompt": ABSENT}], "empty_array", "messages"),
    *_values(_TOKENIZE, "B12", "add_special_tokens", ["yes", 1, []]),
    *_values(_TOKENIZE, "B12", "return_token_strs", ["yes", 1, []]),
    *_values(_DETOKENIZE, "B19", "tokens", [ABSENT, None], "missing_required"),
    *_values(_DETOKENIZE, "B12", "tokens", ["x", 1, {}]),
    *_of(_DETOKENIZE, "B20-id", [{"tokens": [token]} for token in (
        -1, 1.5, "1", None, True, VOCAB_SIZE, 2**32, 2**70)], "invalid_token_id", "tokens[0]"),
    *(row for path in (_TOKENIZE, _DETOKENIZE) for row in (
        *_values(path, "B14", "model", ["nope", "../demo", "x" * 5000], "model_not_found",
                 status=404),
        *_values(path, "B12", "model", [1, [], {}]),
    )),
]  # fmt: skip
