"""OpenAI's client: completions, chats, responses, whole and streamed, sync, async; schemas; tools; errors."""

import asyncio
import sys

import openai
import pydantic

url, model, _ = sys.argv[1:]
base_url = f"{url}/v1"
asked = {"model": model, "temperature": 0}
messages = [{"role": "user", "content": "What is Baton?"}]


class Colour(pydantic.BaseModel):
    colour: str


with openai.OpenAI(base_url=base_url) as client:
    assert [one.id for one in client.models.list()] == [model]
    chat = client.chat.completions.create(messages=messages, max_completion_tokens=16, **asked)
    text = chat.choices[0].message.content
    assert text
    assert chat.usage.completion_tokens > 0
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            messages=messages, max_completion_tokens=16, stream=True, stream_options=options, **asked
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
    assert chunks[-1].usage == chat.usage

    with client.chat.completions.stream(messages=messages, max_completion_tokens=16, **asked) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(deltas) == text

    completion = client.completions.create(prompt=["a", "b"], n=2, max_tokens=4, logprobs=1, **asked)
    assert len(completion.choices) == 4
    assert len(completion.choices[0].logprobs.tokens) == 4

    response = client.responses.create(input="What is Baton?", max_output_tokens=16, **asked)
    assert response.output_text == text
    with client.responses.stream(input="What is Baton?", max_output_tokens=500, **asked) as events:
        parts = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert "".join(parts) == final.output_text
    assert final.output_text.startswith(text)
    again = [
        {"role": "user", "content": "What is Baton?"},
        *response.output,
        {"role": "user", "content": "Why?"},
    ]
    assert client.responses.create(input=again, max_output_tokens=8, **asked).output_text

    parsed = client.chat.completions.parse(
        messages=messages, response_format=Colour, max_completion_tokens=64, **asked
    )
    assert isinstance(parsed.choices[0].message.parsed, Colour)
    typed = client.responses.parse(input="Name one.", text_format=Colour, max_output_tokens=64, **asked)
    assert isinstance(typed.output_parsed, Colour)

    schema = {"type": "object", "properties": {"city": {"enum": ["Bern"]}}, "required": ["city"]}
    function = {"name": "weather", "parameters": {**schema, "additionalProperties": False}}
    chat = client.chat.completions.create(
        messages=messages, tools=[{"type": "function", "function": function}], tool_choice="required", **asked
    )
    assert chat.choices[0].message.tool_calls[0].function.arguments.replace(" ", "") == '{"city":"Bern"}'
    tools = [{"type": "function", **function}]
    forced = {
        "input": "How warm is it?",
        "tools": tools,
        "tool_choice": {"type": "function", "name": "weather"},
    }
    called = client.responses.create(max_output_tokens=64, **forced, **asked)
    (call,) = (item for item in called.output if item.type == "function_call")
    with client.responses.stream(max_output_tokens=64, **forced, **asked) as events:
        kinds = {event.type for event in events}
        assert events.get_final_response().output[0].arguments == call.arguments
    assert "response.function_call_arguments.delta" in kinds
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    turns = [{"role": "user", "content": "How warm is it?"}, call, result]
    assert client.responses.create(input=turns, max_output_tokens=16, **asked).output_text

    try:
        client.chat.completions.create(messages=messages, **{**asked, "temperature": -1})
    except openai.BadRequestError as error:
        refused = error.param
    assert refused == "temperature"


async def concurrently() -> None:
    async with openai.AsyncOpenAI(base_url=base_url) as client:
        calls = (
            client.chat.completions.create(messages=messages, max_completion_tokens=16, **asked)
            for _ in range(8)
        )
        answers = await asyncio.gather(*calls)
        assert {answer.choices[0].message.content for answer in answers} == {text}


asyncio.run(concurrently())
print("completions, chats, responses, schemas, tools, errors")
