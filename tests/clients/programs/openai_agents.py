"""openai-agents: an agent over responses and over chats, run and streamed; a typed result; tools; turns."""

import asyncio
import sys
from typing import Literal

import openai
import pydantic
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

url, model, _ = sys.argv[1:]
set_tracing_disabled(disabled=True)
settings = ModelSettings(temperature=0, max_tokens=64)


@function_tool
def weather(city: Literal["Bern", "Basel"]) -> str:
    """Returns the temperature in a city."""
    return f"12 degrees in {city}"


class Colour(pydantic.BaseModel):
    colour: str = pydantic.Field(max_length=20)


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused")
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        served = kind(model=model, openai_client=client)
        agent = Agent(name="Helper", instructions="Be brief.", model=served, model_settings=settings)
        result = await Runner.run(agent, "What is Baton?")
        assert result.final_output
        streamed = Runner.run_streamed(agent, "What is Baton?")
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds
        assert streamed.final_output == result.final_output
        more = [*result.to_input_list(), {"role": "user", "content": "Why?"}]
        assert (await Runner.run(agent, more)).final_output
        forced = ModelSettings(temperature=0, max_tokens=64, tool_choice="required")
        able = Agent(name="Able", model=served, model_settings=forced, tools=[weather])
        called = await Runner.run(able, "How warm is it?", max_turns=4)
        assert {"tool_call_item", "tool_call_output_item"} <= {item.type for item in called.new_items}
        assert called.final_output
        typed = Agent(name="Typed", model=served, model_settings=settings, output_type=Colour)
        assert isinstance((await Runner.run(typed, "Name one.")).final_output, Colour)


asyncio.run(main())
print("agents with tools over responses and chats")
