"""Chats with OpenAI's client: whole, streamed, with scores, tools and their results, and errors."""

import sys

import openai

WRITES = [
    'let me see</think>\n\nIt is 4 \u2013 "four".',
    "let me see</think>\n\nIt is 4.",
    'why</think>Let me look.\n<tool_call>\n{"name": "now", "arguments":'
    ' {"zone": "UTC"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>',
    "</think>It is noon.",
    'why</think><tool_call>\n{"name": "now", "arguments":'
    ' {"zone": "a \\"b\\" \\\\ \u00e9"}}\n</tool_call>',
    "hello",
    "hello there",
    "a b c",
    "a b c",
    "refused",
    "refused",
]
USER = {"role": "user", "content": "What is 2 + 2?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time in a zone",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string"}},
            "required": ["zone"],
        },
    },
}


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    create = client.chat.completions.create
    client.models.list()
    system = {"role": "system", "content": "Be brief."}
    create(
        model="demo", messages=[system, USER], temperature=0.5, top_p=0.9, max_tokens=100, seed=7,
        stop=["###"], user="u", presence_penalty=0.1, metadata={"a": "b"},
    )  # fmt: skip
    list(create(model="demo", messages=[USER], stream=True, stream_options={"include_usage": True}))
    first = create(model="demo", messages=[USER], tools=[TOOL])
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "noon"} for call in message.tool_calls
    ]
    create(model="demo", messages=[USER, message, *results], tools=[TOOL])
    with client.chat.completions.stream(
        model="demo", messages=[USER], tools=[TOOL], parallel_tool_calls=False
    ) as stream:
        list(stream)
    create(model="demo", messages=[USER], max_completion_tokens=5, reasoning_effort="none")
    create(
        model="demo", messages=[USER], logprobs=True, top_logprobs=2, n=2, max_tokens=4,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    client.completions.create(model="demo", prompt="def f(", max_tokens=4, logprobs=2, echo=True)
    list(client.completions.create(model="demo", prompt=[1, 2], max_tokens=4, stream=True))
    for bad in ({"model": "other"}, {"model": "demo", "temperature": 9}):
        try:
            create(messages=[USER], **bad)
        except openai.APIStatusError:
            continue
        raise AssertionError("not refused")
    print(f"openai {openai.__version__}")


main(sys.argv[1])
