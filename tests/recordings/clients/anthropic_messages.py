"""Messages with Anthropic's client: whole, streamed, tools, thinking, counted tokens, errors."""

import sys

import anthropic

WRITES = [
    "why</think>hello",
    "why</think>hello \u00e9 again",
    'why</think>Let me look.\n<tool_call>\n{"name": "now", "arguments":'
    ' {"zone": "UTC"}}\n</tool_call>',
    "</think>It is noon.",
    'so</think><tool_call>\n{"name": "now", "arguments":'
    ' {"zone": "UTC", "n": [1, {}]}}\n</tool_call>',
    "hello, no thoughts",
    "bad",
]
USER = {"role": "user", "content": "What time is it?"}
TOOL = {
    "name": "now",
    "description": "The time in a zone",
    "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}},
}


def main(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    create = client.messages.create
    requested = {"model": "demo", "max_tokens": 500}
    more = {"temperature": 0.5, "top_k": 40}
    create(
        **requested, system="Be kind.", messages=[USER], stop_sequences=["###"], extra_body=more
    )  # fmt: skip
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(
        **(requested | {"max_tokens": 2000}), messages=[USER], thinking=thinking
    ) as stream:
        list(stream)
    first = create(**requested, messages=[USER], tools=[TOOL])
    (call,) = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "noon"}
    turns = [USER, {"role": "assistant", "content": first.content},
             {"role": "user", "content": [result]}]  # fmt: skip
    create(**requested, messages=turns, tools=[TOOL])
    client.messages.count_tokens(model="demo", messages=turns, tools=[TOOL], system="Be kind.")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    list(create(**requested, messages=[USER], tools=[TOOL], tool_choice=choice, stream=True))
    create(**requested, messages=[USER], thinking={"type": "disabled"}, metadata={"user_id": "u"})
    try:
        create(**requested, messages=[USER], extra_body={"temperature": 7})
    except anthropic.BadRequestError:
        print(f"anthropic {anthropic.__version__}")


main(sys.argv[1])
