"""litellm: chats whole, streamed and async, a text completion, a response, an error."""

import asyncio
import sys

import litellm

url, model, _ = sys.argv[1:]
asked = {
    "model": f"openai/{model}",
    "api_base": f"{url}/v1",
    "api_key": "unused",
    "temperature": 0,
    "max_tokens": 12,
}
messages = [{"role": "user", "content": "What is Baton?"}]

chat = litellm.completion(messages=messages, **asked)
text = chat.choices[0].message.content
assert text
assert chat.usage.completion_tokens > 0
options = {"include_usage": True}
chunks = list(litellm.completion(messages=messages, stream=True, stream_options=options, **asked))
parts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
assert "".join(part or "" for part in parts) == text


async def asynchronously() -> None:
    answer = await litellm.acompletion(messages=messages, user="someone", metadata={"run": "7"}, **asked)
    assert answer.choices[0].message.content == text


asyncio.run(asynchronously())

plain = litellm.text_completion(prompt="What is", **{**asked, "model": f"text-completion-openai/{model}"})
assert plain.choices[0].text

response = litellm.responses(
    model=f"openai/{model}",
    api_base=f"{url}/v1",
    api_key="unused",
    input="What is Baton?",
    max_output_tokens=12,
    temperature=0,
)

assert response.output[0].content[0].text.startswith(text)
try:
    litellm.completion(messages=messages, **{**asked, "temperature": -1})
except litellm.BadRequestError:
    pass
else:
    raise AssertionError("not refused")
print("chats, texts, responses, errors")
