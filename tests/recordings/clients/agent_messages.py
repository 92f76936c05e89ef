"""Requests of a coding agent to Anthropic's API: a beta endpoint, system prompts and messages as
blocks with cache_control, many tools with nested schemas, thinking, results of tools, in streams.
"""

import sys

import anthropic

WRITES = [
    '{"title": "Fix the test"}',
    'I look first.</think>I will read the file.\n<tool_call>\n{"name": "Read", "arguments":'
    ' {"file_path": "/src/a.py", "limit": 5}}\n</tool_call>\n'
    '<tool_call>\n{"name": "Grep", "arguments": {"pattern": "def f", "-n": true}}\n</tool_call>',
    'It is off by one.</think><tool_call>\n{"name": "Edit", "arguments": {"file_path": "/src/a.py",'
    ' "edits": [{"old": "range(n)", "new": "range(n + 1)"}]}}\n</tool_call>',
    "</think>The test passes now.",
]
CACHED = {"cache_control": {"type": "ephemeral"}}
BETAS = [
    "claude-code-20250219", "interleaved-thinking-2025-05-14",
    "fine-grained-tool-streaming-2025-05-14", "prompt-caching-scope-2026-01-05",
]  # fmt: skip
GUIDE = "\n".join(
    f"{i}. Rule number {i}: read before you write; keep the style." for i in range(300)
)
SYSTEM = [
    {"type": "text", "text": "You are a coding agent.", **CACHED},
    {"type": "text", "text": GUIDE, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
]
DRAFT = "http://json-schema.org/draft-07/schema#"


def schema(required: list, **properties: object) -> dict:
    return {
        "$schema": DRAFT, "type": "object", "properties": properties, "required": required,
        "additionalProperties": False,
    }  # fmt: skip


TEXT = {"type": "string", "description": "As text"}
EDIT = {
    "type": "object",
    "properties": {"old": TEXT, "new": TEXT, "all": {"type": "boolean", "default": False}},
    "required": ["old", "new"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "name": "Read",
        "description": "Reads a file.\n\n- by its absolute path",
        "input_schema": schema(
            ["file_path"], file_path=TEXT, limit={"type": "integer", "exclusiveMinimum": 0}
        ),
    },
    {
        "name": "Grep",
        "description": "Searches",
        "input_schema": schema(
            ["pattern"],
            **{"pattern": TEXT, "-n": {"type": "boolean"}, "-A": {"type": "number"}},
            mode={"type": "string", "enum": ["content", "files_with_matches", "count"]},
        ),
    },
    {
        "name": "Edit",
        "description": "Edits",
        "input_schema": schema(
            ["file_path", "edits"],
            file_path=TEXT,
            edits={"type": "array", "items": EDIT, "minItems": 1},
        ),
    },
    {
        "name": "mcp__tracker__find",
        "description": "Finds issues",
        "input_schema": {
            "type": "object",
            "properties": {
                "by": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            },
        },
        **CACHED,
    },
]


def main(url: str) -> None:
    client = anthropic.Anthropic(
        base_url=url, auth_token="none", max_retries=0, timeout=600,
        default_headers={"x-app": "cli", "User-Agent": "agent/2.0 (external, cli)"},
    )  # fmt: skip
    metadata = {"user_id": "user_0_account__session_11111111-2222-3333-4444-555555555555"}
    # A title, by a small request of its own.
    title = {"type": "json_schema", "schema": schema(["title"], title=TEXT)}
    client.beta.messages.create(
        model="demo", max_tokens=512, betas=BETAS, system=SYSTEM[:1], metadata=metadata,
        messages=[{"role": "user", "content": "Fix the test"}],
        thinking={"type": "disabled"},
        extra_body={"temperature": 1, "output_config": {"format": title}},
    )  # fmt: skip
    reminder = {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"}
    turns = [{"role": "user", "content": [reminder, {"type": "text", "text": "Fix it", **CACHED}]}]
    for _ in range(3):
        client.beta.messages.count_tokens(model="demo", messages=turns, tools=TOOLS, betas=BETAS)
        with client.beta.messages.stream(
            model="demo", max_tokens=32000, betas=BETAS, system=SYSTEM, tools=TOOLS,
            metadata=metadata, messages=turns,
            thinking={"type": "enabled", "budget_tokens": 31999},
            extra_body={"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
        ) as stream:  # fmt: skip
            answer = stream.get_final_message()
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": [{"type": "text", "text": "1\tdef f(n):\n2\t    return range(n)"}],
                "is_error": block.name == "Grep",
                **CACHED,
            }
            for block in answer.content
            if block.type == "tool_use"
        ]
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        turns += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    print(f"anthropic {anthropic.__version__}, as a coding agent")


main(sys.argv[1])
