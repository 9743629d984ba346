"""The questions and answers that the generator writes are right, and so are the marks it gives."""

from __future__ import annotations

import json
import random
import re

import pytest

from models.demo_training.exam import PARTS, questions
from models.demo_training.tasks import arithmetic, json_shapes
from models.demo_training.tasks.chatter import book
from models.demo_training.tasks.copying import copying
from models.demo_training.tasks.json_shapes import Shape
from models.demo_training.tasks.retrieve import plain_listing, varied_listing
from models.demo_training.tasks.words import ADJECTIVES, FIELDS, NAMES, NOUNS


@pytest.mark.parametrize("part", PARTS)
def test_an_exam_is_the_same_every_time_and_its_own_answers_are_right(part: str) -> None:
    turns = questions(part, 40)
    again = questions(part, 50)[:40]
    assert [(turn.question, turn.answer) for turn in turns] == [
        (turn.question, turn.answer) for turn in again
    ]
    assert all(turn.right(turn.answer) for turn in turns)
    assert not any(turn.right("") or turn.right(turn.answer + "?") for turn in turns)
    assert len({turn.question for turn in turns}) > 20


def test_other_seeds_are_other_questions() -> None:
    assert not {t.question for t in questions("copy", 50)} & {
        t.question for t in questions("copy", 50, seed=1)
    }


def test_sums_are_right() -> None:
    for _ in range(300):
        a, b = random.Random(_).choices(range(1000), k=2)
        for sign, result in (("+", a + b), ("-", a - b), ("*", a * b)):
            lines = arithmetic.worked(a, sign, b).split("\n")
            assert lines[-1] == f"Result: {result}"
            for step in re.findall(r"(?<!\S)\S+=\d+c\d", "\n".join(lines)):
                _check_step(step)


def _check_step(step: str) -> None:
    """`4*5+3=3c2`: the left side is 10 times what is carried, and what is written; a borrow goes off."""
    left, digit, carried = re.fullmatch(r"(.*)=(\d)c(\d)", step).groups()  # type: ignore[union-attr]
    if "-" in left:
        top, bottom, borrow = map(int, left.split("-"))
        assert top - bottom - borrow == int(digit) - 10 * int(carried), step
    elif "*" in left:
        a, b, carry = map(int, re.split(r"[*+]", left))
        assert a * b + carry == 10 * int(carried) + int(digit), step
    else:
        assert sum(map(int, left.split("+"))) == 10 * int(carried) + int(digit), step


def test_a_sum_is_marked_by_its_result() -> None:
    (turn,) = (turn for turn in questions("arithmetic", 1))
    steps, result = turn.answer.rsplit("\n", 1)
    assert turn.right(result)
    assert not turn.right(f"{steps}\n{result}0")
    assert not turn.right(steps)


def test_a_list_has_every_key_once_and_lacks_the_key_asked_for() -> None:
    draw = random.Random(3)
    for make in (plain_listing, varied_listing):
        for entries in (1, 12, 60):
            listing = make(draw, entries)
            keys = [key for key, _ in listing.entries]
            assert len(set(keys)) == len(keys) <= entries
            assert all(key in listing.text for key in keys)
            assert not set(listing.missing) & set(keys)


def test_a_conversation_about_a_list_asks_for_each_entry_once() -> None:
    draw = random.Random(4)
    listing = plain_listing(draw, 50)
    values = dict(listing.entries)
    answered: list[str] = []
    for turn in listing.asked(draw):
        for key, value in re.findall(r"The value of (.+?) is (\d{4})\.", turn.answer):
            assert values[key] == value
            assert key in turn.question
            answered.append(key)
        if not turn.answer.startswith("The value"):
            assert turn.answer.startswith("There is no ")
    assert sorted(answered) == sorted(values)


def test_a_copy_repeats_what_was_given() -> None:
    draw = random.Random(5)
    seen = 0
    for _ in range(300):
        turn = copying(draw)
        request, _, source = turn.question.partition("\n")
        if request in ("Copy this:", "Say this:", "Repeat after me:") and source:
            assert turn.answer == source
            seen += 1
        elif found := re.fullmatch(r"Copy this and rename (\w+) to (\w+):", request):
            old, new = found.groups()
            assert re.sub(rf"\b{old}\b", new, source) == turn.answer
            seen += 1
        elif found := re.fullmatch(r"Copy this list without (\w+):", request):
            assert source.split("\n") == [*turn.answer.split("\n"), f"- {found[1]}"] or (
                f"- {found[1]}" not in turn.answer.split("\n")
            )
            seen += 1
    assert seen > 60


def test_no_noun_begins_another_so_renaming_changes_whole_words() -> None:
    assert not [(a, b) for a in NOUNS for b in NOUNS if a != b and b.startswith(a)]
    for words in (ADJECTIVES, NOUNS, FIELDS, NAMES):
        assert len(set(words)) == len(words)


SHAPE = Shape(
    "object",
    fields=(
        ("name", Shape("string")),
        ("age", Shape("integer")),
        ("size", Shape("number")),
        ("open", Shape("boolean")),
        ("kind", Shape("choice", choices=("red", "blue"))),
        ("tags", Shape("list", item=Shape("string"), count=2)),
        ("box", Shape("object", fields=(("any", Shape("any")),))),
    ),
)
FITTING = {
    "name": "a", "age": 1, "size": 1.5, "open": True, "kind": "red", "tags": ["a", "b"], "box": {"any": None}
}  # fmt: skip


def test_json_that_fits() -> None:
    assert SHAPE.fits_text(json.dumps(FITTING))
    assert SHAPE.fits_text(json.dumps(FITTING | {"size": 2}))


@pytest.mark.parametrize(
    "change",
    [
        {"name": 1}, {"age": 1.5}, {"age": True}, {"size": "1"}, {"open": 1}, {"kind": "green"},
        {"tags": ["a"]}, {"tags": ["a", 2]}, {"box": {}}, {"box": {"any": 1, "more": 2}}, {"more": 1},
    ],
)  # fmt: skip
def test_json_that_does_not_fit(change: dict[str, object]) -> None:
    assert not SHAPE.fits_text(json.dumps(FITTING | change))


def test_text_that_is_not_json() -> None:
    text = json.dumps(FITTING)
    assert not SHAPE.fits_text(text[:-1])
    assert not SHAPE.fits_text(f"Here it is: {text}")
    assert not SHAPE.fits_text("")


def test_a_shape_is_described_in_words_and_as_a_schema() -> None:
    assert SHAPE.listed == (
        'name (string), age (integer), size (number), open (boolean), kind (one of "red", "blue"), '
        "tags (list of 2 strings), box (object with any)"
    )
    assert SHAPE.schema["required"] == [name for name, _ in SHAPE.fields]
    assert SHAPE.schema["properties"]["tags"] == {
        "type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2
    }  # fmt: skip


def test_described_shapes_have_an_answer_that_fits() -> None:
    draw = random.Random(6)
    for _ in range(200):
        turn = json_shapes.shaped(draw)
        assert turn.right(turn.answer), turn


def test_no_question_of_small_talk_has_two_answers() -> None:
    asks = [ask for asks, _ in book().topics for ask in asks]
    assert len(set(asks)) == len(asks)
    assert all(answer.endswith((".", "?")) for _, answer in book().topics)
