"""The limits and defaults of each parameter, and the complete error of each invalid one."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import Any

import pytest

from baton.base.errors import ErrorKind, FieldError
from baton.v1.types_pb2 import Choices, Grammar, LogitBias, Sampling
from services.router.request import validate
from services.router.request.request import Chat, ChatTurn, ParsedRequest
from tests.router.request.checked import EOS, LIMITS, PARSED, VOCAB, check, parts_of

I64, U64 = 2**63 - 1, 2**64 - 1


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn bits are all ones."""
    monkeypatch.setattr(secrets, "randbits", lambda bits: 2**bits - 1)


def test_unset_fields_have_neutral_values() -> None:
    fields = check(PARSED)
    assert fields == validate.Fields(
        choices=1,
        sampling=Sampling(temperature=1.0, top_p=1.0, seed=U64),
        stop_token_ids=EOS,
        stop=(),
        max_tokens=16,
        min_tokens=0,
        priority=0,
        max_draft_tokens=None,
    )
    assert not fields.sampling.HasField("repetition_penalty")
    assert not fields.sampling.HasField("logprobs")


def test_a_neutral_repetition_penalty_stays_unset() -> None:
    sampling = check(replace(PARSED, repetition_penalty=1.0)).sampling
    assert not sampling.HasField("repetition_penalty")


LEAST: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 2.0**-40,
    "min_p": 0.0,
    "top_n_sigma": 0.0,
    "repetition_penalty": 2.0**-19,
    "presence_penalty": -2.0,
    "frequency_penalty": -2.0,
    "logprobs": 0,
    "seed": 0,
}
MOST: dict[str, Any] = {
    "temperature": 1e6,
    "top_k": VOCAB,
    "top_p": 1.0,
    "min_p": 1.0,
    "top_n_sigma": 1e6,
    "repetition_penalty": 1e6,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "logprobs": 20,
    "seed": U64,
}
BETWEEN: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.25,
    "min_p": 0.125,
    "top_n_sigma": 1.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.75,
    "frequency_penalty": -0.75,
    "logprobs": 3,
    "seed": 11,
}


@pytest.mark.parametrize("values", [LEAST, MOST, BETWEEN], ids=["least", "most", "between"])
def test_valid_values_are_kept(values: dict[str, Any]) -> None:
    sampling = check(replace(PARSED, **values)).sampling
    assert sampling == Sampling(**values)
    assert sampling.HasField("logprobs")


def test_top_k_never_exceeds_the_vocabulary() -> None:
    assert check(replace(PARSED, top_k=2**40)).sampling.top_k == VOCAB


# What workers compute with for numbers beyond theirs.
NEAREST: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 1e30}, {"temperature": 1e6}),
    ({"temperature": 1e300}, {"temperature": 1e6}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 2**63 - 1}, {"top_k": VOCAB}),
    ({"top_p": 0.0}, {"top_p": 2.0**-40}),
    ({"top_p": 1e-60}, {"top_p": 2.0**-40}),
    ({"repetition_penalty": 1e-60}, {"repetition_penalty": 1e-6}),
    ({"repetition_penalty": 1e30}, {"repetition_penalty": 1e6}),
    ({"top_n_sigma": -1}, {"top_n_sigma": 0}),
    ({"top_n_sigma": 1e30}, {"top_n_sigma": 1e6}),
    # As float32, as which workers get it, it is not beyond.
    ({"min_p": 1 + 1e-9}, {"min_p": 1}),
    ({"presence_penalty": -2 - 1e-9}, {"presence_penalty": -2}),
    ({"seed": -1}, {"seed": U64}),
    ({"seed": -(2**63)}, {"seed": 2**63}),
    ({"logit_bias": ((1, -100.5), (2, 1e30))}, {"logit_bias": ((1, -100), (2, 100))}),
]


@pytest.mark.parametrize(("asked", "used"), NEAREST)
def test_numbers_beyond_what_workers_compute_with(asked: dict[str, Any], used: dict[str, Any]) -> None:
    sampling = check(replace(PARSED, **{"seed": 1, **asked})).sampling
    assert sampling == check(replace(PARSED, **{"seed": 1, **used})).sampling


@pytest.mark.parametrize("most", [0, 7])
def test_the_most_drafts_are_kept(most: int) -> None:
    assert check(replace(PARSED, max_draft_tokens=most)).max_draft_tokens == most


def test_a_prediction_is_bounded_and_within_the_vocabulary() -> None:
    longest = [VOCAB - 1, *[0] * 16_383]
    assert validate.check_prediction(longest, LIMITS) is longest
    for ids, message in (
        ([*longest, 0], "prediction has 16385 tokens; at most 16384 tokens are allowed"),
        ([5, VOCAB], "prediction: token id 300 is not in the vocabulary of 300"),
    ):
        with pytest.raises(FieldError) as caught:
            validate.check_prediction(ids, LIMITS)
        assert parts_of(caught.value) == ("prediction", message, None, ErrorKind.INVALID)


@pytest.mark.parametrize(("asked", "used"), [(2**31, 2**31 - 1), (-(2**63), -(2**31))])
def test_priorities_beyond_what_is_kept(asked: int, used: int) -> None:
    assert check(replace(PARSED, priority=asked)).priority == used


def test_biases_of_zero_are_left_out() -> None:
    biases = ((5, 100.0), (0, -100.0), (6, 0.0), (VOCAB - 1, 0.5))
    assert list(check(replace(PARSED, logit_bias=biases)).sampling.logit_bias) == [
        LogitBias(token_id=5, bias=100.0),
        LogitBias(token_id=0, bias=-100.0),
        LogitBias(token_id=VOCAB - 1, bias=0.5),
    ]
    all_of_them = tuple((token, 1.0) for token in range(300))
    assert len(check(replace(PARSED, logit_bias=all_of_them)).sampling.logit_bias) == 300


def test_counts_and_texts_at_their_limits() -> None:
    texts = tuple("a" * 1023 + chr(ord("a") + number) for number in range(15))
    ids = (0, 1, 2, 3, 4, VOCAB - 1)
    fields = check(replace(PARSED, n=128, best_of=128, stop=(*texts, "b"), stop_token_ids=ids))
    assert (fields.choices, fields.stop) == (128, (*texts, "b"))
    assert fields.stop_token_ids == (*ids, *EOS)


def test_duplicates_count_once() -> None:
    fields = check(replace(PARSED, stop=("b", "a", "b"), stop_token_ids=(9, 256, 9)))
    assert (fields.stop, fields.stop_token_ids) == (("b", "a"), (9, 256, 257))


def test_an_ignored_end_of_sequence_does_not_stop_the_output() -> None:
    fields = check(replace(PARSED, ignore_eos=True, stop_token_ids=(9,)))
    assert fields.stop_token_ids == (9,)


# The fields that are asked for; the error's parameter and message.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.5}, "temperature", "temperature must be at least 0"),
    ({"temperature": math.nan}, "temperature", "temperature must be a finite number"),
    ({"temperature": math.inf}, "temperature", "temperature must be a finite number"),
    ({"temperature": -1e300}, "temperature", "temperature must be at least 0"),
    ({"top_k": -2}, "top_k", f"top_k must be from -1 to {I64}"),
    ({"top_k": 2**63}, "top_k", f"top_k must be from -1 to {I64}"),
    ({"top_p": -0.5}, "top_p", "top_p must be from 0 to 1"),
    ({"top_p": 1.5}, "top_p", "top_p must be from 0 to 1"),
    ({"top_p": math.inf}, "top_p", "top_p must be a finite number"),
    ({"min_p": -0.5}, "min_p", "min_p must be from 0 to 1"),
    ({"min_p": 1.5}, "min_p", "min_p must be from 0 to 1"),
    ({"top_n_sigma": -1.5}, "top_n_sigma", "top_n_sigma must be at least -1"),
    ({"presence_penalty": -2.5}, "presence_penalty", "presence_penalty must be from -2 to 2"),
    ({"presence_penalty": 2.5}, "presence_penalty", "presence_penalty must be from -2 to 2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "frequency_penalty must be from -2 to 2"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "frequency_penalty must be from -2 to 2"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "repetition_penalty must be above 0"),
    ({"repetition_penalty": -1.0}, "repetition_penalty", "repetition_penalty must be above 0"),
    ({"repetition_penalty": math.inf}, "repetition_penalty", "repetition_penalty must be a finite number"),
    ({"seed": -(2**63) - 1}, "seed", f"seed must be from -{2**63} to {U64}"),
    ({"seed": 2**64}, "seed", f"seed must be from -{2**63} to {U64}"),
    ({"priority": 2**63}, "priority", f"priority must be from -{2**63} to {I64}"),
    ({"max_draft_tokens": 8}, "max_draft_tokens", "max_draft_tokens must be from 0 to 7"),
    ({"max_draft_tokens": -1}, "max_draft_tokens", "max_draft_tokens must be from 0 to 7"),
    ({"logprobs": -1}, "logprobs", "logprobs must be from 0 to 20"),
    (
        {"logprobs": 21, "api_names": {"logprobs": "top_logprobs"}},
        "top_logprobs",
        "top_logprobs must be from 0 to 20",
    ),
    ({"logit_bias": ((1, math.inf),)}, "logit_bias", "logit_bias must be a finite number"),
    (
        {"logit_bias": ((VOCAB, 1.0),)},
        "logit_bias",
        "logit_bias: token id 300 is not in the vocabulary of 300",
    ),
    ({"logit_bias": ((1, 1.0), (1, 2.0))}, "logit_bias", "logit_bias names a token twice"),
    (
        {"logit_bias": tuple((token, 1.0) for token in range(301))},
        "logit_bias",
        "at most 300 tokens in logit_bias; got 301",
    ),
    ({"n": 0}, "n", "n must be from 1 to 128"),
    ({"n": 129}, "n", "n must be from 1 to 128"),
    ({"n": 2, "best_of": 1}, "best_of", "best_of other than n is not supported"),
    ({"best_of": 2}, "best_of", "best_of other than n is not supported"),
    (
        {"stop_token_ids": (1, 2, 3, 4, 5, 6, 7)},
        "stop_token_ids",
        "at most 8 stop token ids, the model's own included; got 9",
    ),
    (
        {"stop_token_ids": (1, VOCAB)},
        "stop_token_ids",
        "stop_token_ids: token id 300 is not in the vocabulary of 300",
    ),
    ({"stop": ("a",) * 17}, "stop", "at most 16 stop strings; got 17"),
    ({"stop": ("a", "")}, "stop", "a stop string must not be empty"),
    ({"stop": ("a", "a" * 1025)}, "stop", "a stop string has at most 1024 characters"),
    (
        {"chat": Chat((ChatTurn("user", "a"), ChatTurn("narrator", "b")))},
        "messages",
        "messages[1].role must be one of assistant, developer, system, tool, user",
    ),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_an_error_names_the_field_and_its_limits(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(FieldError) as caught:
        check(replace(PARSED, **fields))
    assert parts_of(caught.value) == (param, message, None, ErrorKind.INVALID)


def test_all_roles_that_templates_know_are_accepted() -> None:
    roles = ("system", "developer", "user", "assistant", "tool")
    check(replace(PARSED, chat=Chat(tuple(ChatTurn(role, "a") for role in roles))))


@pytest.mark.parametrize(
    ("model", "shown"), [("other", "other"), ("m" * 64, "m" * 64), ("m" * 65, f"{'m' * 64}…")]
)
def test_another_model_does_not_exist(model: str, shown: str) -> None:
    with pytest.raises(FieldError) as caught:
        check(ParsedRequest(model=model, text="a"))
    message = f"the model '{shown}' does not exist"
    assert parts_of(caught.value) == ("model", message, "model_not_found", ErrorKind.NOT_FOUND)


def test_a_models_name_has_a_length() -> None:
    """The name stands in logs and in errors before it is known to be served."""
    longest = "m" * 1024
    validate.check_model(ParsedRequest(model=longest), longest)
    with pytest.raises(FieldError) as caught:
        validate.check_model(ParsedRequest(model=longest + "m"), longest + "m")
    message = "the model's name has more than 1024 characters"
    assert parts_of(caught.value) == ("model", message, None, ErrorKind.INVALID)


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        ([0, -1, -2], "-1"),
        ([0, 299, 300, 301], "300"),
        ([301, -1], "301"),
        ([0, 10**70], f"1{'0' * 63}…"),
    ],
)
def test_the_first_token_id_outside_the_vocabulary_is_named(ids: list[int], shown: str) -> None:
    with pytest.raises(FieldError) as caught:
        validate.check_token_ids("prompt", ids, VOCAB)
    message = f"prompt: token id {shown} is not in the vocabulary of 300"
    assert parts_of(caught.value) == ("prompt", message, None, ErrorKind.INVALID)


def test_token_ids_of_the_whole_vocabulary_are_kept() -> None:
    ids = list(range(VOCAB))
    assert validate.check_token_ids("prompt", ids, VOCAB) is ids


def test_each_choice_draws_with_a_seed_of_its_own() -> None:
    asked = Sampling(temperature=0.5, seed=U64 - 1, top_p=0.25)
    drawn = [validate.with_seed_of(asked, choice) for choice in range(4)]
    assert drawn == [
        Sampling(temperature=0.5, seed=seed, top_p=0.25) for seed in (U64 - 1, U64, 0, 1)
    ]  # fmt: skip
    assert drawn[0] is asked
    assert asked.seed == U64 - 1


def test_a_prompt_is_a_text_or_ids_or_a_conversation() -> None:
    bare = replace(PARSED, text=None)
    check(replace(bare, token_ids=(1,)))
    check(replace(bare, tokenized=(1,)))
    check(replace(bare, chat=Chat((ChatTurn("user", "a"),))))


@pytest.mark.parametrize(
    "prompt", [{"text": ""}, {"text": None}, {"text": None, "token_ids": ()}, {"text": None, "tokenized": ()}]
)
def test_an_empty_prompt_is_refused_before_it_is_tokenised(prompt: dict[str, Any]) -> None:
    with pytest.raises(FieldError) as caught:
        check(replace(PARSED, api_names={"prompt": "messages"}, **prompt))
    assert parts_of(caught.value) == ("messages", "the prompt is empty", None, ErrorKind.INVALID)


@pytest.mark.parametrize("parsed", [replace(PARSED, token_ids=(1,)), PARSED, replace(PARSED, tokenized=(1,))])
def test_a_tokenised_prompt_is_within_the_vocabulary(parsed: ParsedRequest) -> None:
    """The ids of a helper process are checked there: here that would delay other streams."""
    fields = check(parsed)
    validate.check_prompt(parsed, fields, (0, VOCAB - 1), LIMITS)
    if parsed.tokenized is not None:
        validate.check_prompt(parsed, fields, (VOCAB,), LIMITS)
        return
    with pytest.raises(FieldError) as caught:
        validate.check_prompt(parsed, fields, (1, VOCAB), LIMITS)
    message = "prompt: token id 300 is not in the vocabulary of 300"
    assert parts_of(caught.value) == ("prompt", message, None, ErrorKind.INVALID)


LARK = "start: r0\n" + "".join(f'  ?r{n}[x=1]: r{n + 1}\n     | "a: b"\n' for n in range(1999))
BOUNDED = {
    "bytes": (Grammar(regex="a" * (128 * 1024 - 4)), Grammar(regex="a" * 128 * 1024)),
    "choices": (
        Grammar(choice=Choices(choices=["a"] * 10_000)),
        Grammar(choice=Choices(choices=["a"] * 10_001)),
    ),
    "rules of Lark": (Grammar(grammar=LARK), Grammar(grammar=LARK + "LAST: /a/")),
    "rules of GBNF": (
        Grammar(grammar="root ::= r\n" + "r-1 ::= [:] # x: y\n" * 1999),
        Grammar(grammar="root ::= r\n" + "r-1 ::= [:] # x: y\n" * 2000),
    ),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_the_size_of_a_grammar_is_bounded(name: str) -> None:
    most, more = BOUNDED[name]
    check(replace(PARSED, grammar=most))
    with pytest.raises(FieldError, match=f"at most .* {name.split()[0]}|bytes; at most") as caught:
        check(replace(PARSED, grammar=more))
    assert (caught.value.param, caught.value.kind) == ("grammar", ErrorKind.INVALID)


@pytest.mark.parametrize("empty", [Grammar(), Grammar(choice=Choices())])
def test_an_empty_grammar_is_refused(empty: Grammar) -> None:
    with pytest.raises(FieldError, match=r"^grammar is empty$") as caught:
        check(replace(PARSED, grammar=empty))
    assert (caught.value.param, caught.value.kind) == ("grammar", ErrorKind.INVALID)


def test_the_end_of_a_guided_output_is_that_of_its_grammar() -> None:
    with pytest.raises(FieldError, match=r"^ignore_eos cannot be combined with grammar: ") as caught:
        check(replace(PARSED, grammar=Grammar(regex="a"), ignore_eos=True))
    assert (caught.value.param, caught.value.kind) == ("ignore_eos", ErrorKind.INVALID)


def test_a_text_beyond_the_context_is_refused_by_its_bytes() -> None:
    error = validate.text_exceeds_context("messages", 4097, 16)
    message = "the prompt has 4097 bytes, more than the model's context of 16 tokens can have"
    assert parts_of(error) == ("messages", message, "context_length_exceeded", ErrorKind.INVALID)
