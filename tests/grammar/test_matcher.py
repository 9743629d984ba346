"""Grammars of every kind: which tokens they allow, how they end, what is refused."""

from __future__ import annotations

import gc
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.v1.types_pb2 import Choices, Grammar, Limits
from services.grammar.grammar_source import grammar_source
from services.grammar.matcher import GuidedSequence, Matchers
from tests.grammar.model import (
    CHARACTER_OF,
    END_ID,
    OTHER_END_ID,
    allowed,
    ids_of,
    make_folder,
    make_matchers,
    open_grammar,
    text_of,
)
from tests.support.json_schemas import schemas, validator_of

ENDS = {END_ID, OTHER_END_ID}
LIMITS = Limits(max_tokens=100, stop_token_ids=sorted(ENDS))
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
)


@pytest.fixture
def matchers(tmp_path: Path) -> Matchers:
    return make_matchers(tmp_path)


def walk(matchers: Matchers, grammar: Grammar, seed: int) -> str:
    """A random text of the grammar, which ends by an end-of-sequence id."""
    draw, sequence, text = random.Random(seed), open_grammar(matchers, grammar, LIMITS, ()), ""
    for _ in range(200):
        token = draw.choice(sorted(allowed(sequence.mask())))
        if token in ENDS:
            return text
        text += CHARACTER_OF.get(token, " ")
        sequence.advance((token,))
    raise AssertionError(f"no end after {text!r}")


def test_choices_of_which_one_begins_another(matchers: Matchers) -> None:
    grammar = Grammar(choice=Choices(choices=["a", "ab", 'x"y']))
    sequence = open_grammar(matchers, grammar, LIMITS, ())
    assert allowed(sequence.mask()) == set(ids_of("ax"))
    sequence.advance(ids_of("a"))
    assert allowed(sequence.mask()) == {*ids_of("b"), *ENDS}
    assert {walk(matchers, grammar, seed) for seed in range(40)} == {"a", "ab", 'x"y'}


@pytest.mark.parametrize("seed", range(8))
def test_every_walk_is_in_its_language(matchers: Matchers, seed: int) -> None:
    assert re.fullmatch("[a-c]{2,4}-[0-9]", walk(matchers, Grammar(regex="[a-c]{2,4}-[0-9]"), seed))
    lark = Grammar(grammar='start: "(" start ")" | "x"')
    assert re.fullmatch(r"\(*x\)*", walk(matchers, lark, seed))
    gbnf = Grammar(grammar='root ::= "y" | "z" root')
    assert re.fullmatch("z*y", walk(matchers, gbnf, seed))
    document = json.loads(walk(matchers, Grammar(json_schema=SCHEMA), seed))
    assert document.keys() == {"ok", "n"}
    assert document["n"] in range(10)


def test_every_walk_through_a_random_schema_is_valid(matchers: Matchers) -> None:
    """300 schemas, and in each a document drawn token by token, uniformly among those allowed."""
    total = 0
    for number, schema in enumerate(schemas(300, seed=1)):
        draw = random.Random(number)
        sequence = open_grammar(matchers, Grammar(json_schema=json.dumps(schema)), LIMITS, ())
        ids: list[int] = []
        while (token := draw.choice(sorted(allowed(sequence.mask())))) not in ENDS:
            ids.append(token)
            sequence.advance((token,))
            assert len(ids) < 512, schema
        validator_of(schema).validate(json.loads(text_of(ids)))
        total += len(ids)
    assert total > 5000


def test_the_state_follows_from_the_output_alone(matchers: Matchers) -> None:
    """A new attempt, at another worker, goes on where the last one was."""
    grammar, text = Grammar(json_schema=SCHEMA), '{"ok":true,"n":7}'
    live = open_grammar(matchers, grammar, LIMITS, ())
    for length, token in enumerate(ids_of(text)):
        replayed = open_grammar(matchers, grammar, LIMITS, ids_of(text)[:length])
        assert allowed(replayed.mask()) == allowed(live.mask())
        live.advance((token,))
    assert allowed(live.mask()) == ENDS


def test_white_space_between_json_tokens_is_bounded(matchers: Matchers) -> None:
    blank = next(iter({token for token in range(256) if token not in CHARACTER_OF} & _blank_ids(matchers)))
    sequence = open_grammar(matchers, Grammar(json_schema=SCHEMA), LIMITS, ids_of("{"))
    assert blank in allowed(sequence.mask())
    sequence.advance((blank,))
    assert allowed(sequence.mask()) == set(ids_of('"'))
    without = Grammar(json_schema=SCHEMA, whitespace_pattern="")
    assert blank not in allowed(open_grammar(matchers, without, LIMITS, ids_of("{")).mask())


def _blank_ids(matchers: Matchers) -> set[int]:
    return allowed(open_grammar(matchers, Grammar(regex=" "), LIMITS, ()).mask())


def test_a_mask_is_written_over_what_was_there_and_of_the_vocabularys_width_only(matchers: Matchers) -> None:
    sequence = open_grammar(matchers, Grammar(regex="(ab)+"), LIMITS, ids_of("ab"))
    expected = sequence.mask()
    row = np.full_like(expected, 0xFFFFFFFF)
    sequence.write_mask(row)
    assert np.array_equal(row, expected)
    for wrong in (row[:-1], np.zeros(len(row) + 1, dtype=np.uint32)):
        with pytest.raises(ValueError, match="words"):
            sequence.write_mask(wrong)


def test_stop_ids_wait_for_min_tokens_and_a_mask_without_any_token_is_an_error(matchers: Matchers) -> None:
    limits = Limits(max_tokens=9, min_tokens=2, stop_token_ids=sorted(ENDS))
    sequence = open_grammar(matchers, Grammar(regex="a+"), limits, ids_of("a"))
    assert allowed(sequence.mask()) == set(ids_of("a"))
    sequence.advance(ids_of("a"))
    assert allowed(sequence.mask()) == {*ids_of("a"), *ENDS}
    with pytest.raises(BatonError, match="allows no token") as caught:
        open_grammar(matchers, Grammar(regex="a"), limits, ids_of("a")).mask()
    assert caught.value.kind is ErrorKind.INVALID


def test_a_token_outside_the_grammar_is_an_error(matchers: Matchers) -> None:
    for text in ("b", "abb", "abc"):
        with pytest.raises(BatonError, match="outside the grammar") as caught:
            open_grammar(matchers, Grammar(regex="ab"), LIMITS, ids_of(text))
        assert caught.value.kind is ErrorKind.INTERNAL
    large = open_grammar(matchers, Grammar(regex="a{1000000}"), LIMITS, ())
    large.mask()
    with pytest.raises(BatonError, match="too many") as caught:
        large.advance(ids_of("a"))
    assert caught.value.kind is ErrorKind.INVALID


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(json_schema='{"type": "objec"}'),
        Grammar(json_schema='{"type": "string", "pattern": "("}'),
        Grammar(json_schema='{"$ref": "#/nowhere"}'),
        Grammar(json_schema='{"enum": []}'),
        Grammar(json_schema='{"not": {}}'),
        Grammar(json_schema="[1"),
        Grammar(json_schema="5"),
        Grammar(json_schema='{"type":"array","items":' * 2000 + "{}" + "}" * 2000),
        Grammar(json_schema=SCHEMA, whitespace_pattern="("),
        Grammar(regex="["),
        Grammar(grammar="start: ("),
        Grammar(grammar="start: other"),
        Grammar(grammar="nothing"),
        Grammar(),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(matchers: Matchers, grammar: Grammar) -> None:
    with pytest.raises(BatonError) as caught:
        open_grammar(matchers, grammar, LIMITS, ())
    assert caught.value.kind is ErrorKind.INVALID
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


def test_hostile_grammars_end_within_their_limits(matchers: Matchers) -> None:
    """Exponential references, ambiguous recursion, a huge enum, intersections of patterns, counted
    repeats."""
    nested = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    exponential = {"$defs": {**nested, "d40": {"type": "string"}}, "$ref": "#/$defs/d0"}
    patterns = [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{n}}}$"} for n in range(2, 14)]
    hostile = [
        Grammar(json_schema=json.dumps(exponential)),
        Grammar(grammar='start: a\na: a "x" | a a | "y" a | "y"'),
        Grammar(json_schema=json.dumps({"enum": [f"value {number}" for number in range(8000)]})),
        Grammar(json_schema=json.dumps({"allOf": patterns})),
        Grammar(regex="((a{1,100}){1,100}){1,100}b"),
        Grammar(regex="(a|b)*a(a|b){2000}"),
    ]
    refused = []
    for number, grammar in enumerate(hostile):
        try:
            sequence = open_grammar(matchers, grammar, LIMITS, ())
            for _ in range(30):
                if text := allowed(sequence.mask()) - ENDS:
                    sequence.advance((min(text),))
        except BatonError as error:
            refused.append((number, error.kind))
    assert {kind for _, kind in refused} == {ErrorKind.INVALID}
    assert [number for number, _ in refused] == [3, 4], "too many states; the others are cheap"


def test_an_end_of_sequence_id_that_is_spelt_like_text_only_ends(tmp_path: Path) -> None:
    (sharp,) = ids_of("#")
    matchers = Matchers.of_model(make_folder(tmp_path, eos_token_id=sharp))
    sequence = open_grammar(matchers, Grammar(regex="a#?b"), LIMITS, ids_of("a"))
    assert allowed(sequence.mask()) == set(ids_of("b"))
    sequence.advance(ids_of("b"))
    assert allowed(sequence.mask()) == {sharp}


def test_a_model_without_an_end_cannot_be_guided(tmp_path: Path) -> None:
    with pytest.raises(BatonError, match="end-of-sequence"):
        Matchers.of_model(make_folder(tmp_path, eos_token_id=None))


def test_an_unusable_tokenizer_is_named(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "tokenizer.json").write_text("{}")
    with pytest.raises(BatonError, match="tokenizer") as caught:
        Matchers.of_model(tmp_path)
    assert caught.value.kind is ErrorKind.INVALID


def large_schema(number: int) -> Grammar:
    """About 30 KB, unlike any other; about 2 MB once it is compiled."""
    fields = {
        f"field_{number}_{field}": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 5}}}
        for field in range(300)
    }
    return Grammar(json_schema=json.dumps({"type": "object", "properties": fields}))


def test_what_is_kept_is_bounded_in_bytes(tmp_path: Path) -> None:
    gc.collect()  # what is freed meanwhile counts as free for grammars
    most, largest = 4 << 20, 0
    matchers = Matchers.of_model(make_folder(tmp_path), kept_bytes=most)
    for number in range(10):
        grammar = large_schema(number)
        assert 25_000 < grammar.ByteSize() < 40_000
        open_grammar(matchers, grammar, LIMITS, ()).mask()
        assert matchers.keeps(grammar_source(grammar))
        largest = max(largest, matchers.used_bytes)
    assert largest < 2 * most
    kept = [matchers.keeps(grammar_source(large_schema(number))) for number in range(10)]
    assert not kept[0]
    assert kept[-2:] == [True, True]


def test_sequences_that_take_all_memory_leave_none_for_another(tmp_path: Path) -> None:
    gc.collect()
    matchers = Matchers.of_model(make_folder(tmp_path), most_bytes=6 << 20, kept_bytes=2 << 20)
    running: list[GuidedSequence] = []

    def run_all() -> None:
        for number in range(64):
            running.append(open_grammar(matchers, large_schema(number), LIMITS, ()))

    with pytest.raises(BatonError, match="no memory for another") as caught:
        run_all()
    assert caught.value.kind is ErrorKind.CONFLICT
    assert len(running) > 1
    running[0].mask()
    running.clear()
    open_grammar(matchers, large_schema(64), LIMITS, ()).mask()
