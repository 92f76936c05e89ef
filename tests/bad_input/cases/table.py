"""The required response to each bad request, as a table: a row is one request and its verdict on
both fronts.

A row changes one thing in a valid request. Over gRPC the same request is sent in protobuf if
protobuf can express it: SAME; if its types refuse it before sending: TYPED; otherwise the row gives
the reason why it cannot be sent. Ids begin with the kind of request, B27, and number its rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bad_input.cases.fronts import GOOD, GOOD_CHAT, GOOD_OF

from baton.proto.v1 import inference_pb2

SAME, TYPED = "same", "typed"
JSON_ALONE = "JSON's own: a protobuf message has no such form"
CHAT_ALONE = "chats, tools and templates are HTTP's: gRPC takes prompts"
NO_FIELD = "there is no such field: what a client sends under its number is dropped"

VOCAB_SIZE = 264  # of the byte model
_CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`change`: changed fields of the good request; `raw`: a whole body instead.

    `over_grpc`: see above; with `raw`, `grpc_raw` is the same in protobuf. The code there is the
    same unless `grpc_code` is given.
    """

    id: str
    code: str
    param: str | None = None
    status: int = 400
    change: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    path: str = "/v1/completions"
    over_grpc: str = SAME
    grpc_raw: bytes | None = None
    grpc_status: str = "INVALID_ARGUMENT"
    grpc_code: str | None = None
    grpc_param: str | None = None

    def body(self) -> bytes:
        if self.raw is not None:
            return self.raw
        good = GOOD_OF.get(self.path, GOOD)
        body = {k: v for k, v in (good | dict(self.change)).items() if v is not ABSENT}
        return json.dumps(body).encode()

    def message(self) -> inference_pb2.GenerateRequest | bytes:
        """The same for gRPC; raises ValueError or TypeError where protobuf cannot express it."""
        return self.grpc_raw if self.grpc_raw is not None else to_wire(GOOD | dict(self.change))


class _Absent:
    """Marks a field as left out."""


ABSENT: Any = _Absent()


def to_wire(body: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """A completion's fields as a gRPC message, without validation."""
    wire = inference_pb2.GenerateRequest()
    for name, value in body.items():
        if value is ABSENT:
            continue
        if name == "prompt":
            if isinstance(value, str):
                wire.text = value
            else:
                wire.token_ids.SetInParent()
                wire.token_ids.ids.extend(value)
        elif name == "logit_bias":
            wire.sampling.logit_bias.update({int(key): bias for key, bias in value.items()})
        elif name in ("model", "n", "cache_salt", "request_id"):
            setattr(wire, name, value)
        elif name in ("stop", "stop_token_ids", "allowed_token_ids"):
            getattr(wire.sampling, name).extend([value] if isinstance(value, str) else value)
        else:
            setattr(wire.sampling, name, value)
    return wire


def rows(prefix: str, changes: Sequence[Mapping[str, Any]], code: str, **more: Any) -> list[Row]:
    """A row for each change of a completion."""
    return [
        Row(id=f"{prefix}-{i}", code=code, change=change, **more)
        for i, change in enumerate(changes)
    ]


def field_rows(
    prefix: str, name: str, values: Sequence[Any], code: str = "invalid_value", **more: Any
) -> list[Row]:
    """A row for each value of a field, with the field as its param."""
    more = {"param": name} | more
    return rows(prefix, [{name: value} for value in values], code, **more)


def chat_rows(
    prefix: str, changes: Sequence[Mapping[str, Any]], code: str, param: str | None, **more: Any
) -> list[Row]:
    more = {"over_grpc": CHAT_ALONE} | more
    return rows(prefix, changes, code, param=param, path=_CHAT, **more)


def _user(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} | more]}


def _tools(parameters: Any, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}]}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def deep_arguments(depth: int) -> bytes:
    """A chat whose assistant message has a tool call with arguments of this depth."""
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = GOOD_CHAT | {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    return json.dumps(body).encode()


def _raw(text: str) -> bytes:
    """A body with the fields of a good request and this text among them."""
    return json.dumps(GOOD)[:-1].encode() + b", " + text.encode("utf-8", "surrogatepass") + b"}"


_NAN, _INFINITY = float("nan"), float("inf")
_GOOD_JSON = json.dumps(GOOD).encode()
_TRUNCATED = b"\x12\x05hel"  # a text of five bytes, three of which are present
_NOT_UTF8 = b"\x12\x03\xff\xfe\xfd"
_LOOPS = (
    {"$ref": "#"}, {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    {"$ref": "#/properties/a", "properties": {"a": {"$ref": "#/properties/a"}}},
)  # fmt: skip

BODIES: list[Row] = [
    Row(id="B1-empty", raw=b"", code="invalid_json", grpc_raw=b"",
        grpc_code="missing_required", grpc_param="prompt"),
    Row(id="B1-space", raw=b" \n", code="invalid_json", over_grpc=JSON_ALONE),
    Row(id="B2-truncated", raw=_GOOD_JSON[:-3], code="invalid_json", grpc_raw=_TRUNCATED,
        grpc_code="invalid_encoding"),
    Row(id="B2-garbage-behind", raw=_GOOD_JSON + b"x", code="invalid_json", grpc_raw=b"\xff",
        grpc_code="invalid_encoding"),
    Row(id="B2-two-objects", raw=_GOOD_JSON * 2, code="invalid_json", over_grpc=JSON_ALONE),
    Row(id="B3-deep", raw=b"[" * 200_000, code="json_too_deep", grpc_raw=b"\x0b" * 200,
        grpc_code="invalid_encoding"),
    *[Row(id=f"B3-deep-{depth}", code=code, param=param, over_grpc=JSON_ALONE,
          raw=_raw('"user":' + "[" * depth + r'"\ud83d\ude00"' + "]" * depth))
      for depth, code, param in ((500, "invalid_value", "user"), (900, "invalid_value", "user"),
                                 (10_000, "json_too_deep", None))],
    Row(id="B3-deep-objects", raw=b'{"a":' * 10_000, code="json_too_deep", over_grpc=JSON_ALONE),
    Row(id="B4-64MiB", raw=b" " * (64 << 20), code="request_too_large", status=413,
        grpc_raw=b"\x12\x80\x80\x80\x20" + b" " * (64 << 20), grpc_status="RESOURCE_EXHAUSTED",
        grpc_code=""),
    *[Row(id=f"B5-{coding}", raw=b"\x1f\x8b\x08" + b"\0" * 99, code="unsupported_encoding",
          status=415, headers={"Content-Encoding": coding},
          over_grpc="compression is gRPC's own, and its cap counts what comes out")
      for coding in ("gzip", "deflate", "br", "zstd", "gzip, gzip", "x")],
    *[Row(id=f"B6-{i}", raw=_GOOD_JSON, code=code, status=415,
          headers={"Content-Type": kind}, over_grpc="gRPC checks its own content type: B76")
      for i, (kind, code) in enumerate([
          ("text/plain", "unsupported_media_type"), ("", "unsupported_media_type"),
          ("multipart/form-data; boundary=x", "unsupported_media_type"),
          ("application/x-www-form-urlencoded", "unsupported_media_type"),
          ("application/json; charset=utf-7", "unsupported_encoding"),
          ("application/jsonp", "unsupported_media_type")])],
    Row(id="B7-utf8", raw=b'{"prompt": "\xff\xfe"}', code="invalid_encoding", grpc_raw=_NOT_UTF8,
        grpc_code="invalid_encoding"),
    Row(id="B7-utf16", raw=json.dumps(GOOD).encode("utf-16"), code="invalid_encoding",
        over_grpc=JSON_ALONE),
    Row(id="B7-surrogate", raw=_raw(r'"user": "\ud800"'), code="invalid_encoding",
        over_grpc=JSON_ALONE),
    Row(id="B7-surrogate-in-a-key", raw=_raw(r'"\udfff": 1'), code="invalid_encoding",
        over_grpc=JSON_ALONE),
    Row(id="B7-surrogate-bytes", raw=_raw('"user": "\ud800"'), code="invalid_encoding",
        grpc_raw=b"\x12\x03\xed\xa0\x80", grpc_code="invalid_encoding"),
    Row(id="B7-bom", raw=b"\xef\xbb\xbf" + _GOOD_JSON, code="invalid_encoding",
        over_grpc=JSON_ALONE),
    *[Row(id=f"B8-{i}", raw=_raw(text), code="duplicate_field", param=param,
          over_grpc="of a field that comes twice the last counts: protobuf's rule")
      for i, (text, param) in enumerate([
          ('"model": "demo"', "model"), (r'"mod\u0065l": "demo"', "model"),
          ('"metadata": {"a": "x", "b": "x", "a": "x"}', "a"),
          ('"stop": [{"a": [{"b": 1, "b": 1}]}]', "b"), ('"logit_bias": {"1": 1, "1": 1}', "1"),
          ('"user": {"": 1, "": 1}', ""), (r'"user": {"\ud800": 1, "\ud800": 1}', None),
          ('"user": {"' + "x" * 999 + '": 1, "' + "x" * 999 + '": 1}', "x" * 64)])],
    *[Row(id=f"B9-{literal[:9]}", raw=_raw(f'"temperature": {literal}'), code="invalid_number",
          grpc_raw=to_wire(GOOD | {"temperature": value}).SerializeToString(),
          grpc_code="invalid_value", grpc_param="temperature")
      for literal, value in [("NaN", _NAN), ("Infinity", _INFINITY), ("-Infinity", -_INFINITY),
                             ("1e999", _INFINITY)]],
    *[Row(id=f"B9-minus-zero-{name}-{literal}", raw=_raw(f'"{name}": {literal}'),
          code="invalid_number", grpc_code="invalid_value", grpc_param=name,
          grpc_raw=to_wire(GOOD | {name: -0.0}).SerializeToString())
      for name in ("temperature", "min_p", "presence_penalty", "frequency_penalty")
      for literal in ("-0", "-0.0", "-0e7", "-1e-999")],
    Row(id="B9-minus-zero-bias", raw=_raw('"logit_bias": {"1": -0.0}'), code="invalid_number",
        grpc_code="invalid_value", grpc_param="logit_bias",
        grpc_raw=to_wire(GOOD | {"logit_bias": {"1": -0.0}}).SerializeToString()),
    *[Row(id=f"B9-minus-zero-{name}", raw=_raw(f'"{name}": -0'), code="invalid_number",
          over_grpc=JSON_ALONE) for name in ("seed", "min_tokens", "top_k", "n", "logprobs")],
    Row(id="B9-endless", raw=_raw('"seed": ' + "9" * 9999), code="invalid_number",
        over_grpc=JSON_ALONE),
    *[Row(id=f"B11-{i}", raw=raw, code="invalid_value", over_grpc=JSON_ALONE)
      for i, raw in enumerate([b"[]", b'"x"', b"null", b"1", b"true", b"[{}]"])],
]  # fmt: skip

INTERNALS = ("kv_transfer_params", "bootstrap_room", "mm_hashes", "media_io_kwargs", "tenant",
             "ticket", "transfer_id", "incarnation", "prefill_node", "decode_node", "attempt",
             "sample_index", "fork_request_ids", "lora_path")  # fmt: skip

FIELDS: list[Row] = [
    *[Row(id=f"B12-{name}", change={name: value}, code="unknown_parameter", param=name,
          over_grpc=NO_FIELD) for name in INTERNALS for value in ({"a": 1},)],
    *field_rows("B13-missing", "model", [None, "", ABSENT], "missing_required",
                over_grpc="an empty model is the one that is served"),
    *field_rows("B13-type", "model", [1, ["demo"], {}], over_grpc=TYPED),
    *field_rows("B14", "model", ["x" * 300, "../../etc", "nope", "demo\0", "DEMO", " demo", "é"],
                "model_not_found", status=404, grpc_status="NOT_FOUND"),
    *[Row(id=f"B15-{name}", change={name: value}, code="unsupported_parameter", param=name,
          path=path, over_grpc="a prompt is text or ids, the later of the two: protobuf's rule")
      for path, name, value in (
          ("/v1/completions", "messages", [{"role": "user", "content": "x"}]),
          ("/v1/completions", "max_completion_tokens", 1), ("/v1/completions", "top_logprobs", 1),
          ("/v1/completions", "tools", [{}]), (_CHAT, "prompt", "x"), (_CHAT, "echo", True),
          (_CHAT, "suffix", "x"), (_CHAT, "max_output_tokens", 5), (_CHAT, "instructions", "x"),
          (_CHAT, "thinking", {"type": "disabled"}), ("/v1/completions", "stop_sequences", ["x"]))],
    *field_rows("B19", "prompt", ["", []], "empty_prompt"),
    *field_rows("B19-none", "prompt", [None, ABSENT], "missing_required",
                grpc_raw=inference_pb2.GenerateRequest(model="demo").SerializeToString()),
    *field_rows("B20-high", "prompt", [[VOCAB_SIZE], [2**31], [2**32 - 1]], "invalid_token_id",
                param="prompt[0]"),
    Row(id="B20-later", change={"prompt": [1, 2, VOCAB_SIZE]}, code="invalid_token_id",
        param="prompt[2]"),
    *field_rows("B20-type", "prompt", [[-1], [2**32], [1.5], [None]], "invalid_token_id",
                param="prompt[0]", over_grpc=TYPED),
    *field_rows("B20-bool", "prompt", [[True], [1.0]], "invalid_token_id", param="prompt[0]",
                over_grpc=JSON_ALONE),
    *field_rows("B21-mixed", "prompt", [["a", 1], ["a", ["b"]]], param="prompt[1]",
                over_grpc=TYPED),
    *field_rows("B21-mixed-ids", "prompt", [[1, "a"], [1, [2]]], "invalid_token_id",
                param="prompt[1]", over_grpc=TYPED),
    *field_rows("B21-deep", "prompt", [[[[1]]]], "invalid_token_id", param="prompt[0][0]",
                over_grpc=TYPED),
    *field_rows("B21-type", "prompt", [1, True, 1.5], over_grpc=TYPED),
    *field_rows("B21-object", "prompt", [{}], over_grpc=JSON_ALONE),
    *field_rows("B21-many", "prompt", [["a"] * 65], "array_too_long", over_grpc=TYPED),
    *field_rows("B23", "prompt", ["x" * 512, [1] * 512, "x" * 3_000_000, [1] * 1_000_000],
                "context_length_exceeded"),
    Row(id="B24", change={"max_tokens": 508}, code="context_length_exceeded", param="max_tokens"),
    Row(id="B24-wrap", change={"max_tokens": 2**32 - 1}, code="context_length_exceeded",
        param="max_tokens"),
    *field_rows("B25", "prompt", ["x" * 400, [1] * 400], "prompt_too_large_for_deployment",
                grpc_status="FAILED_PRECONDITION"),
    Row(id="B25-output", change={"prompt": "x" * 300, "max_tokens": 200}, param="prompt",
        code="prompt_too_large_for_deployment", grpc_status="FAILED_PRECONDITION"),
    *field_rows("B26", "prompt", ["\U0001f469\u200d" * 200_000, " " * 1_000_000, "\0" * 600_000],
                "context_length_exceeded"),
    *field_rows("B27", "max_tokens", [0]),
    *field_rows("B27-type", "max_tokens", [-1, 2**32, 2**63, 2**200, "10", 1.5, [], {}],
                over_grpc=TYPED),
    *field_rows("B27-bool", "max_tokens", [True, 10.0], over_grpc=JSON_ALONE),
    Row(id="B28", change={"min_tokens": 4}, code="invalid_value", param="min_tokens"),
    *field_rows("B28-type", "min_tokens", [-1, "1", 2**63], over_grpc=TYPED),
    *field_rows("B29", "n", [0, 17, 10**9]),
    *field_rows("B29-type", "n", [-1, "1", 2**64, 1.5], over_grpc=TYPED),
    *field_rows("B31", "temperature", [-1, -1e-9, 2.01, 1e38]),
    *field_rows("B31-type", "temperature", ["hot", [], {}], over_grpc=TYPED),
    *field_rows("B31-bool", "temperature", [True], over_grpc=JSON_ALONE),
    *[row for name in ("temperature", "min_p", "presence_penalty", "frequency_penalty")
      for row in field_rows(f"B31-tiny-{name}", name, [-1e-40, -1e-50])],
    *field_rows("B34-tiny", "logit_bias", [{"1": -1e-40}, {"1": -1e-50}]),
    *field_rows("B32-p", "top_p", [0, -0.1, 1.1, 1e-40, 1e-50]),
    *field_rows("B33-tiny", "repetition_penalty", [1e-40, 1e-50]),
    *field_rows("B32-k", "top_k", [-2, 10**12, "1", 1.5], over_grpc=TYPED),
    *field_rows("B32-m", "min_p", [2, -0.1]),
    *[row for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
      for row in field_rows(f"B33-{name}", name, [1e308, -1e308, 2.1, -2.1])],
    Row(id="B33-zero", change={"repetition_penalty": 0}, code="invalid_value",
        param="repetition_penalty"),
    *field_rows("B34-key", "logit_bias", [{"abc": 1}, {"-1": 1}, {str(2**32): 1}, {"": 1}],
                "invalid_token_id", over_grpc=TYPED),
    *field_rows("B34-key-text", "logit_bias", [{"1.0": 1}, {" 1": 1}, {"٣": 1}, {"05": 1},
                                               {"00": 1}, {"+5": 1}, {"1_0": 1}],
                "invalid_token_id", over_grpc=JSON_ALONE),
    *field_rows("B34-id", "logit_bias", [{str(VOCAB_SIZE): 1}], "invalid_token_id"),
    *field_rows("B34-value", "logit_bias", [{"1": 1e9}, {"1": -101}]),
    *field_rows("B34-type", "logit_bias", [{"1": "x"}, {"1": None}], over_grpc=TYPED),
    *field_rows("B34-shape", "logit_bias", [[1], "x", 1], over_grpc=TYPED),
    *field_rows("B34-many", "logit_bias", [{str(i): 1 for i in range(100_000)}],
                "array_too_long"),
    *field_rows("B35", "logprobs", [21, 10_000, 2**32 - 1]),
    *field_rows("B35-type", "logprobs", [-1, "5", 2**32], over_grpc=TYPED),
    *field_rows("B35-prompt", "prompt_logprobs", [21, 10_000]),
    *field_rows("B35-ids", "logprob_token_ids", [list(range(1000))], "unsupported_parameter",
                over_grpc=TYPED),
    *field_rows("B36", "seed", [2**63]),
    *field_rows("B36-type", "seed", [2**70, -1, "x", "05", "-0", 1.5, 1e-40], over_grpc=TYPED),
    *field_rows("B37-many", "stop", [["a"] * 100, ["a"] * 17], "array_too_long"),
    *field_rows("B37-empty", "stop", ["", [""], "é" * 129, "x" * 1_000_000], param="stop[0]"),
    *field_rows("B37-type", "stop", [["a", None], ["a", 1]], param="stop[1]", over_grpc=TYPED),
    *field_rows("B37-number", "stop", [1], param="stop", over_grpc=TYPED),
    *field_rows("B37-ids", "stop_token_ids", [[VOCAB_SIZE]], "invalid_token_id",
                param="stop_token_ids[0]"),
    *field_rows("B37-allowed", "allowed_token_ids", [[VOCAB_SIZE]], "invalid_token_id",
                param="allowed_token_ids[0]"),
    *field_rows("B37-allowed-many", "allowed_token_ids", [[1] * (VOCAB_SIZE + 1)],
                "array_too_long"),
    *field_rows("B37-allowed-none", "allowed_token_ids", [[]], "empty_array",
                over_grpc="an empty list is absent there; the client refuses it"),
    *field_rows("B37-allowed-type", "allowed_token_ids", [5, "5", True], over_grpc=TYPED),
    *field_rows("B37-ids-many", "stop_token_ids", [[1] * 257], "array_too_long"),
    *field_rows("B38-width", "best_of", [0, 17, 10**9]),
    *field_rows("B38-width-type", "best_of", [-1, "4", 2**32, 1.5], over_grpc=TYPED),
    Row(id="B38-width-n", change={"n": 3, "best_of": 2}, code="invalid_value", param="best_of"),
    *field_rows("B38-search-type", "use_beam_search", ["yes", [], {}], over_grpc=TYPED),
    *field_rows("B38-early", "early_stopping", ["always", "", "x" * 10_000]),
    *field_rows("B38-early-type", "early_stopping", [1, [], {}], over_grpc=TYPED),
    *field_rows("B38-length", "length_penalty", [10.1, -10.1, 1e308]),
    *field_rows("B38-groups", "num_beam_groups", [0, 17, 10**9]),
    *field_rows("B38-diversity", "diversity_penalty", [-0.1, 100.1, 1e308]),
    *[row for name in ("length_penalty", "num_beam_groups", "diversity_penalty")
      for row in field_rows(f"B38-type-{name}", name, ["x", [], {}], over_grpc=TYPED)],
    *[row for name in ("length_penalty", "num_beam_groups", "diversity_penalty")
      for row in field_rows(f"B38-alone-{name}", name, [2])],
    Row(id="B38-alone-early", change={"early_stopping": "never"}, code="invalid_value",
        param="early_stopping"),
    Row(id="B38-narrow", change={"use_beam_search": True}, code="invalid_value", param="best_of"),
    *[Row(id=f"B38-with-{name}", change={"use_beam_search": True, "n": 2, name: value}, code=code,
          param=name)
      for code, name, value in (
          *(("unsupported_parameter", name, value) for name, value in (
              ("seed", 1), ("temperature", 0.5), ("top_p", 0.5), ("top_k", 3), ("min_p", 0.1),
              ("stop", ["x"]))),
          ("invalid_value", "num_beam_groups", 3), ("invalid_value", "diversity_penalty", 0.5))],
    *field_rows("B39", "stream", ["true", 1, []], over_grpc=TYPED),
    *field_rows("B39-options", "stream_options", [{}, {"include_usage": True}], over_grpc=TYPED),
    Row(id="B39-option", change={"stream": True, "stream_options": {"x": 1}},
        param="stream_options", code="unknown_parameter",
        over_grpc="every call of gRPC is a stream"),
    *field_rows("B50", "prompt_embeds", ["UEsDBA=="], "unsupported_parameter", over_grpc=TYPED),
    *field_rows("B51", "cache_salt", ["", "x" * 65, "x" * 10_240, "a\0", "a\n", "\n", "é", "😀",
                                      "a@b", "a b", "../x"]),
    *field_rows("B51-type", "cache_salt", [1, []], over_grpc=TYPED),
    *[Row(id=f"B52-label-{i}", headers={"X-Request-ID": label}, code="invalid_value",
          param="X-Request-ID", grpc_code="invalid_value", grpc_param="request_id",
          grpc_raw=inference_pb2.GenerateRequest(text="x", request_id=label).SerializeToString())
      for i, label in enumerate(["x" * 257, "x" * 8000, "a b", "\xe9", "a\tb"])],
    *[Row(id=f"B52-label-grpc-{i}", headers={"X-Request-ID": "x" * 257}, code="invalid_value",
          param="X-Request-ID", grpc_code="invalid_value", grpc_param="request_id",
          grpc_raw=inference_pb2.GenerateRequest(text="x", request_id=label).SerializeToString())
      for i, label in enumerate(["a\r\nX: b", "a\n", "\0", "x" * 1_000_000, "😀"])],
    *field_rows("B54-user", "user", ["x" * 1_000_000, 1], over_grpc=TYPED),
    *field_rows("B54-metadata", "metadata", [{"a": "x" * 1_000_000}, {"a" * 65: "x"}, {"a": 1}, [],
                                             {str(i): "x" for i in range(17)}], over_grpc=TYPED),
    *field_rows("B55-priority", "priority", [1, -1, "high", 0.0], "unsupported_parameter",
                over_grpc=TYPED),
    *field_rows("B55-tier", "service_tier", ["priority", "flex", 1], "unsupported_parameter",
                over_grpc=TYPED),
]  # fmt: skip

CHATS: list[Row] = [
    *chat_rows("B16", [{"messages": []}], "empty_array", "messages"),
    *chat_rows("B16-missing", [{"messages": None}, {"messages": ABSENT}], "missing_required",
               "messages"),
    *chat_rows("B16-type", [{"messages": "hi"}, {"messages": {}}, {"messages": 1}],
               "invalid_value", "messages"),
    *chat_rows("B17-item", [{"messages": ["hi"]}, {"messages": [None]}, {"messages": [[]]}],
               "invalid_value", "messages[0]"),
    *chat_rows("B17-role", [_user("x", role=role) for role in (None, "root", 1, "", "USER", [])]
               + [{"messages": [{"content": "x"}]}], "invalid_value", "messages[0].role"),
    *chat_rows("B17-content", [_user(c) for c in (None, 1, {}, [], True)], "invalid_value",
               "messages[0].content"),
    *chat_rows("B17-part", [_user([c]) for c in (None, 1, "x", {}, {"type": 1})], "invalid_value",
               "messages[0].content[0]"),
    *chat_rows("B17-text", [_user([{"type": "text"}]), _user([{"type": "text", "text": 1}])],
               "invalid_value", "messages[0].content[0].text"),
    *chat_rows("B17-name", [_user("x", name=1)], "invalid_value", "messages[0].name"),
    *chat_rows("B18", [{"messages": [{"role": "user", "content": ""}] * 100_001}],
               "array_too_long", "messages"),
    *chat_rows("B23-chat", [_user("x" * 600), _user("x" * 3_000_000)], "context_length_exceeded",
               "messages"),
    *chat_rows("B27-both", [{"max_tokens": 3, "max_completion_tokens": 4}], "invalid_value",
               "max_tokens"),
    *chat_rows("B27-chat", [{"max_completion_tokens": 0, "max_tokens": ABSENT}], "invalid_value",
               "max_completion_tokens"),
    *chat_rows("B35-chat", [{"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 1},
                            {"logprobs": True, "top_logprobs": -1}], "invalid_value",
               "top_logprobs"),
    *chat_rows("B40", [{"response_format": {"type": "wat"}}, {"response_format": {}}],
               "unsupported_parameter", "response_format"),
    *[Row(id=f"B44-{name}-{path[4:8]}", change={name: value}, code="unsupported_parameter",
          param=name, path=path, over_grpc=TYPED if path != _CHAT else CHAT_ALONE)
      for path in ("/v1/completions", _CHAT)
      for name, value in (("chat_template", "{{ 1 }}"), ("chat_template_kwargs", {"a": 1}),
                          ("reasoning_effort", "low"),
                          ("enable_thinking", True), ("thinking_token_budget", 5)
                          if path != _CHAT else ("thinking_budget", 5),
          ("documents", [{"a": 1}]))],
    *[Row(id=f"B44-{name}", change={name: value}, code="unsupported_parameter", param=name,
          over_grpc=CHAT_ALONE)
      for name, value in (("continue_final_message", True), ("add_generation_prompt", False))],
    *chat_rows("B44-continued", [{"continue_final_message": True},
                                 {"continue_final_message": "yes"}, {"continue_final_message": 1},
                                 {"continue_final_message": True, "add_generation_prompt": True}],
               "invalid_value", "continue_final_message"),
    *chat_rows("B44-begun", [{"add_generation_prompt": b} for b in ("true", 1, {})],
               "invalid_value", "add_generation_prompt"),
    *chat_rows("B44-effort", [{"reasoning_effort": e} for e in ("", "much", 1, [], True)],
               "invalid_value", "reasoning_effort"),
    *chat_rows("B44-thinking", [{"enable_thinking": t} for t in ("true", 1, {}, [])],
               "invalid_value", "enable_thinking"),
    *chat_rows("B44-budget", [{"thinking_token_budget": b} for b in (-1, 1.5, "1", True, 2**32)],
               "invalid_value", "thinking_token_budget"),
    *chat_rows("B44-kwargs", [{"chat_template_kwargs": k} for k in (
        1, "x", [], {"a": "x" * 20_000}, {"a": [[[0]] * 1000] * 10})],
        "invalid_value", "chat_template_kwargs"),
    *chat_rows("B44-given", [{"chat_template_kwargs": {name: 1}} for name in (
        "messages", "tools", "bos_token", "add_generation_prompt", "range", "self", "loop",
        "raise_exception", "__class__")], "unsupported_parameter", "chat_template_kwargs"),
    *chat_rows("B41-deep", [_tools(_nested(300))], "invalid_schema",
               "tools[0].function.parameters"),
    *[Row(id=f"B41-endless-{depth}", raw=deep_arguments(depth), path=_CHAT, code="invalid_value",
          param="messages[0].tool_calls[0].function.arguments", over_grpc=CHAT_ALONE)
      for depth in (2000, 100_000)],
    *chat_rows("B41-large", [_tools({"enum": ["x"] * 20_000})], "invalid_schema",
               "tools[0].function.parameters"),
    *chat_rows("B41-loop", [_tools(loop) for loop in _LOOPS], "invalid_schema",
               "tools[0].function.parameters"),
    *chat_rows("B41-remote", [_tools({"$ref": ref}) for ref in (
        "http://169.254.169.254/x", "file:///etc/passwd", "other.json", "#bad", "#/nowhere")],
        "invalid_schema", "tools[0].function.parameters"),
    *chat_rows("B47-many", [{"tools": _tools({})["tools"] * 10_000}], "array_too_long", "tools"),
    *chat_rows("B47-name", [_tools({}, name) for name in ("", "a b", "x" * 65, "é", 1)],
               "invalid_value", "tools[0].function.name"),
    *chat_rows("B47-shape", [{"tools": [t]} for t in (1, None, {}, {"type": "x"})],
               "invalid_value", "tools[0]"),
    *chat_rows("B48", [_user([{"type": kind, kind: {"url": url}}]) for kind, url in (
        ("image_url", "http://169.254.169.254/latest/meta-data"), ("image_url", "file:///etc/x"),
        ("image_url", "gopher://127.0.0.1:6379/_FLUSHALL"), ("input_audio", "http://a"),
        ("video_url", "http://a"), ("file", "x"))], "unsupported_content",
        "messages[0].content[0]"),
    *chat_rows("B49", [_user([{"type": "image_url", "image_url": {
        "url": "data:image/png;base64," + "A" * 3_000_000}}])], "unsupported_content",
        "messages[0].content[0]"),
]  # fmt: skip

TABLE: list[Row] = [*BODIES, *FIELDS, *CHATS]

# Kinds of request that have no row here, and why. test_rows.py lists the tests of all others.
NOT_HERE: Mapping[str, str] = {
    "B79": "nodes do not register with a gateway: the directory is a hint, each dial checks",
    "B80": "the same: an address from the directory is dialled, and must prove the secret",
    "B81": "no message asks for a number of blocks: a puller names transfers, not sizes",
}
