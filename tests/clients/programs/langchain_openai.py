"""LangChain's classes for OpenAI: invoke, stream, batch, structured output; chats, texts and responses."""

import sys
from typing import Literal

import pydantic
from langchain_openai import ChatOpenAI, OpenAI

url, model, _ = sys.argv[1:]
asked = {"base_url": f"{url}/v1", "model": model, "api_key": "unused", "temperature": 0}


class Colour(pydantic.BaseModel):
    """The colour that the model names."""

    colour: str


chat = ChatOpenAI(max_tokens=12, **asked)
answer = chat.invoke([("system", "Be brief."), ("human", "What is Baton?")])
assert answer.content
assert answer.usage_metadata["output_tokens"] > 0
chunks = list(chat.stream([("system", "Be brief."), ("human", "What is Baton?")]))
assert "".join(chunk.content for chunk in chunks) == answer.content
assert len(chat.batch(["a", "b", "c"])) == 3
long = ChatOpenAI(max_tokens=64, **asked)
assert isinstance(long.with_structured_output(Colour, method="json_schema").invoke("Name one."), Colour)


def weather(city: Literal["Bern", "Basel"]) -> str:
    """Returns the temperature in a city."""
    return f"12 degrees in {city}"


for extra in ({}, {"use_responses_api": True}):
    able = ChatOpenAI(max_tokens=64, **extra, **asked).bind_tools([weather], tool_choice="required")
    called = able.invoke("How warm is it?")
    assert called.tool_calls[0]["name"] == "weather"
    assert called.tool_calls[0]["args"]["city"] in ("Bern", "Basel")
    streamed = None
    for chunk in able.stream("How warm is it?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == called.tool_calls[0]["args"]

text = OpenAI(max_tokens=12, **asked)
assert text.invoke("What is") == "".join(text.stream("What is"))

responses = ChatOpenAI(use_responses_api=True, max_tokens=12, **asked)
assert responses.invoke("What is Baton?").text
assert "".join(chunk.text for chunk in responses.stream("What is Baton?"))
print("chats, texts, responses, structured output, tools")
