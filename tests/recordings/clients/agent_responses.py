"""Requests of a coding agent to OpenAI's API: the Responses API, streamed and never stored, with
the whole conversation as input; and a chat, streamed with its usage.
"""

import sys

import openai

WRITES = [
    'Look first.</think><tool_call>\n{"name": "shell", "arguments": {"command": ["ls", "-l"],'
    ' "timeout_ms": 1000}}\n</tool_call>',
    "Enough.</think>There is one file.",
    'so</think>Reading.\n<tool_call>\n{"name": "read", "arguments":'
    ' {"filePath": "/a"}}\n</tool_call>',
]
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "timeout_ms": {"type": "number"},
            "with_escalated_permissions": {"type": "boolean"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
PLAN = {
    "type": "function",
    "name": "update_plan",
    "description": "Updates the plan",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "plan": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "step": {"type": "string"},
                        "status": {"enum": ["pending", "in_progress", "completed"]},
                    },
                    "required": ["step", "status"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["plan"],
        "additionalProperties": False,
    },
}
READ = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads",
        "parameters": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"filePath": {"type": "string"}, "offset": {"type": "number"}},
            "required": ["filePath"],
            "additionalProperties": False,
        },
    },
}


def message(role: str, text: str) -> dict:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def main(url: str) -> None:
    client = openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0,
        default_headers={"originator": "cli_rs", "session_id": "0-1"},
    )  # fmt: skip
    items = [
        message("developer", "<permissions>\nread-only\n</permissions>"),
        message("user", "<environment_context>\n  <cwd>/src</cwd>\n</environment_context>"),
        message("user", "What is here?"),
    ]
    for _ in range(2):
        events = list(
            client.responses.create(
                model="demo", instructions="You are a coding agent.\n" * 50, input=items,
                tools=[SHELL, PLAN], tool_choice="auto", parallel_tool_calls=False, store=False,
                stream=True, include=["reasoning.encrypted_content"], prompt_cache_key="0-1",
                reasoning={"effort": "medium", "summary": "auto"}, text={"verbosity": "medium"},
            )
        )  # fmt: skip
        for item in events[-1].response.output:
            items.append(item.model_dump(exclude_none=True))
            if item.type == "function_call":
                items.append(
                    {
                        "type": "function_call_output",
                        "call_id": item.call_id,
                        "output": '{"output":"a.py\\n","metadata":{"exit_code":0}}',
                    }
                )
    list(
        client.chat.completions.create(
            model="demo", max_tokens=32000, stream=True, stream_options={"include_usage": True},
            messages=[
                {"role": "system", "content": "You are a coding agent.\n" * 50},
                {"role": "user", "content": [{"type": "text", "text": "Read /a"}]},
            ],
            tools=[READ], tool_choice="auto",
        )
    )  # fmt: skip
    print(f"openai {openai.__version__}, as a coding agent")


main(sys.argv[1])
