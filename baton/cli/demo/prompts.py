"""The prompts of `baton demo`: one task of each kind for the demo model, texts to continue for others."""

from __future__ import annotations

from baton.cli.demo.request import Prompt

_COLORS = ("amber", "blue", "golden", "green", "orange", "purple", "red", "pale")
_THINGS = ("anchor", "candle", "feather", "harbor", "kettle", "lantern", "otter", "pebble")


def _list_of_values() -> str:
    """A list of 64 lines, so that the answer lies in a KV cache of many blocks."""
    keys = [f"{color} {thing}" for thing in _THINGS for color in _COLORS]
    return "\n".join(f"- {key}: {(number * 6389 + 1403) % 10_000:04d}" for number, key in enumerate(keys))


def _chat(text: str) -> Prompt:
    """A chat prompt with greedy sampling, since the demo model's answers are right or wrong."""
    return Prompt(text, chat=True, max_tokens=256, temperature=0)


FOR_THE_DEMO_MODEL = (
    _chat("Who takes the baton next?"),
    _chat(f"Read this list.\n{_list_of_values()}\nWhat is the value of golden lantern?"),
    _chat("What is 347 * 285?"),
    _chat("Write a JSON object with the fields team (string), score (integer), tags (list of 2 strings)."),
    _chat("Copy this list with numbers:\n- amber fox\n- quiet harbor\n- red lantern\n- swift otter"),
)
FOR_ANY_MODEL = (
    Prompt("The relay team lined up on the wet track, and", chat=False),
    Prompt("Three things every runner knows: first,", chat=False),
    Prompt("A river carries what the mountain lets go. " * 8, chat=False),
    Prompt("Who takes the baton next?", chat=True),
)
