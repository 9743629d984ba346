"""instructor: objects of a type by JSON schema, whole, as a stream of partial objects, and async."""

import asyncio
import sys

import instructor
import openai
import pydantic

url, model, _ = sys.argv[1:]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    adult: bool


asked = {
    "model": model,
    "response_model": Person,
    "messages": [{"role": "user", "content": "Anna is 30."}],
    "temperature": 0,
    "max_tokens": 128,
    "max_retries": 1,
}
client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1"), mode=instructor.Mode.JSON_SCHEMA)
person = client.chat.completions.create(**asked)
assert isinstance(person, Person)
by_tool = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1"), mode=instructor.Mode.TOOLS)
assert isinstance(by_tool.chat.completions.create(**asked), Person)

parts = list(client.chat.completions.create_partial(**asked))
assert parts[-1].name == person.name


async def asynchronously() -> None:
    one = instructor.from_openai(openai.AsyncOpenAI(base_url=f"{url}/v1"), mode=instructor.Mode.JSON_SCHEMA)
    found = await one.chat.completions.create(**asked)
    assert found.model_dump() == person.model_dump()


asyncio.run(asynchronously())
print("typed objects, by schema and by tool, whole, partial and async")
