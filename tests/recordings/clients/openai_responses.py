"""The Responses API with OpenAI's client: streams, tools, successive turns, stored responses."""

import sys

import openai

WRITES = [
    'why</think><tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>',
    "because</think>It is noon.",
    "It is noon, still.",
    'why</think>Look:\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "</think>not kept",
    "unknown",
]
TOOL = {
    "type": "function",
    "name": "now",
    "description": "The time",
    "strict": False,
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
}


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    create = client.responses.create
    first = create(
        model="demo", input="What time is it?", instructions="Be kind.", tools=[TOOL],
        metadata={"a": "b"}, reasoning={"effort": "medium"}, max_output_tokens=500,
    )  # fmt: skip
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
    second = create(model="demo", previous_response_id=first.id, input=[result], tools=[TOOL])
    with client.responses.stream(
        model="demo", previous_response_id=second.id, input="And now?", reasoning={"effort": "none"}
    ) as stream:
        list(stream)
    list(create(model="demo", input=[{"role": "user", "content": "x"}], tools=[TOOL], stream=True))
    unkept = create(model="demo", input="x", store=False, truncation="disabled")
    client.responses.retrieve(second.id)
    client.responses.delete(first.id)
    for name in (first.id, unkept.id):
        try:
            client.responses.retrieve(name)
        except openai.NotFoundError:
            continue
        raise AssertionError("found")
    try:
        create(model="demo", input="x", previous_response_id=first.id)
    except openai.NotFoundError:
        print(f"openai {openai.__version__}")


main(sys.argv[1])
